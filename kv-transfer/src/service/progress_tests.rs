//! The progress thread's work over a transport that only takes notes.

use super::*;
use crate::message::{Direction, Offer, RemoteRegion};
use crate::plan::CopyRun;
use crate::{
    BlockHold, GrantReply, HandoffFailure, OpenRequest, Peer, QuarantinedBlocks, Region, ReserveOffer, TransferAddress,
    TransportChoice, VerifiedHandoff,
};
use baton_types::fence::AlreadyDone;
use baton_types::{
    BlockId, Compatibility, Digest, Dtype, GroupBlocks, Incarnation, InstanceId, KvLayout, KvPoolMap, NumericsClass,
    RequestId,
};
use std::any::Any;
use std::ops::Range;

#[path = "starts_tests.rs"]
mod starts;

/// What happened, in order.
type Notes = Arc<Mutex<Vec<&'static str>>>;

struct Noting(Notes);

impl Transport for Noting {
    fn name(&self) -> &'static str {
        "notes"
    }
    fn address(&self) -> TransferAddress {
        TransferAddress::Tcp(([127, 0, 0, 1], 1).into())
    }
    fn region(&self) -> RemoteRegion {
        RemoteRegion::default()
    }
    fn fences(&self) -> bool {
        false
    }
    fn closing_fences(&self, _: ConnId) -> bool {
        false
    }
    fn connect(&mut self, _: &TransferAddress) -> Result<ConnId, String> {
        Ok(CONN)
    }
    fn limit_messages(&mut self, _: ConnId, _: usize) {}
    fn set_remote(&mut self, _: ConnId, _: &RemoteRegion) -> Result<(), String> {
        Ok(())
    }
    fn send(&mut self, _: ConnId, _: Vec<u8>) {}
    fn put(&mut self, _: ConnId, _: TicketId, _: CopyRun) {
        self.0.lock().push("put");
    }
    fn flush(&mut self, _: ConnId, _: u64) {}
    fn open_window(&mut self, _: ConnId, _: TicketId, _: Vec<Range<usize>>) {}
    fn close_window(&mut self, _: ConnId, _: TicketId) {}
    fn close(&mut self, _: ConnId, _: &str) {}
    fn lanes(&mut self, _: ConnId) -> String {
        String::new()
    }
    fn progress(&mut self, _: Instant, _: &mut Vec<Event>) -> bool {
        false
    }
    fn reads_by_itself(&self, _: ConnId) -> bool {
        true
    }
    fn sleep(&mut self, _: Duration) {}
    fn shutdown(&mut self, _: Instant, events: &mut Vec<Event>) {
        self.0.lock().push("shutdown");
        events.push(Event::Closed { conn: CONN, reason: "the service stops".into(), fenced: false, unproven: false });
    }
}

/// Blocks whose fate is noted.
struct Held(Notes, GroupBlocks);

/// The same, with tokens that were in them before.
struct HeldPart(Held, u32);

impl BlockHold for HeldPart {
    fn blocks(&self) -> &GroupBlocks {
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
    fn blocks(&self) -> &GroupBlocks {
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
    fn verified(&self, _: VerifiedHandoff) -> Result<(), String> {
        Ok(())
    }
    fn failed(&self, _: &RequestId, _: HandoffFailure) {}
}

const CONN: ConnId = ConnId(1);

fn blocks() -> GroupBlocks {
    GroupBlocks(vec![vec![BlockId(0)]])
}

fn party(name: &str) -> Party {
    Party { instance: InstanceId::try_new(name).unwrap(), incarnation: Incarnation(1) }
}

fn config(name: &str) -> TransferConfig {
    let layout = KvLayout::llama(16, 1, 1, 8, Dtype::Bf16).unwrap();
    let class = NumericsClass { isa: "t".into(), weights: Dtype::Bf16, kv: Dtype::Bf16, kernel_revision: 0 };
    let compatibility = Compatibility { model: Digest([0; 32]), layout: layout.clone(), class };
    let choice = TransportChoice::tcp([127, 0, 0, 1].into());
    TransferConfig::new(party(name), compatibility, KvPoolMap::try_new(layout, 4).unwrap(), choice)
}

/// What `peer` greets `here` with.
fn greeting() -> Box<Hello> {
    let theirs = config("peer");
    let region = RemoteRegion { address: 0, bytes: theirs.map.bytes() as u64, key: Vec::new() };
    hello(&theirs, region, party("here"))
}

impl Progress {
    fn noting() -> (Self, Notes) {
        Self::noting_over(Region::anonymous(config("here").map.bytes()).unwrap())
    }

    fn noting_over(region: Arc<Region>) -> (Self, Notes) {
        let (config, notes) = (config("here"), Notes::default());
        let inbox = Arc::new(Inbox::new(1, Box::new(|| {})));
        let checker = Checker::start(region, config.map.clone(), inbox.clone()).unwrap();
        let (transport, handler) = (Box::new(Noting(notes.clone())), Arc::new(Granting(notes.clone())));
        (Self::new(config, transport, inbox, handler, checker, Arc::default()), notes)
    }

    fn commands(&mut self, now: Instant) {
        for command in self.inbox.drain() {
            self.command(command, now);
        }
    }

    fn hear(&mut self, message: &Message, now: Instant) {
        self.event(Event::Message(CONN, message.encode()), now);
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

#[test]
fn blocks_are_held_until_the_transport_reads_them_no_more() {
    let (mut progress, notes) = Progress::noting();
    let now = Instant::now();
    let peer = Peer { party: party("peer"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    let (request_id, deadline) = (RequestId::try_new("r").unwrap(), now + Duration::from_secs(60));
    let hold = Box::new(Held(notes.clone(), blocks()));
    let request = OpenRequest { request_id, tokens: 16, blocks: blocks(), deadline, hold };
    let (outcome, mut told) = tokio::sync::oneshot::channel();
    let key = progress.inbox.open(peer, request, outcome).unwrap();
    progress.commands(now);
    progress.hear(&Message::Welcome(greeting()), now);
    let ticket = TicketId(7);
    progress.hear(&Message::Grant { handoff: key, ticket, blocks: blocks(), from: 0 }, now);
    progress.inbox.launched(key, 0, 16, Arc::new(AlreadyDone));
    progress.commands(now);
    progress.pump(now);
    assert_eq!(*notes.lock(), ["put"], "a write is under way");
    progress.finish();
    drop(progress); // Checksums read the blocks as well, until their thread has ended.
    assert_eq!(*notes.lock(), ["put", "shutdown", "let go"]);
    assert!(matches!(told.try_recv(), Ok(Err(HandoffFailure::Stopped))));
}

#[test]
fn dead_peers_are_fenced_on_a_busy_thread_too() {
    for (moving, not_yet, then) in [(false, 50, 150), (true, 1_000, 6_000)] {
        let (mut progress, notes) = Progress::noting();
        let begin = Instant::now();
        let after = |ms| begin + Duration::from_millis(ms);
        progress.event(Event::Accepted { conn: CONN, proven: false }, begin);
        progress.hear(&Message::Hello(greeting()), begin);
        progress.hear(&offer(1, 16), begin);
        progress.commands(begin);
        progress.peer_is_dead(&party("peer"), begin);
        progress.event(Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, unproven: false }, begin);
        assert_eq!(*notes.lock(), ["quarantined"]);
        progress.tick(after(not_yet), moving);
        assert_eq!(*notes.lock(), ["quarantined"], "moving: {moving}");
        progress.tick(after(then), moving);
        assert_eq!(*notes.lock(), ["quarantined", "let go"], "moving: {moving}");
    }
}

#[test]
fn a_peer_with_blocks_in_quarantine_gets_no_others() {
    let (mut progress, notes) = Progress::noting();
    let now = Instant::now();
    progress.event(Event::Accepted { conn: CONN, proven: false }, now);
    progress.hear(&Message::Hello(greeting()), now);
    progress.config.limits.quarantined_blocks_max = 4;
    progress.hear(&offer(1, 16), now);
    progress.commands(now);
    progress.hear(&offer(2, 16), now); // The worker's grant is on its way.
    let ticket = progress.incoming.values().find(|i| i.offer.handoff == 1).unwrap().sink.ticket;
    progress.hear(&Message::Aborted { handoff: 1, ticket, flushed: false, detail: String::new() }, now);
    assert_eq!(*notes.lock(), ["quarantined"]);
    progress.commands(now);
    assert_eq!(*notes.lock(), ["quarantined", "let go"], "that grant is not taken");
    progress.hear(&offer(3, 16), now);
    progress.commands(now);
    assert_eq!((progress.incoming_live(), progress.stats.total.refused.get("quarantine")), (0, Some(&2)));
    progress.event(Event::Closed { conn: CONN, reason: "fenced".into(), fenced: true, unproven: false }, now);
    progress.event(Event::Accepted { conn: CONN, proven: false }, now);
    progress.hear(&Message::Hello(greeting()), now);
    progress.hear(&offer(4, 16), now);
    progress.commands(now);
    assert!(progress.incoming.values().any(|i| i.sink.is_granted()), "its connection was the fence");
}

#[test]
fn what_nothing_fences_is_never_quarantined_beyond_the_bound() {
    let (mut progress, notes) = Progress::noting();
    progress.config.limits.quarantined_blocks_max = 2;
    let now = Instant::now();
    progress.event(Event::Accepted { conn: CONN, proven: false }, now);
    progress.hear(&Message::Hello(greeting()), now);
    let granted = |progress: &Progress| -> Vec<u64> {
        progress.incoming.values().filter(|i| i.sink.is_granted()).map(|i| i.offer.handoff).collect()
    };
    for handoff in 1..=4 {
        progress.hear(&offer(handoff, 16), now);
        progress.commands(now);
    }
    assert_eq!((granted(&progress), progress.incoming_live()), (vec![1, 2], 4), "the others wait");
    progress.hear(&offer(5, 48), now);
    assert_eq!(progress.incoming_live(), 4, "three blocks never fit two");
    let ticket = progress.incoming.values().find(|i| i.offer.handoff == 1).unwrap().sink.ticket;
    progress.hear(&Message::Aborted { handoff: 1, ticket, flushed: true, detail: String::new() }, now);
    progress.tick(now, false);
    progress.commands(now);
    assert_eq!(granted(&progress), [2, 3], "one more for the one that is over");
    progress.event(Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, unproven: false }, now);
    assert_eq!(notes.lock().iter().filter(|note| **note == "quarantined").count(), 2);
    let exposure = progress.exposure(&party("peer").instance, u64::MAX);
    assert_eq!((exposure.quarantined, exposure.unfenced), (2, 0));
}

/// Credentials that nobody looks at: the transport here asks for none.
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
        let (mut progress, _) = Progress::noting();
        let now = Instant::now();
        progress.config.credentials = credentials.then(|| Arc::new(Unread) as Arc<dyn crate::Credentials>);
        progress.event(Event::Accepted { conn: CONN, proven }, now);
        progress.hear(&Message::Hello(greeting()), now);
        assert_eq!(progress.connections[&CONN].map.is_some(), heard, "{credentials}, {proven}");
    }
}

#[test]
fn before_its_greeting_a_peer_can_say_little() {
    for (bytes, heard) in [(GREETING_BYTES_MAX, true), (GREETING_BYTES_MAX + 1, false)] {
        let (mut progress, _) = Progress::noting();
        let now = Instant::now();
        progress.event(Event::Accepted { conn: CONN, proven: false }, now);
        let mut hello = Message::Hello(greeting()).encode(); // Newer versions append to it.
        hello.resize(bytes, 0);
        progress.event(Event::Message(CONN, hello), now);
        assert_eq!(progress.connections[&CONN].map.is_some(), heard, "{bytes} bytes");
        let max = if heard { message_bytes_max(&progress.config.map) } else { GREETING_BYTES_MAX };
        assert_eq!([max, max + 1].map(|bytes| progress.is_too_long(CONN, bytes)), [false, true]);
    }
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
    let all = GroupBlocks(vec![(0..tokens / 16).map(BlockId).collect(); 8]);
    let grant = Message::Grant { handoff: 1, ticket: TicketId(1), blocks: all, from: 0 };
    assert!(grant.encode().len() <= message_bytes_max(&map));
}

#[test]
fn peers_that_say_nothing_keep_nobody_out() {
    let (mut progress, _) = Progress::noting();
    let now = Instant::now();
    progress.config.limits.ungreeted_max = 4;
    for conn in 10..20 {
        progress.event(Event::Accepted { conn: ConnId(conn), proven: false }, now);
    }
    let left = progress.connections.iter().filter(|(_, c)| !c.closing).map(|(conn, _)| conn.0);
    assert_eq!(left.collect::<Vec<_>>(), [16, 17, 18, 19]);
    progress.event(Event::Message(ConnId(17), Message::Hello(greeting()).encode()), now);
    assert!(progress.connections[&ConnId(17)].map.is_some());
    // And however many have greeted, this side connects to others.
    progress.config.limits.peers_max = 1;
    let peer = Peer { party: party("other"), address: TransferAddress::Tcp(([127, 0, 0, 1], 1).into()), shard: 0 };
    assert_eq!(progress.connection_to(&peer, now), Ok(CONN));
}

#[test]
fn peers_beyond_the_bound_find_no_place() {
    let (mut progress, _) = Progress::noting();
    let now = Instant::now();
    progress.config.limits.accepted_max = 2;
    for conn in 10..13 {
        progress.event(Event::Accepted { conn: ConnId(conn), proven: false }, now);
        progress.event(Event::Message(ConnId(conn), Message::Hello(greeting()).encode()), now);
    }
    let greeted = progress.connections.values().map(|c| c.map.is_some());
    assert_eq!(greeted.collect::<Vec<_>>(), [true, true, false]);
}

/// Has two blocks of three of whatever is offered.
struct HavingMost(Notes);

impl SinkHandler for HavingMost {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        assert!(offer.partial);
        let blocks = GroupBlocks(vec![vec![BlockId(0), BlockId(1), BlockId(2)]]);
        reply.grant(Box::new(HeldPart(Held(self.0.clone(), blocks), 32)));
    }
    fn verified(&self, _: VerifiedHandoff) -> Result<(), String> {
        Ok(())
    }
    fn failed(&self, _: &RequestId, _: HandoffFailure) {}
}

#[test]
fn blocks_that_a_peer_cannot_write_do_not_count_as_exposed_to_it() {
    let (mut progress, notes) = Progress::noting();
    progress.handler = Arc::new(HavingMost(notes.clone()));
    progress.config.limits.quarantined_blocks_max = 4;
    let now = Instant::now();
    progress.event(Event::Accepted { conn: CONN, proven: false }, now);
    progress.hear(&Message::Hello(greeting()), now);
    let granted = |progress: &Progress| progress.incoming.values().filter(|i| i.sink.is_granted()).count();
    // Each asks for three blocks and is given one to write.
    for (handoff, wanted) in [(1, 1), (2, 2), (3, 2)] {
        progress.hear(&offer(handoff, 48), now);
        progress.commands(now);
        assert_eq!(granted(&progress), wanted, "three of everything and two of parts are more than four");
    }
    let exposure = |progress: &Progress| progress.exposure(&party("peer").instance, u64::MAX);
    assert_eq!((exposure(&progress).quarantined, exposure(&progress).unfenced), (0, 2));
    progress.event(Event::Closed { conn: CONN, reason: "gone".into(), fenced: false, unproven: false }, now);
    assert_eq!((exposure(&progress).quarantined, exposure(&progress).unfenced), (2, 0));
    progress.publish();
    assert_eq!(progress.published.lock().quarantined.values().sum::<usize>(), 2);
}
