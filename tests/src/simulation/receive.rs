//! The sink's shell: turns claims into reservations, and carries out what the real state machine of a handoff decides.

use super::clock::{Addr, Time};
use super::event::{Event, Said, Trouble};
use super::handoff::owner;
use super::invariant::Invariant;
use super::pieces::take_pieces;
use super::wire::Wire;
use super::worker::Worker;
use super::world::World;
use baton_decode_worker::grants::claims::OfferError;
use baton_engine::scheduler::{Awaited, SequenceKey};
use baton_kv_cache::{Lease, Quarantined};
use baton_kv_transfer::pure::{ALGORITHM, Admission, Expected, Exposure, Sink, SinkAction, SinkInput};
use baton_kv_transfer::{HandoffFailure, RefuseReason};
use baton_types::{ErrorKind, GroupBlocks, Party, RequestId, TicketId};
use std::collections::BTreeSet;
use std::sync::Arc;

/// Handoffs that a worker may receive at once; those whose blocks are quarantined are over.
const INCOMING_MAX: usize = 4;

/// A handoff on its way in.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) sink: Sink,
    pub(super) conn: usize,
    handoff: u64,
    pub(super) request: RequestId,
    source: Addr,
    pub(super) source_party: Party,
    pub(super) tokens: u32,
    /// The worker was not asked for room yet.
    unasked: bool,
    pub(super) blocks: GroupBlocks,
    pub(super) hold: Option<Lease>,
    pub(super) quarantined: Option<Quarantined>,
}

impl Incoming {
    /// Blocks that its source may write.
    pub(super) fn owned(&self) -> Option<&GroupBlocks> {
        self.hold.as_ref().map(Lease::blocks).or_else(|| self.quarantined.as_ref().map(Quarantined::blocks))
    }

    pub(super) fn source(&self) -> Addr {
        self.source
    }
}

/// An offer that waits for room.
#[derive(Debug)]
pub(super) struct Waiting {
    turn: SequenceKey,
    pub(super) key: u64,
    pub(super) tokens: usize,
    /// What it holds already where reservations are taken piece by piece.
    pub(super) part: Option<Lease>,
}

impl World {
    /// What a source says.
    pub(super) fn sink_wire(&mut self, w: usize, conn: usize, wire: Wire) {
        if let Wire::Offer { handoff, request, tokens, left } = wire {
            return self.offered(w, conn, handoff, request, tokens, left);
        }
        let Some(worker) = self.worker(w) else { return };
        let find = |test: &dyn Fn(&Incoming) -> bool| {
            worker.incoming.iter().find(|(_, i)| i.conn == conn && test(i)).map(|(key, _)| *key)
        };
        let key = match &wire {
            Wire::Checksums { ticket, .. } => find(&|i| i.sink.ticket == *ticket),
            Wire::Commit(commit) => find(&|i| i.sink.ticket == commit.ticket),
            Wire::Aborted { handoff, .. } => find(&|i| i.handoff == *handoff),
            _ => None,
        };
        let Some(key) = key else {
            if let Wire::Commit(commit) = wire {
                let failure = HandoffFailure::NotAdopted("no such ticket is open".into());
                self.send_back(conn, Wire::Nack { ticket: commit.ticket, failure });
            }
            return;
        };
        let input = match wire {
            Wire::Checksums { runs, .. } => SinkInput::Checksums(runs.as_ref().clone()),
            Wire::Commit(commit) => SinkInput::Commit(commit),
            Wire::Aborted { flushed, .. } => SinkInput::Aborted { flushed, detail: String::new() },
            _ => return,
        };
        self.sink_input(w, key, input);
    }

    fn offered(&mut self, w: usize, conn: usize, handoff: u64, request: RequestId, tokens: u32, left: Time) {
        let now = self.clock.now();
        let deadline = self.clock.instant(now + left.min(self.shape.handoff_max));
        let ticket = TicketId(self.draw(usize::MAX) as u64 | 1);
        let (source, source_party) =
            (self.net.connections[conn].source, self.net.connections[conn].source_party.clone());
        let abort_wait = self.shape.abort_wait;
        let Some(worker) = self.worker_mut(w) else { return };
        let layout = worker.memory.map.layout().clone();
        if layout.blocks_for(tokens as usize) > worker.memory.map.blocks() as usize {
            let reason = RefuseReason::NoRoom;
            self.counts.add("sink refuses", reason.name());
            return self.send_back(conn, Wire::Refuse { handoff, reason });
        }
        if worker.incoming.values().filter(|i| i.quarantined.is_none()).count() >= INCOMING_MAX {
            let reason = RefuseReason::Busy;
            self.counts.add("sink refuses", reason.name());
            return self.send_back(conn, Wire::Refuse { handoff, reason });
        }
        let token_bytes = layout.bytes_per_token() as u64;
        let expected = Expected { tokens, token_bytes, algorithm: ALGORITHM };
        let sink = Sink::new(ticket, &layout, expected, deadline, abort_wait);
        worker.next_key += 1;
        let key = worker.next_key;
        let (unasked, blocks, hold, quarantined) = (true, GroupBlocks::default(), None, None);
        let incoming =
            Incoming { sink, conn, handoff, request, source, source_party, tokens, unasked, blocks, hold, quarantined };
        worker.incoming.insert(key, incoming);
        self.ask_waiting(w);
        self.tick_soon(w);
    }

    /// Asks the worker for room, as far as the bound on what each source could leave in quarantine allows. A source's offers go in order.
    pub(super) fn ask_waiting(&mut self, w: usize) {
        let Some(worker) = self.worker(w) else { return };
        let unasked: Vec<u64> = worker.incoming.iter().filter(|(_, i)| i.unasked).map(|(key, _)| *key).collect();
        let mut waiting = BTreeSet::new();
        for key in unasked {
            let Some(worker) = self.worker(w) else { return };
            let Some(incoming) = worker.incoming.get(&key) else { continue };
            let source = incoming.source.process;
            let fences = self.net.connections[incoming.conn].lane.closing_fences();
            let (mut exposure, mut wanted) = (self.exposure(worker, source, key), incoming.blocks_max(worker));
            if self.mutant.looks_at_quarantine_alone() {
                (exposure.unfenced, wanted) = (0, 0);
            }
            match exposure.admits(wanted, fences, self.shape.quarantined_max()) {
                Admission::Ask | Admission::Wait if waiting.contains(&source) => {}
                Admission::Ask => self.ask(w, key),
                Admission::Wait => {
                    self.counts.add("sink waits", "quarantine");
                    waiting.insert(source);
                }
                Admission::Refuse => self.refuse_offer(w, key, RefuseReason::Quarantine, String::new()),
            }
        }
    }

    /// What a source, in all its starts, has quarantined here and could come to, but for one handoff.
    fn exposure(&self, worker: &Worker, source: usize, except: u64) -> Exposure {
        let mut exposure = Exposure::default();
        for (_, incoming) in worker.incoming.iter().filter(|(key, i)| **key != except && i.source.process == source) {
            let fences = self.net.connections[incoming.conn].lane.closing_fences();
            if incoming.sink.is_quarantined() {
                exposure.quarantined += incoming.quarantined_blocks();
            } else if !incoming.unasked && !fences {
                exposure.unfenced += incoming.blocks_max(worker);
            }
        }
        exposure
    }

    /// The worker hears of an offer.
    fn ask(&mut self, w: usize, key: u64) {
        let ignores = self.mutant.ignores_incarnations();
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(incoming) = worker.incoming.get_mut(&key) else { return };
        incoming.unasked = false;
        let (request, tokens) = (incoming.request.clone(), incoming.tokens);
        // A worker that knows peers by name alone takes whoever comes.
        let claimed = worker.claims.peek(&request).filter(|_| ignores);
        let offerer = claimed.unwrap_or_else(|| incoming.source_party.clone());
        if let Err(error) = worker.claims.offered(&request, &offerer, tokens) {
            let reason = match error {
                OfferError::NotClaimed(_) => RefuseReason::UnknownRequest,
                OfferError::Contradicts(_) => RefuseReason::Protocol,
            };
            return self.refuse_offer(w, key, reason, error.to_string());
        }
        self.counts.add("claim", "offered");
        let priority = self.calls.iter().rev().find(|c| c.name == request).map_or(0, |c| c.priority);
        let Some(worker) = self.worker_mut(w) else { return };
        let turn = worker.engine.take_turn(priority);
        worker.waiting.push_back(Waiting { turn, key, tokens: tokens as usize, part: None });
        self.grant_waiting(w);
        let waits = self.worker(w).map_or(0, |worker| worker.waiting.len());
        match waits {
            0 => {}
            1 => self.counts.add("sink waits", "room"),
            _ => self.counts.add("sink waits", "room behind others"),
        }
    }

    fn refuse_offer(&mut self, w: usize, key: u64, reason: RefuseReason, detail: String) {
        self.counts.add("sink refuses", reason.name());
        self.sink_input(w, key, SinkInput::Refused { reason, detail });
    }

    /// Grants from the front, in order. What the front waits for is kept from sequences that came later.
    pub(super) fn grant_waiting(&mut self, w: usize) {
        let (watermark, piecewise) = (self.shape.watermark, self.mutant.reserves_piecewise());
        let here = self.addr(w);
        let Some(worker) = self.worker_mut(w) else { return };
        let size = worker.memory.map.layout().block_tokens() as usize;
        let mut granted: Vec<u64> = Vec::new();
        if piecewise {
            for (key, lease) in take_pieces(worker) {
                worker.granting.insert(key, lease);
                granted.push(key);
            }
        }
        while !piecewise && let Some(front) = worker.waiting.pop_front() {
            if worker.incoming.get(&front.key).is_none_or(|i| i.sink.state() != "claimed") {
                continue;
            }
            let blocks = front.tokens.div_ceil(size);
            let lease = match worker.engine.starved {
                true => None,
                false => worker.pool.try_lease_keeping(&[blocks], watermark),
            };
            match lease {
                Some(lease) => {
                    worker.granting.insert(front.key, lease);
                    granted.push(front.key);
                }
                None => {
                    worker.waiting.push_front(front);
                    break;
                }
            }
        }
        let front = worker.waiting.front();
        let awaited = front.map(|front| Awaited { turn: front.turn, blocks: front.tokens.div_ceil(size) });
        let changed = std::mem::replace(&mut worker.engine.awaited, awaited) != awaited;
        for key in granted {
            let at = self.clock.now() + self.delay() / 8;
            self.clock.post(at, here, Event::Granted { key });
        }
        if changed {
            self.post(here, Event::Engine);
        }
    }

    /// The worker's answer to an offer reaches the transfer.
    pub(super) fn granted(&mut self, w: usize, key: u64) {
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(lease) = worker.granting.remove(&key) else { return };
        let Some(incoming) = worker.incoming.get_mut(&key) else { return };
        incoming.blocks = lease.blocks().clone();
        incoming.hold = Some(lease);
        self.sink_input(w, key, SinkInput::Granted { from: 0 });
    }

    pub(super) fn sink_input(&mut self, w: usize, key: u64, input: SinkInput) {
        let now = self.clock.instant(self.clock.now());
        let Some(incoming) = self.worker_mut(w).and_then(|w| w.incoming.get_mut(&key)) else { return };
        let before = incoming.sink.state();
        let is_crossed = before == "aborting" && matches!(input, SinkInput::Commit(_));
        let actions = incoming.sink.handle(now, input);
        let after = incoming.sink.state();
        if is_crossed {
            self.counts.add("cancel x commit", "aborted, then committed");
        }
        self.counts.moved("sink", before, after);
        actions.into_iter().for_each(|action| self.sink_action(w, key, action));
    }

    fn sink_action(&mut self, w: usize, key: u64, action: SinkAction) {
        let Some(incoming) = self.worker_mut(w).and_then(|w| w.incoming.get_mut(&key)) else { return };
        let (conn, ticket, handoff) = (incoming.conn, incoming.sink.ticket, incoming.handoff);
        match action {
            SinkAction::SendGrant => {
                let blocks = incoming.blocks.clone();
                self.send_back(conn, Wire::Grant { handoff, ticket, blocks });
            }
            SinkAction::SendRefuse { reason, .. } => self.send_back(conn, Wire::Refuse { handoff, reason }),
            SinkAction::Verify(runs) => self.checker_does(w, Event::Check { key, runs: Arc::new(runs) }),
            SinkAction::Deliver(commit) => self.deliver(w, key, *commit),
            SinkAction::SendAck => self.send_back(conn, Wire::Ack { ticket }),
            SinkAction::SendNack(failure) => self.send_back(conn, Wire::Nack { ticket, failure }),
            SinkAction::SendAbort(_) => self.send_back(conn, Wire::Abort { handoff }),
            SinkAction::Release => incoming.hold = None,
            SinkAction::Quarantine => {
                let by = owner(incoming.source);
                incoming.quarantined = incoming.hold.take().map(|lease| lease.quarantine(by));
                let c = &self.net.connections[conn];
                if c.sink_open && c.lane.closing_fences() {
                    let here = self.addr(w);
                    self.post(here, Event::ConnectionLost { conn });
                }
            }
            SinkAction::ReleaseQuarantined => {
                if let Some(blocks) = incoming.quarantined.take() {
                    blocks.release();
                }
            }
            SinkAction::Failed(failure) => {
                let request = incoming.request.clone();
                self.blame(&failure);
                self.counts.add("sink ends", failure.name());
                let claim = self.worker_mut(w).and_then(|w| w.claims.take(&request));
                if let Some(call) = claim {
                    self.counts.moved("claim", "booked", "failed");
                    self.say(w, call, Said::Error(Trouble::new(failure.kind())));
                }
            }
            SinkAction::Forget => {
                let gone = self.worker_mut(w).and_then(|w| w.incoming.remove(&key));
                if gone.is_some_and(|i| i.hold.is_some() || i.quarantined.is_some()) {
                    self.fail(Invariant::Quiet, "a handoff was forgotten with its blocks".into());
                }
            }
        }
    }

    /// This side closes a connection, or finds it broken.
    pub(super) fn sinks_lost(&mut self, w: usize, conn: usize) {
        let is_restart = self.mutant.reuses_names() && !self.is_alive(self.net.connections[conn].source);
        if is_restart && self.claims_fail(w, conn) {
            return;
        }
        let c = &mut self.net.connections[conn];
        let fenced = c.lane.closing_fences() || self.mutant.pretends_fences();
        let (source, was_open) = (c.source, std::mem::replace(&mut c.sink_open, false));
        if was_open {
            self.post(source, Event::ConnectionLost { conn });
        }
        let Some(worker) = self.worker(w) else { return };
        let on: Vec<u64> = worker.incoming.iter().filter(|(_, i)| i.conn == conn).map(|(key, _)| *key).collect();
        for key in on {
            self.sink_input(w, key, SinkInput::ConnectionLost { fenced, detail: "it broke".into() });
        }
    }

    /// The defect: routers hear that a source is gone, but what it sent still counts, since there will be another at its address.
    /// Whether there were claims for that.
    fn claims_fail(&mut self, w: usize, conn: usize) -> bool {
        let Some(worker) = self.worker_mut(w) else { return false };
        let on: Vec<&Incoming> = worker.incoming.values().filter(|i| i.conn == conn).collect();
        if on.iter().any(|i| i.sink.is_quarantined()) {
            return false;
        }
        let calls: Vec<usize> = on.into_iter().filter_map(|i| worker.claims.take(&i.request)).collect();
        let lost = Said::Error(Trouble::new(ErrorKind::Unavailable));
        calls.iter().for_each(|call| self.say(w, *call, lost.clone()));
        !calls.is_empty()
    }

    /// A source is proven dead.
    pub(super) fn peer_is_dead(&mut self, w: usize, peer: Addr) {
        let Some(worker) = self.worker(w) else { return };
        let of_it: Vec<u64> = worker.incoming.iter().filter(|(_, i)| i.source == peer).map(|(key, _)| *key).collect();
        of_it.into_iter().for_each(|key| self.sink_input(w, key, SinkInput::Fenced));
    }
}

impl Incoming {
    pub(super) fn quarantined_blocks(&self) -> usize {
        self.quarantined.as_ref().map_or(0, |q| q.blocks().total())
    }

    /// Blocks that it has, or will have.
    fn blocks_max(&self, worker: &Worker) -> usize {
        worker.memory.map.layout().blocks_for(self.tokens as usize)
    }
}
