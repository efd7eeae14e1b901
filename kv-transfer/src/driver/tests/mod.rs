//! Tests of the driver over a transport that only records calls.

use super::quarantine_bound::QuarantineLoad;
use super::*;
use crate::calls::Inline;
use crate::message::{Direction, Hello, Offer, RemoteRegion, message_bytes_max};
use crate::pool_turns::SharedPoolMemory;
use crate::transport::ConnId;
use crate::verify::{Job, VerifierThread};
use crate::{
    AdoptReply, BlockHold, GrantReply, Peer, PutOutcome, PutRequest, QuarantinedBlocks, ReserveOffer, SinkHandler,
    TransferAddress, TransportChoice, VerifiedHandoff,
};
use baton_memory::HostPool;
use baton_types::fence::AlreadyDone;
use baton_types::{
    BlockId, BlockTables, Compatibility, Digest, Dtype, GroupBlocks, Incarnation, InstanceId, KvLayout, KvPoolMap,
    NumericsClass, RequestId, TicketId,
};
use noting::Noting;
use std::any::Any;
use tokio::sync::oneshot;

mod busy;
mod draining;
mod ending;
mod fencing;
mod gets;
mod noting;
mod pins;
mod places;
mod starts;

/// The recorded events, in order.
type Notes = Arc<Mutex<Vec<&'static str>>>;

/// Blocks that record what happens to them.
struct Held(Notes, BlockTables);

/// The same, with cached tokens.
struct HeldPart(Held, u32);

impl BlockHold for HeldPart {
    fn blocks(&self) -> &BlockTables {
        self.0.blocks()
    }
    fn cached_tokens(&self) -> u32 {
        self.1
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        Box::new(self.0).quarantine()
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.0.lock().push("let go");
    }
}
impl BlockHold for Held {
    fn blocks(&self) -> &BlockTables {
        &self.1
    }
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        self.0.lock().push("quarantined");
        self
    }
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}
impl QuarantinedBlocks for Held {
    fn release(self: Box<Self>) {}
}

/// Grants every offer.
struct Granting(Notes);

impl SinkHandler for Granting {
    fn reserve(&self, _: ReserveOffer, reply: GrantReply) {
        reply.grant(Box::new(Held(self.0.clone(), blocks())));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
}

const CONN: ConnId = ConnId(1);

fn blocks() -> BlockTables {
    BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0)]]))
}

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) }
}

fn config(name: &str) -> TransferConfig {
    let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
    let class = NumericsClass { order: "t".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 0 };
    let compatibility = Compatibility { model: Digest([0; 32]), layout: layout.clone(), class };
    let choice = TransportChoice::tcp([127, 0, 0, 1].into());
    TransferConfig::new(party(name), compatibility, KvPoolMap::try_new(layout, 4).unwrap(), choice)
}

/// The greeting that `peer` sends to `here`.
fn greeting() -> Box<Hello> {
    let theirs = config("peer");
    let region = RemoteRegion { bytes: theirs.map.bytes() as u64, ..RemoteRegion::default() };
    hello(&theirs, region, party("here"))
}

impl Driver {
    fn noting() -> (Self, Notes) {
        Self::noting_over(HostPool::new(config("here").map.bytes()).unwrap())
    }

    fn noting_over(region: Arc<HostPool>) -> (Self, Notes) {
        let (driver, notes, _) = Self::noting_limits(region);
        (driver, notes)
    }

    fn noting_limits(region: Arc<HostPool>) -> (Self, Notes, Arc<Mutex<usize>>) {
        Self::noting_with(config("here"), region)
    }

    fn noting_with(config: TransferConfig, region: Arc<HostPool>) -> (Self, Notes, Arc<Mutex<usize>>) {
        let (notes, limit) = (Notes::default(), Arc::default());
        let verifier = VerifierThread::start(SharedPoolMemory::new(region), config.map.clone()).unwrap();
        let ports = Ports {
            transport: Box::new(Noting {
                notes: notes.clone(),
                message_bytes_max: Arc::clone(&limit),
                one_sided_gets: true,
                ..Noting::default()
            }),
            wake: Box::new(|| {}),
            verifier: Box::new(verifier),
            calls: Box::new(Inline(Arc::new(Granting(notes.clone())))),
            draw: Box::new(rand::random),
        };
        (Self::new(config, ports).unwrap(), notes, limit)
    }

    fn commands(&mut self, now: Instant) {
        for command in self.inbox.drain() {
            self.command(command, now);
        }
    }

    /// What was written under closed windows is stored.
    fn windows_close(&mut self, now: Instant) {
        let mut closed = Vec::new();
        self.transport.progress(now, &mut closed);
        closed.into_iter().for_each(|event| self.event(event, now));
    }

    fn hear(&mut self, message: &Message, now: Instant) {
        self.event(Event::Message(CONN, message.encode()), now);
    }

    fn sinks(&self) -> impl Iterator<Item = &put::Sink> {
        let sink = |key| match &self.table.get(key)?.role {
            Role::Sink(sink) => Some(&**sink),
            _ => None,
        };
        self.table.keys().into_iter().filter_map(sink)
    }

    /// The ticket given for the peer's handoff number.
    fn ticket_of(&self, number: u64) -> TicketId {
        self.sinks().find(|sink| sink.number() == number).unwrap().ticket()
    }

    /// The peer's numbers of its granted handoffs.
    fn granted(&self) -> Vec<u64> {
        self.sinks().filter(|sink| sink.is_granted()).map(put::Sink::number).collect()
    }

    fn exposed(&self) -> (usize, usize) {
        let QuarantineLoad { quarantined, unfenced } =
            self.quarantine_load(&party("peer").instance, HandoffKey(u64::MAX));
        (quarantined, unfenced)
    }

    fn is_greeted(&self, conn: ConnId) -> bool {
        self.connections.get(conn).is_some_and(|c| c.terms().is_some())
    }
}

/// An offer of `peer` to `here`.
fn offer(handoff: u64, tokens: u32) -> Message {
    Message::Offer(Box::new(Offer {
        handoff,
        request_id: RequestId::try_new(format!("r{handoff}")).unwrap(),
        source: party("peer"),
        sink: party("here"),
        direction: Direction::Put,
        shards: 1,
        from: 0,
        tokens,
        deadline_ms: 60_000,
        name: Vec::new(),
    }))
}

/// Begins a put to a peer that then greets.
fn begin_put(driver: &mut Driver, notes: &Notes, now: Instant) -> (HandoffKey, oneshot::Receiver<PutOutcome>) {
    let peer = Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let (request_id, deadline) = (RequestId::try_new("r").unwrap(), now + Duration::from_secs(60));
    let hold = Box::new(Held(notes.clone(), blocks()));
    let request = PutRequest { request_id, tokens: 16, blocks: blocks(), deadline, hold };
    let (outcome, told) = oneshot::channel();
    let key = driver.inbox.put(peer, request, outcome).unwrap();
    driver.commands(now);
    driver.hear(&Message::Welcome(greeting()), now);
    (key, told)
}

#[test]
fn blocks_are_held_until_the_transport_reads_them_no_more() {
    let (mut driver, notes) = Driver::noting();
    let now = Instant::now();
    let (key, mut told) = begin_put(&mut driver, &notes, now);
    let ticket = TicketId(7);
    driver.hear(&Message::Grant { handoff: key.0, ticket, blocks: blocks(), from: 0 }, now);
    driver.inbox.launched(key, 0, 16, Arc::new(AlreadyDone));
    driver.commands(now);
    driver.post(now);
    assert_eq!(*notes.lock(), ["put"], "a write is under way");
    driver.finish(now, now);
    drop(driver); // Checksums read the blocks as well, until their thread has ended.
    assert_eq!(*notes.lock(), ["put", "shutdown", "let go"]);
    assert!(matches!(told.try_recv(), Ok(Err(HandoffFailure::Stopped))));
}

#[test]
fn a_stop_ends_what_peers_began() {
    let (mut driver, notes) = Driver::noting();
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.hear(&offer(1, 16), now);
    assert_eq!(driver.table.sinks(), 1);
    driver.command(Command::Stop(now + Duration::from_secs(60)), now);
    assert_eq!(driver.table.sinks(), 0, "nobody waits for its worker any more");
    driver.commands(now);
    assert_eq!(*notes.lock(), ["let go"], "what the worker granted meanwhile");
}

#[test]
fn what_is_said_of_another_kind_of_handoff_is_stale() {
    let (mut driver, _) = Driver::noting();
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.hear(&offer(1, 16), now);
    driver.commands(now);
    let ticket = driver.ticket_of(1);
    let mut stale = |message: Message| {
        driver.hear(&message, now);
        driver.publish();
        driver.published().lock().total.stale_messages
    };
    // The source of a put never sends this, and no message unpins it.
    assert_eq!(stale(Message::Confirm { ticket }), 1);
    assert_eq!(stale(Message::Ask { ticket, blocks: blocks() }), 2);
    assert_eq!(stale(Message::Unpin { handoff: 1 }), 3);
    assert_eq!(driver.granted(), [1]);
}

#[test]
fn a_peer_with_blocks_in_quarantine_gets_no_others() {
    let (mut driver, notes) = Driver::noting();
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.config.limits.quarantined_blocks_max = 4;
    driver.hear(&offer(1, 16), now);
    driver.commands(now);
    driver.hear(&offer(2, 16), now); // The worker's grant is on its way.
    let ticket = driver.ticket_of(1);
    driver.hear(&Message::Aborted { handoff: 1, ticket, flushed: false, detail: String::new() }, now);
    assert_eq!(*notes.lock(), ["quarantined"]);
    driver.commands(now);
    assert_eq!(*notes.lock(), ["quarantined", "let go"], "that grant is not taken");
    driver.hear(&offer(3, 16), now);
    driver.commands(now);
    driver.publish();
    let refused = driver.published().lock().total.refused.get("quarantine").copied();
    assert_eq!((driver.table.sinks(), refused), (0, Some(2)));
    driver.event(
        Event::Closed { conn: CONN, reason: "fenced".into(), fenced: true, draining: false, unproven: false },
        now,
    );
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    driver.hear(&offer(4, 16), now);
    driver.commands(now);
    assert!(!driver.granted().is_empty(), "its connection was the fence");
}

#[test]
fn what_nothing_fences_is_never_quarantined_beyond_the_bound() {
    let (mut driver, notes) = Driver::noting();
    driver.config.limits.quarantined_blocks_max = 2;
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    for handoff in 1..=4 {
        driver.hear(&offer(handoff, 16), now);
        driver.commands(now);
    }
    assert_eq!((driver.granted(), driver.table.sinks()), (vec![1, 2], 4), "the others wait");
    driver.hear(&offer(5, 48), now);
    assert_eq!(driver.table.sinks(), 4, "three blocks never fit two");
    let ticket = driver.ticket_of(1);
    driver.hear(&Message::Aborted { handoff: 1, ticket, flushed: true, detail: String::new() }, now);
    driver.tick(now, false);
    driver.commands(now);
    assert_eq!(driver.granted(), [2, 3], "one more for the one that is over");
    driver.event(
        Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, draining: false, unproven: false },
        now,
    );
    assert_eq!(notes.lock().iter().filter(|note| **note == "quarantined").count(), 2);
    assert_eq!(driver.exposed(), (2, 0));
}

/// Credentials that are never read: this transport requires none.
struct Unread;

impl crate::Credentials for Unread {
    fn server(&self) -> Arc<rustls::ServerConfig> {
        unreachable!()
    }
    fn client(&self) -> Arc<rustls::ClientConfig> {
        unreachable!()
    }
    fn worker_name(&self) -> rustls::pki_types::ServerName<'static> {
        unreachable!()
    }
    fn is_worker(&self, _: &[rustls::pki_types::CertificateDer<'_>]) -> bool {
        unreachable!()
    }
}

#[test]
fn who_has_not_proven_to_be_a_worker_is_heard_only_where_nobody_can() {
    for (credentials, proven, heard) in [(false, false, true), (true, false, false), (true, true, true)] {
        let (mut driver, _) = Driver::noting();
        let now = Instant::now();
        driver.config.credentials = credentials.then(|| Arc::new(Unread) as Arc<dyn crate::Credentials>);
        driver.event(Event::Accepted { conn: CONN, proven }, now);
        driver.hear(&Message::Hello(greeting()), now);
        assert_eq!(driver.is_greeted(CONN), heard, "{credentials}, {proven}");
    }
}

#[test]
fn messages_may_be_as_long_as_the_pool_needs_once_a_peer_has_greeted() {
    let map = config("here").map;
    let (mut driver, _, limit) = Driver::noting_limits(HostPool::new(map.bytes()).unwrap());
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    assert_eq!(*limit.lock(), 0, "the transport bounds greetings");
    driver.hear(&Message::Hello(greeting()), now);
    assert_eq!(*limit.lock(), message_bytes_max(&map));
    // What the longest sequences need still fits.
    let tokens = 1 << 20;
    let map = KvPoolMap::try_new(config("here").map.layout().clone(), tokens / 16).unwrap();
    let commit = crate::message::Commit {
        ticket: TicketId(1),
        algorithm: 1,
        sums: 0,
        bytes: 0,
        prompt_len: 0,
        tokens: vec![0; tokens as usize + 1],
        extra: vec![0; crate::CommitPayload::EXTRA_BYTES_MAX],
    };
    assert!(Message::Commit(Box::new(commit)).encode().len() <= message_bytes_max(&map));
    let all = BlockTables::from_start(GroupBlocks(vec![(0..tokens / 16).map(BlockId).collect(); 8]));
    let grant = Message::Grant { handoff: 1, ticket: TicketId(1), blocks: all, from: 0 };
    assert!(grant.encode().len() <= message_bytes_max(&map));
}

#[test]
fn peers_that_connect_take_no_place_of_those_that_are_connected_to() {
    let (mut driver, _) = Driver::noting();
    let now = Instant::now();
    driver.config.limits.peers_max = 1;
    for conn in 10..12 {
        driver.event(Event::Accepted { conn: ConnId(conn), proven: false }, now);
        driver.event(Event::Message(ConnId(conn), Message::Hello(greeting()).encode()), now);
    }
    let address = TransferAddress::Tcp(([127, 0, 0, 1], 1).into());
    let mut connect =
        |name| driver.connection_to(&Peer { party: party(name), address: address.clone(), shard: 0 }, now);
    assert_eq!(connect("other"), Ok(CONN));
    assert_eq!(connect("other"), Ok(CONN), "that connection leads there");
    assert!(connect("another").unwrap_err().to_string().contains("1 are open, of 1; 0 have ended"));
}

#[test]
fn peers_beyond_the_bound_find_no_place() {
    let (mut driver, _) = Driver::noting();
    let now = Instant::now();
    driver.config.limits.accepted_max = 2;
    for conn in 10..13 {
        driver.event(Event::Accepted { conn: ConnId(conn), proven: false }, now);
        driver.event(Event::Message(ConnId(conn), Message::Hello(greeting()).encode()), now);
    }
    assert_eq!([10, 11, 12].map(|conn| driver.is_greeted(ConnId(conn))), [true, true, false]);
}

/// Grants three blocks for each offer, of which two are cached.
struct HavingMost(Notes);

impl SinkHandler for HavingMost {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        assert!(offer.partial);
        let blocks = BlockTables::from_start(GroupBlocks(vec![vec![BlockId(0), BlockId(1), BlockId(2)]]));
        reply.grant(Box::new(HeldPart(Held(self.0.clone(), blocks), 32)));
    }
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Ok(()));
    }
    fn failed(&self, _: &ReserveOffer, _: HandoffFailure) {}
}

#[test]
fn blocks_that_a_peer_cannot_write_do_not_count_as_exposed_to_it() {
    let (mut driver, notes) = Driver::noting();
    driver.calls = Box::new(Inline(Arc::new(HavingMost(notes.clone()))));
    driver.config.limits.quarantined_blocks_max = 4;
    let now = Instant::now();
    driver.event(Event::Accepted { conn: CONN, proven: false }, now);
    driver.hear(&Message::Hello(greeting()), now);
    // Each requests three blocks and is granted one to write.
    for (handoff, wanted) in [(1, 1), (2, 2), (3, 2)] {
        driver.hear(&offer(handoff, 48), now);
        driver.commands(now);
        assert_eq!(driver.granted().len(), wanted, "three of everything and two of parts are more than four");
    }
    assert_eq!(driver.exposed(), (0, 2));
    driver.event(
        Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, draining: false, unproven: false },
        now,
    );
    assert_eq!(driver.exposed(), (2, 0));
    driver.publish();
    assert_eq!(driver.published().lock().quarantined.values().sum::<usize>(), 2);
}
