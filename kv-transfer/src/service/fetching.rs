//! Gets whose reader this instance is: carries out what their state machines decide.

use super::checker::Job;
use super::connections::Connection;
use super::progress::Progress;
use crate::fetch::FetchOutcome;
use crate::handoff::{Admission, Reader, ReaderAction, ReaderInput};
use crate::message::{Direction, Message, Offer};
use crate::plan::{CopyRun, Side, check_blocks, check_from, copies, granted_ranges};
use crate::transport::ConnId;
use crate::{Fencing, FetchRequest, Fetched, HandoffFailure, Party, Peer, Phase, RefuseReason, checksum};
use baton_types::{BlockId, GroupBlocks, InstanceId, RequestId, TicketId};
use std::any::Any;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// Gets by key, which is also their number on the wire.
pub(super) type Fetches = BTreeMap<u64, Fetch>;

/// One get.
pub(super) struct Fetch {
    reader: Reader,
    request_id: RequestId,
    name: Vec<u8>,
    peer: Peer,
    /// First position that is read, and how many are. Under the ticket, positions count from the first one.
    from: u32,
    moved: u32,
    conn: ConnId,
    blocks: Arc<GroupBlocks>,
    /// Keeps `blocks`, until nothing writes to them any more.
    hold: Option<Box<dyn Any + Send>>,
    outcome: Option<oneshot::Sender<FetchOutcome>>,
    offered: bool,
    /// A grant that a test holds before anything is read.
    held: Option<TicketId>,
    remote: Vec<Vec<BlockId>>,
    /// Reads of our own that are not posted, and bytes of those that are under way.
    reads: VecDeque<CopyRun>,
    in_flight: usize,
}

impl Fetch {
    pub(super) fn conn(&self) -> ConnId {
        self.conn
    }

    pub(super) fn is_held(&self) -> bool {
        self.held.is_some()
    }

    /// The instance whose blocks are read.
    pub(super) fn owner(&self) -> &InstanceId {
        &self.peer.party.instance
    }

    /// How many blocks here take what is read.
    pub(super) fn blocks(&self) -> usize {
        self.blocks.total()
    }

    /// Whether their owner may write to them.
    pub(super) fn is_open(&self) -> bool {
        self.reader.is_open()
    }

    pub(super) fn is_quarantined(&self) -> bool {
        self.reader.is_quarantined()
    }
}

impl Progress {
    pub(super) fn fetch(
        &mut self,
        key: u64,
        peer: Peer,
        request: FetchRequest,
        outcome: oneshot::Sender<FetchOutcome>,
        now: Instant,
    ) {
        let FetchRequest { request_id, name, from, tokens, blocks, deadline, hold } = request;
        let conn = match self.stopping {
            Some(_) => Err(HandoffFailure::Stopped),
            None => self.connection_to(&peer, now).map_err(HandoffFailure::PeerLost),
        };
        let conn = match conn {
            Ok(conn) => conn,
            Err(failure) => {
                self.inbox.outgoing_ended(key);
                drop(hold);
                outcome.send(Err(failure)).ok();
                return;
            }
        };
        let deadline = deadline.min(now + Duration::from_millis(self.config.limits.handoff_ms));
        let (layout, wait) = (self.config.map.layout(), self.config.limits.abort());
        let moved = tokens - from;
        let mut reader = Reader::new(layout, moved, checksum::ALGORITHM, deadline, wait);
        if self.config.hooks.fencing() == Fencing::Pretended {
            reader.leave_undrained();
        }
        let blocks = Arc::new(blocks);
        let (offered, held, remote, reads, in_flight) = Default::default();
        let fetch = Fetch {
            reader,
            request_id,
            name,
            peer,
            from,
            moved,
            conn,
            blocks,
            hold: Some(hold),
            outcome: Some(outcome),
            offered,
            held,
            remote,
            reads,
            in_flight,
        };
        self.fetches.insert(key, fetch);
        self.ask_to_pin(key, now);
    }

    /// Asks the owner once the connection is greeted.
    fn ask_to_pin(&mut self, key: u64, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key).filter(|f| !f.offered) else { return };
        match self.connections.get(&fetch.conn).and_then(|c| c.usable()) {
            None => {}
            Some(Err(failure)) => self.reader_input(key, ReaderInput::Refused(failure), now),
            Some(Ok(())) => {
                let theirs = self.connections.get(&fetch.conn);
                if let Err(detail) = check_part(fetch.from, fetch.moved, theirs) {
                    let failure = HandoffFailure::WholeOnly(detail);
                    return self.reader_input(key, ReaderInput::Refused(failure), now);
                }
                fetch.offered = true;
                let left = fetch.reader.deadline().saturating_duration_since(now).as_millis();
                let offer = Offer {
                    handoff: key,
                    request_id: fetch.request_id.clone(),
                    source: fetch.peer.party.clone(),
                    sink: self.config.party.clone(),
                    direction: Direction::Get,
                    shards: 1,
                    from: fetch.from,
                    tokens: fetch.from + fetch.moved,
                    deadline_ms: u32::try_from(left).unwrap_or(u32::MAX),
                    name: fetch.name.clone(),
                };
                let conn = fetch.conn;
                self.send(conn, &Message::Offer(Box::new(offer)));
            }
        }
    }

    /// Asks what waited for a connection's greeting.
    pub(super) fn fetch_waiting(&mut self, conn: ConnId, now: Instant) {
        self.fetches_on(conn).into_iter().for_each(|key| self.ask_to_pin(key, now));
    }

    fn fetches_on(&self, conn: ConnId) -> Vec<u64> {
        self.fetches.iter().filter(|(_, f)| f.conn == conn).map(|(&key, _)| key).collect()
    }

    /// Which get a message of its owner is for.
    pub(super) fn fetch_of(&self, conn: ConnId, message: &Message) -> Option<u64> {
        match message {
            Message::Grant { handoff, .. } | Message::Refuse { handoff, .. } => {
                Some(*handoff).filter(|key| self.fetches.get(key).is_some_and(|f| f.conn == conn))
            }
            Message::Checksums { ticket, .. } | Message::Held { ticket, .. } | Message::NotHeld { ticket, .. } => {
                let of_ticket = |f: &Fetch| self.speaks_for(conn, f.conn) && f.reader.ticket() == Some(*ticket);
                self.fetches.iter().find(|(_, f)| of_ticket(f)).map(|(&key, _)| key)
            }
            _ => None,
        }
    }

    pub(super) fn fetch_message(&mut self, key: u64, message: Message, now: Instant) {
        match message {
            Message::Grant { from: 1.., .. } => {
                let failure = HandoffFailure::Protocol("the owner leaves out what was asked for".into());
                self.reader_input(key, ReaderInput::Abort(failure), now);
            }
            Message::Grant { ticket, blocks, .. } => self.pin_came(key, ticket, blocks, now),
            Message::Refuse { reason, detail, .. } => {
                self.reader_input(key, ReaderInput::Refused(HandoffFailure::Refused { reason, detail }), now);
            }
            Message::Checksums { runs, .. } => self.reader_input(key, ReaderInput::Checksums(runs), now),
            Message::Held { algorithm, sums, .. } => {
                self.reader_input(key, ReaderInput::Held { algorithm, sums }, now);
            }
            Message::NotHeld { detail, .. } => self.reader_input(key, ReaderInput::NotHeld(detail), now),
            _ => {}
        }
    }

    fn pin_came(&mut self, key: u64, ticket: TicketId, blocks: GroupBlocks, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let map = self.connections.get(&fetch.conn).and_then(|c| c.map.as_ref());
        let fits = map.map_or_else(|| Err("no pool".into()), |map| check_blocks(map, &blocks.0, fetch.moved));
        match fits {
            Ok(()) => {
                (fetch.remote, fetch.held) = (blocks.0, Some(ticket));
                self.unhold_fetch(key, now);
            }
            Err(detail) => {
                let failure = HandoffFailure::Protocol(format!("the owner's blocks cannot be: {detail}"));
                self.reader_input(key, ReaderInput::Abort(failure), now);
            }
        }
    }

    fn unhold_fetch(&mut self, key: u64, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        if fetch.held.is_none() || self.config.hooks.hold(Phase::Reads, &fetch.request_id) {
            return;
        }
        if let Some(ticket) = fetch.held.take() {
            let by_itself = self.transport.reads_by_itself(fetch.conn);
            let input = match self.barred_from_writing(key).filter(|_| !by_itself) {
                None => ReaderInput::Granted { ticket, by_itself },
                Some(failure) => ReaderInput::Abort(failure),
            };
            self.reader_input(key, input, now);
        }
    }

    /// Why the owner may not be asked to write: of what nothing fences it could come to leave too much in quarantine here, as any source.
    fn barred_from_writing(&self, key: u64) -> Option<HandoffFailure> {
        let fetch = self.fetches.get(&key)?;
        let (owner, wanted) = (fetch.owner(), fetch.blocks());
        let max = self.config.limits.quarantined_blocks_of(&self.config.map);
        match self.exposure(owner, key).admits(wanted, self.transport.closing_fences(fetch.conn), max) {
            Admission::Ask => None,
            Admission::Wait | Admission::Refuse => {
                let detail =
                    format!("{owner} could leave more than {max} blocks in quarantine here, or has some there");
                Some(HandoffFailure::Refused { reason: RefuseReason::Quarantine, detail })
            }
        }
    }

    /// Posts reads within the credit; whether anything was.
    pub(super) fn pump_fetches(&mut self) -> bool {
        let (mut any, max) = (false, self.config.limits.in_flight_bytes_max);
        for (&key, fetch) in &mut self.fetches {
            while let Some(run) =
                fetch.reads.pop_front_if(|run| fetch.in_flight == 0 || fetch.in_flight + run.len <= max)
            {
                any = true;
                fetch.in_flight += run.len;
                self.transport.get(fetch.conn, key, run);
            }
        }
        any
    }

    /// A read of our own is over.
    pub(super) fn got(&mut self, key: u64, bytes: usize, now: Instant) {
        if let Some(fetch) = self.fetches.get_mut(&key) {
            fetch.in_flight -= bytes;
            self.read_if_over(key, now);
        }
    }

    fn read_if_over(&mut self, key: u64, now: Instant) {
        if self.fetches.get(&key).is_some_and(|f| f.reads.is_empty() && f.in_flight == 0) {
            self.reader_input(key, ReaderInput::Read, now);
        }
    }

    pub(super) fn abort_fetch(&mut self, key: u64, failure: HandoffFailure, now: Instant) {
        self.reader_input(key, ReaderInput::Abort(failure), now);
    }

    pub(super) fn fetch_checked(&mut self, key: u64, result: Result<u64, String>, now: Instant) {
        let input = match result {
            Ok(sums) => ReaderInput::Verified { sums },
            Err(detail) => ReaderInput::Corrupt(detail),
        };
        self.reader_input(key, input, now);
    }

    pub(super) fn tick_fetches(&mut self, now: Instant) {
        for key in self.fetches.keys().copied().collect::<Vec<_>>() {
            self.unhold_fetch(key, now);
            self.reader_input(key, ReaderInput::Tick, now);
        }
    }

    pub(super) fn fetches_lost(&mut self, conn: ConnId, reason: &str, fenced: bool, now: Instant) {
        for key in self.fetches_on(conn) {
            self.reader_input(key, ReaderInput::ConnectionLost { fenced, detail: reason.to_owned() }, now);
        }
    }

    /// Nothing of this party writes any more.
    pub(super) fn fetches_fenced(&mut self, party: &Party, now: Instant) {
        let of_party = self.fetches.iter().filter(|(_, f)| f.peer.party == *party).map(|(&key, _)| key);
        of_party.collect::<Vec<_>>().into_iter().for_each(|key| self.reader_input(key, ReaderInput::Fenced, now));
    }

    /// The peer will have nothing to do with us.
    pub(super) fn reject_fetches(&mut self, conn: ConnId, failure: &HandoffFailure, now: Instant) {
        for key in self.fetches_on(conn) {
            self.reader_input(key, ReaderInput::Refused(failure.clone()), now);
        }
    }

    fn reader_input(&mut self, key: u64, input: ReaderInput, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        for action in fetch.reader.handle(now, input) {
            self.reader_action(key, action, now);
        }
    }

    fn reader_action(&mut self, key: u64, action: ReaderAction, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let (conn, ticket) = (fetch.conn, fetch.reader.ticket().unwrap_or(TicketId(0)));
        match action {
            ReaderAction::Read => self.read(key, now),
            ReaderAction::SendAsk => {
                let blocks = GroupBlocks::clone(&fetch.blocks);
                self.transport.open_window(conn, ticket, granted_ranges(&self.config.map, &blocks.0, 0));
                self.send(conn, &Message::Ask { ticket, blocks });
            }
            ReaderAction::SendConfirm => self.send(conn, &Message::Confirm { ticket }),
            ReaderAction::Verify(runs) => {
                let Some((_, cut)) = self.connections.get(&conn).and_then(|c| c.cuts.as_ref()) else { return };
                let (tokens, blocks, heads) = (fetch.moved, fetch.blocks.clone(), cut.sink.clone());
                self.checker.submit(Job::Check { key, tokens, blocks, heads, runs });
            }
            ReaderAction::SendUnpin => {
                fetch.reads.clear();
                if fetch.offered {
                    self.send(conn, &Message::Unpin { handoff: key });
                }
                self.read_if_over(key, now);
            }
            ReaderAction::Disconnect => self.close(conn, "the peer does not let go of a get that was given up"),
            ReaderAction::Failed(failure) => {
                tracing::debug!(request_id = %fetch.request_id, peer = %fetch.peer.party, %failure, "get failed");
                self.tell(key, Err(failure));
            }
            ReaderAction::Adopt => {
                let bytes = (self.config.map.layout().bytes_per_token() * fetch.moved as usize) as u64;
                if let Some(hold) = fetch.hold.take() {
                    self.tell(key, Ok(Fetched { bytes, hold }));
                }
            }
            // Its blocks count against the bound on quarantined ones from here on.
            ReaderAction::Quarantine => self.inbox.outgoing_ended(key),
            ReaderAction::Forget => {
                self.fetches.remove(&key);
                self.inbox.outgoing_ended(key);
            }
        }
    }

    /// Queues reads of everything.
    fn read(&mut self, key: u64, now: Instant) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let Some(connection) = self.connections.get(&fetch.conn) else { return };
        let (Some(theirs), Some((_, cut))) = (&connection.map, &connection.cuts) else { return };
        let (ours, put_max) = (&self.config.map, self.config.limits.put_bytes_max);
        for (g, group) in ours.layout().groups().iter().enumerate() {
            let source = Side { map: theirs, blocks: &fetch.remote[g], heads: &cut.source };
            let sink = Side { map: ours, blocks: &fetch.blocks.0[g], heads: &cut.sink };
            for layer in 0..group.layers.len() {
                copies(source, sink, g, layer, 0..fetch.moved, put_max, |run| fetch.reads.push_back(run));
            }
        }
        self.read_if_over(key, now);
    }

    /// Tells the worker how it ended, and lets nothing more in.
    fn tell(&mut self, key: u64, result: FetchOutcome) {
        let Some(fetch) = self.fetches.get_mut(&key) else { return };
        let (conn, outcome) = (fetch.conn, fetch.outcome.take());
        if let Some(ticket) = fetch.reader.ticket() {
            self.transport.close_window(conn, ticket);
        }
        let name = match &result {
            Ok(_) => "adopted",
            Err(failure) => failure.name(),
        };
        self.count(conn, |stats| *stats.fetched.entry(name).or_default() += 1);
        if let Some(outcome) = outcome {
            outcome.send(result).ok(); // Nobody asks any more: the owner dropped its end.
        }
    }
}

/// Whether a peer can be asked for so many positions from `from` on.
pub(super) fn check_part(from: u32, moved: u32, peer: Option<&Connection>) -> Result<(), String> {
    let Some((peer, map)) = peer.and_then(|c| c.map.as_ref().map(|map| (c, map))).filter(|_| from > 0) else {
        return Ok(());
    };
    if !peer.moves_parts() {
        return Err(format!("version {} of the protocol has no parts", peer.protocol));
    }
    check_from(map, from, from + moved).map_err(|detail| format!("at the peer, {detail}"))
}
