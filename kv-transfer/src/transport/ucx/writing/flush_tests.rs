//! A flush waits for exactly as many writes as were posted, and addresses and keys that are too short do not reach UCX.

use super::Ucx;
use crate::message::{MESSAGE_BYTES_MAX, RemoteRegion};
use crate::plan::CopyRun;
use crate::pool_turns::SharedPoolMemory;
use crate::transport::tcp::Listen;
use crate::transport::ucx::Start;
use crate::transport::{ConnId, Event, Transport};
use crate::window::Window;
use crate::{Party, TransferConfig, TransportChoice, UcxLanes, UcxWrites};
use baton_memory::HostPool;
use baton_types::{
    Compatibility, Digest, Dtype, Incarnation, InstanceId, KvLayout, KvPoolMap, NumericsClass, TicketId,
};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PATIENCE: Duration = Duration::from_secs(20);
const LOOPBACK: IpAddr = IpAddr::V4(Ipv4Addr::LOCALHOST);

pub(in super::super) struct Side {
    pub(in super::super) ucx: Ucx,
    pub(in super::super) region: Arc<HostPool>,
    pub(in super::super) events: Vec<Event>,
}

impl Side {
    fn start(writes: UcxWrites) -> Self {
        let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
        let class =
            NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
        let compatibility = Compatibility { model: Digest([0; 32]), layout: layout.clone(), class };
        let party = Party { instance: InstanceId::try_new("t").unwrap(), incarnation: Incarnation(1) };
        let map = KvPoolMap::try_new(layout, 1).unwrap();
        let choice = TransportChoice::ucx(UcxLanes::LoopbackTcp, LOOPBACK);
        let config = TransferConfig::new(party, compatibility, map, choice);
        let listen = Listen { bind: LOOPBACK, port: 0, has_lanes: true };
        let start = Start { lanes: &UcxLanes::LoopbackTcp, listen, devices: None, writes };
        let region = HostPool::new(4096).unwrap();
        let (ucx, _) = Ucx::start(start, &config, SharedPoolMemory::new(region.clone())).unwrap();
        Self { ucx, region, events: Vec::new() }
    }

    fn came(&self, conn: ConnId) -> u64 {
        self.ucx.connections[&conn].writing().unwrap().door.stored()
    }

    fn set_came(&self, conn: ConnId, came: u64) {
        self.ucx.connections[&conn].writing().unwrap().door.incoming.borrow_mut().set_stored(came);
    }

    /// Pending flushes, with the number of writes that each waits for.
    fn waiting(&self, conn: ConnId) -> &[(u64, u64)] {
        &self.ucx.connections.writing(conn).unwrap().flushes
    }

    pub(in super::super) fn has_flushed(&self) -> bool {
        self.events.iter().any(|event| matches!(event, Event::Flushed(..)))
    }
}

pub(in super::super) fn until(a: &mut Side, b: &mut Side, what: &str, mut done: impl FnMut(&Side, &Side) -> bool) {
    let by = Instant::now() + PATIENCE;
    while !done(a, b) {
        assert!(Instant::now() < by, "never: {what}");
        a.ucx.progress(Instant::now(), &mut a.events);
        b.ucx.progress(Instant::now(), &mut b.events);
        std::thread::yield_now();
    }
}

/// Two connected sides, with the connection of each; the second one may be written to.
pub(in super::super) fn connected(writes: UcxWrites) -> (Side, ConnId, Side, ConnId) {
    connected_as(writes, |region| region)
}

/// The same, where the first side greets with another region than its own.
pub(in super::super) fn connected_as(
    writes: UcxWrites,
    says: fn(RemoteRegion) -> RemoteRegion,
) -> (Side, ConnId, Side, ConnId) {
    let (mut a, mut b) = (Side::start(writes), Side::start(writes));
    let from = a.ucx.connect(&b.ucx.address()).unwrap();
    a.ucx.send(from, vec![1]);
    let said = |side: &Side| side.events.iter().any(|event| matches!(event, Event::Message(..)));
    until(&mut a, &mut b, "a first message", |_, b| said(b));
    let to = b.events.iter().find_map(|e| if let Event::Message(to, _) = e { Some(*to) } else { None }).unwrap();
    b.ucx.send(to, vec![2]);
    until(&mut a, &mut b, "a first answer", |a, _| said(a));
    let (region_a, region_b) = (a.ucx.region(), b.ucx.region());
    a.ucx.greeted(from, &region_b, MESSAGE_BYTES_MAX).unwrap();
    b.ucx.greeted(to, &says(region_a), MESSAGE_BYTES_MAX).unwrap();
    b.ucx.open_window(to, TicketId(5), Window::of(std::iter::once(0..4096).collect()));
    (a, from, b, to)
}

#[test]
fn a_flush_waits_for_every_write_that_was_posted() {
    let (mut a, from, mut b, to) = connected(UcxWrites::ByLanes);
    (0..3).for_each(|at| a.ucx.put(from, TicketId(5), CopyRun { from: 64 * at, to: 64 * at, len: 64 }));
    until(&mut a, &mut b, "three writes", |_, b| b.came(to) == 3);
    // As if one of them were still in flight.
    b.set_came(to, 2);
    a.ucx.flush(from, 7);
    until(&mut a, &mut b, "the flush came", |a, b| a.has_flushed() || !b.waiting(to).is_empty());
    assert_eq!((a.has_flushed(), b.waiting(to)), (false, [(7, 3)].as_slice()));
    b.set_came(to, 3);
    until(&mut a, &mut b, "flushed", |a, _| a.has_flushed());
}

/// A peer that answers before it has received anything.
#[test]
fn a_flush_ends_after_every_write_that_it_covers_whatever_the_peer_says() {
    let (mut a, from, mut b, _) = connected(UcxWrites::ByLanes);
    let put = |a: &mut Side| a.ucx.put(from, TicketId(5), CopyRun { from: 0, to: 0, len: 64 });
    put(&mut a);
    a.ucx.flush(from, 7);
    put(&mut a);
    // Both writes are under way until UCX has said that they have ended.
    a.ucx.channel_event(Event::Flushed(from, 7), Instant::now(), &mut a.events);
    assert!(!a.has_flushed());
    until(&mut a, &mut b, "flushed", |a, _| a.has_flushed());
    let done = a.events.iter().position(|event| matches!(event, Event::PutDone(..)));
    let flushed = a.events.iter().position(|event| matches!(event, Event::Flushed(..)));
    assert!(done < flushed);
}

#[test]
fn an_address_that_is_too_short_is_refused() {
    let (mut a, b) = (Side::start(UcxWrites::ByLanes), Side::start(UcxWrites::ByLanes));
    let conn = a.ucx.connect(&b.ucx.address()).unwrap();
    // After the nonce there is nothing, and then the beginning of an address.
    for len in [16, 17, 31] {
        assert!(a.ucx.attached(conn, &vec![0x10; len], &mut Vec::new()).is_err(), "{len} bytes");
    }
}

#[test]
fn a_region_beyond_the_end_of_memory_is_refused() {
    let (mut a, from, b, _) = connected(UcxWrites::ByLanes);
    let region = b.ucx.region();
    let at = |address| RemoteRegion { address, ..region.clone() };
    assert!(a.ucx.greeted(from, &at(u64::MAX - region.bytes), MESSAGE_BYTES_MAX).is_ok());
    assert!(a.ucx.greeted(from, &at(u64::MAX - region.bytes + 1), MESSAGE_BYTES_MAX).is_err());
}

#[test]
fn a_key_that_is_too_short_is_refused() {
    let (a, from, _b, _) = connected(UcxWrites::ByLanes);
    let endpoint = a.ucx.connections[&from].endpoint().unwrap();
    for len in [1, 8] {
        assert!(endpoint.unpack(&[0; 64][..len]).is_err(), "{len} bytes");
    }
    assert!(endpoint.unpack(&[0; 9]).is_ok(), "a key without domains");
}
