//! The source's shell: carries out what the real state machine of a handoff decides.

use super::clock::{Addr, ms};
use super::event::Event;
use super::invariant::Invariant;
use super::wire::Wire;
use super::world::World;
use baton_kv_cache::Lease;
use baton_kv_transfer::pure::{
    ALGORITHM, Commit, GRANULE, Side, Source, SourceAction, SourceInput, SumRun, copies, layer_sums,
};
use baton_kv_transfer::{HandoffFailure, RefuseReason};
use baton_types::{BlockId, GroupBlocks, TokenId};
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;
use std::sync::Arc;

/// Keeps the blocks once the engine gave them up; the transfer, its checksums and the engine's observer share it.
pub(super) type Pouch = Rc<RefCell<Option<Lease>>>;

/// A handoff on its way out.
#[derive(Debug)]
pub(super) struct Sending {
    source: Source,
    conn: usize,
    /// The stream of the router that wants it.
    call: usize,
    blocks: GroupBlocks,
    remote: Vec<BlockId>,
    hold: Option<Pouch>,
    commit: Option<(Vec<TokenId>, u32)>,
}

impl Sending {
    /// Whether its blocks are kept for whatever reads them.
    pub(super) fn holds(&self) -> bool {
        self.hold.is_some()
    }
}

/// The handoff of a call, as its prefill sees it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shipment {
    pub(super) key: u64,
    pub(super) sealed: bool,
}

impl World {
    /// Offers the blocks of a prefill that begins.
    pub(super) fn offer(&mut self, w: usize, call: usize, blocks: GroupBlocks, hold: Pouch) {
        let spec = &self.calls[call];
        let (sink, tokens, request) = (spec.sink, spec.tokens.len() as u32, spec.name.clone());
        let deadline = spec.deadline.min(self.clock.now() + self.shape.handoff_max);
        let left = deadline - self.clock.now().min(deadline);
        let deadline = self.clock.instant(deadline);
        let here = self.addr(w);
        let conn = self.connect(here, sink);
        let (epoch_bytes, flush_wait) = (self.shape.epoch_bytes, self.shape.abort_wait);
        let Some(worker) = self.worker_mut(w) else { return };
        worker.next_key += 1;
        let key = worker.next_key;
        let source = Source::new(worker.memory.map.layout().clone(), tokens, deadline, epoch_bytes, flush_wait);
        let sending = Sending { source, conn, call, blocks, remote: Vec::new(), hold: Some(hold), commit: None };
        worker.sending.insert(key, sending);
        if let Some(call) = worker.calls.get_mut(&call) {
            call.shipment = Some(Shipment { key, sealed: false });
        }
        self.send_forth(conn, Wire::Offer { handoff: key, request, tokens, left });
        self.tick_soon(w);
    }

    /// Everything is computed.
    pub(super) fn seal(&mut self, w: usize, key: u64, tokens: Vec<TokenId>, prompt_len: u32) {
        if let Some(sending) = self.worker_mut(w).and_then(|w| w.sending.get_mut(&key)) {
            sending.commit = Some((tokens, prompt_len));
            let at = self.clock.now() + ms(1);
            let here = self.addr(w);
            self.clock.post(at, here, Event::Finish { key });
        }
    }

    pub(super) fn abort(&mut self, w: usize, key: u64) {
        self.source_input(w, key, SourceInput::Abort(HandoffFailure::Aborted("given up".into())));
    }

    pub(super) fn source_input(&mut self, w: usize, key: u64, input: SourceInput) {
        let now = self.clock.instant(self.clock.now());
        let Some(sending) = self.worker_mut(w).and_then(|w| w.sending.get_mut(&key)) else { return };
        let before = sending.source.state();
        let actions = sending.source.handle(now, input);
        let after = sending.source.state();
        self.counts.moved("source", before, after);
        actions.into_iter().for_each(|action| self.source_action(w, key, action));
    }

    fn source_action(&mut self, w: usize, key: u64, action: SourceAction) {
        let Some(sending) = self.worker_mut(w).and_then(|w| w.sending.get_mut(&key)) else { return };
        let (conn, ticket) = (sending.conn, sending.source.ticket());
        match action {
            SourceAction::Copy { epoch, layer, tokens, .. } => self.copy(w, key, epoch, layer, tokens),
            SourceAction::Flush { epoch } => self.flush(conn, key, epoch),
            // Everything is posted at once here: nothing waits to be dropped.
            SourceAction::Cancel => {}
            SourceAction::SendChecksums(runs) => {
                if let Some(ticket) = ticket {
                    self.send_forth(conn, Wire::Checksums { ticket, runs: Arc::new(runs) });
                }
            }
            SourceAction::SendCommit { sums, bytes } => {
                let (Some(ticket), Some((tokens, prompt_len))) = (ticket, sending.commit.take()) else { return };
                let (algorithm, extra) = (ALGORITHM, Vec::new());
                let commit = Commit { ticket, algorithm, sums, bytes, prompt_len, tokens, extra };
                self.send_forth(conn, Wire::Commit(Box::new(commit)));
            }
            SourceAction::SendAborted { flushed, .. } => self.send_forth(conn, Wire::Aborted { handoff: key, flushed }),
            SourceAction::Disconnect => {
                let here = self.addr(w);
                self.post(here, Event::ConnectionLost { conn });
            }
            SourceAction::ReleaseHold => sending.hold = None,
            SourceAction::Done(result) => self.sent(w, key, result),
        }
    }

    fn copy(&mut self, w: usize, key: u64, epoch: u32, layer: usize, tokens: Range<u32>) {
        let Some(worker) = self.worker(w) else { return };
        let Some(sending) = worker.sending.get(&key) else { return };
        let (Some(ticket), conn) = (sending.source.ticket(), sending.conn) else { return };
        if sending.hold.is_none() {
            return self.fail(Invariant::HeldBlocks, "a copy after the source let its blocks go".into());
        }
        let sink_map = self.sink_map();
        let heads = &worker.memory.heads;
        let source = Side { map: &worker.memory.map, blocks: &sending.blocks.0[0], heads };
        let sink = Side { map: &sink_map, blocks: &sending.remote, heads };
        let mut runs = Vec::new();
        copies(source, sink, 0, layer, tokens.clone(), self.shape.put_bytes_max, |run| runs.push(run));
        let hold = sending.hold.clone();
        runs.into_iter().for_each(|run| self.post_put(conn, key, ticket, run));
        self.checker_does(w, Event::Sum { key, epoch, layer, tokens, hold });
    }

    /// The checksum thread has computed sums of a copy.
    pub(super) fn summed(&mut self, w: usize, key: u64, epoch: u32, layer: usize, tokens: Range<u32>) {
        let Some(worker) = self.worker(w) else { return };
        let Some(sending) = worker.sending.get(&key) else { return };
        let first_granule = tokens.start / GRANULE;
        let memory = &worker.memory;
        let sums = layer_sums(&*memory.region, &memory.map, &sending.blocks.0[0], &memory.heads, 0, layer, tokens);
        let run = SumRun { group: 0, layer: layer as u16, first_granule, sums };
        self.source_input(w, key, SourceInput::Summed { epoch, run });
    }

    /// What the sink says.
    pub(super) fn source_wire(&mut self, w: usize, conn: usize, wire: Wire) {
        let Some(worker) = self.worker(w) else { return };
        let named = |handoff: u64| worker.sending.get(&handoff).filter(|s| s.conn == conn).map(|_| handoff);
        let ticketed = |ticket| {
            worker
                .sending
                .iter()
                .find(|(_, s)| s.conn == conn && s.source.ticket() == Some(ticket))
                .map(|(key, _)| *key)
        };
        let key = match &wire {
            Wire::Grant { handoff, .. } | Wire::Refuse { handoff, .. } | Wire::Abort { handoff, .. } => named(*handoff),
            Wire::Ack { ticket } | Wire::Nack { ticket, .. } => ticketed(*ticket),
            _ => None,
        };
        let Some(key) = key else {
            if let Wire::Grant { handoff, .. } | Wire::Abort { handoff, .. } = wire {
                self.send_forth(conn, Wire::Aborted { handoff, flushed: true });
            }
            return;
        };
        let input = match wire {
            Wire::Grant { ticket, blocks, .. } => {
                if let Some(sending) = self.worker_mut(w).and_then(|w| w.sending.get_mut(&key)) {
                    sending.remote = blocks.0.into_iter().next().unwrap_or_default();
                }
                SourceInput::Granted { ticket, from: 0 }
            }
            Wire::Refuse { reason, .. } => {
                SourceInput::Refused(HandoffFailure::Refused { reason, detail: String::new() })
            }
            Wire::Abort { .. } => SourceInput::AbortedBySink(String::new()),
            Wire::Ack { .. } => SourceInput::Acked,
            Wire::Nack { failure, .. } => SourceInput::Nacked(failure),
            _ => return,
        };
        self.source_input(w, key, input);
    }

    /// The end of a handoff.
    fn sent(&mut self, w: usize, key: u64, result: Result<(), HandoffFailure>) {
        let Some(sending) = self.worker_mut(w).and_then(|w| w.sending.remove(&key)) else { return };
        if sending.hold.is_some() {
            self.fail(Invariant::Quiet, "a handoff ended with its blocks held".into());
        }
        if let Err(failure) = &result {
            self.blame(failure);
        }
        self.counts.add("source ends", result.as_ref().map_or_else(HandoffFailure::name, |()| "adopted"));
        self.shipped(w, sending.call, key, result.err());
    }

    pub(super) fn sources_lost(&mut self, w: usize, conn: usize) {
        self.close_source(conn);
        let Some(worker) = self.worker(w) else { return };
        let on: Vec<u64> = worker.sending.iter().filter(|(_, s)| s.conn == conn).map(|(key, _)| *key).collect();
        on.into_iter().for_each(|key| self.source_input(w, key, SourceInput::ConnectionLost("it broke".into())));
    }

    /// Something for the checksum thread, which does one thing after the other.
    pub(super) fn checker_does(&mut self, w: usize, event: Event) {
        let (at, here) = (self.clock.now() + self.delay() / 4, self.addr(w));
        let Some(worker) = self.worker_mut(w) else { return };
        let at = worker.checker.arrive(at);
        self.clock.post(at, here, event);
    }

    /// No correct pair of workers fails a handoff so, unless the schedule damaged something.
    pub(super) fn blame(&mut self, failure: &HandoffFailure) {
        let is_defect = match failure {
            HandoffFailure::Corrupt(_) => !self.was_damaged,
            HandoffFailure::Protocol(_) | HandoffFailure::Incompatible { .. } => true,
            HandoffFailure::Refused { reason, .. } => *reason == RefuseReason::Protocol,
            _ => false,
        };
        if is_defect {
            self.fail(Invariant::NoProtocolError, format!("a handoff failed as none should: {failure}"));
        }
    }
}

/// The label under which blocks that this start may still write are quarantined.
pub(super) fn owner(addr: Addr) -> u64 {
    addr.process as u64 * 1_000 + addr.incarnation
}
