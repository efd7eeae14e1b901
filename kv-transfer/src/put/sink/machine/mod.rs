//! The sink of one put: when to grant, to verify, to adopt, and when the blocks may be used again. Pure: it takes inputs and the time, and
//! returns actions.
//!
//! ```text
//! Claimed ──► Reserved ──► Receiving ──► Verified ──► Running
//!                 └────────────┴─► Aborting ──► Quarantined ──► Free
//! ```

use crate::coverage::Coverage;
use crate::hazards::hazard;
use crate::message::{Commit, SumRun};
use crate::{HandoffFailure, RefuseReason};
use baton_types::{KvLayout, TicketId, seeded};
use std::time::{Duration, Instant};

/// What happened.
#[derive(Debug)]
pub(crate) enum SinkInput {
    /// The worker reserved blocks, which hold the positions before `from` already: a multiple of a granule, below the positions expected.
    Granted { from: u32 },
    /// The worker has none.
    Refused { reason: RefuseReason, detail: String },
    /// Checksums of bytes that are visible here.
    Checksums(Vec<SumRun>),
    /// The source wrote, flushed and committed everything.
    Commit(Box<Commit>),
    /// So many checksums were found right.
    Verified { sums: u64 },
    /// One was found wrong.
    Corrupt(String),
    /// What the worker said to [`SinkAction::Deliver`].
    Delivered(Result<(), String>),
    /// The source writes no more; `flushed` if nothing that it wrote is still under way.
    Aborted { flushed: bool, detail: String },
    /// This side gives up.
    Cancel(HandoffFailure),
    /// The connection is gone; `fenced` if nothing can be stored through it any more.
    ConnectionLost { fenced: bool, detail: String },
    /// Nothing can write to the blocks any more, whatever was unsure before.
    Fenced,
    /// Time passed.
    Tick,
}

/// What to do about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SinkAction {
    /// Positions from [`Sink::from`] on.
    SendGrant,
    SendRefuse {
        reason: RefuseReason,
        detail: String,
    },
    /// Compare these with the blocks, in the background.
    Verify(Vec<SumRun>),
    /// Give the verified sequence to the worker; its answer is [`SinkInput::Delivered`].
    Deliver(Box<Commit>),
    SendAck,
    SendNack(HandoffFailure),
    SendAbort(String),
    /// The blocks go back to the pool.
    Release,
    /// The blocks may still be written.
    Quarantine,
    /// They no longer may.
    ReleaseQuarantined,
    /// Tell the worker that the handoff failed.
    Failed(HandoffFailure),
    /// The end.
    Forget,
}

#[derive(Debug)]
enum State {
    /// Asked for; the worker has not answered.
    Claimed,
    /// Granted; nothing is known to have arrived.
    Reserved,
    /// Something arrived.
    Receiving,
    /// Adopted by the worker.
    Running,
    /// Given up here; the source got an abort and has until then to acknowledge it.
    Aborting(Instant),
    /// It did not.
    Quarantined,
    Free,
}

/// One handoff, seen from its sink.
#[derive(Debug)]
pub(crate) struct Sink {
    pub ticket: TicketId,
    layout: KvLayout,
    /// What the blocks take: fixed by the offer and the grant, so that a source cannot commit less.
    expected: Expected,
    /// First position that is moved; known with the grant.
    from: u32,
    deadline: Instant,
    abort_wait: Duration,
    state: State,
    #[cfg(any(test, feature = "testing"))]
    hazards: crate::Hazards,
    committed: bool,
    commit: Option<Box<Commit>>,
    /// What checksums came for, each part once, so that counting those found right tells when all are.
    received: Coverage,
    verified: u64,
}

/// The size of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub tokens: u32,
    /// Of one position, in all layers.
    pub token_bytes: u64,
    pub algorithm: u16,
}

impl Sink {
    pub(crate) fn new(
        ticket: TicketId,
        layout: &KvLayout,
        expected: Expected,
        deadline: Instant,
        abort_wait: Duration,
    ) -> Self {
        let (state, committed, commit) = (State::Claimed, false, None);
        let (from, received, verified) = (0, Coverage::new(layout, 0..expected.tokens), 0);
        let layout = layout.clone();
        Self {
            ticket,
            layout,
            expected,
            from,
            deadline,
            abort_wait,
            state,
            #[cfg(any(test, feature = "testing"))]
            hazards: crate::Hazards::default(),
            committed,
            commit,
            received,
            verified,
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn leave_out(&mut self, hazards: &crate::Hazards) {
        self.hazards = hazards.clone();
    }

    /// First position that is moved; 0 before the grant.
    pub(crate) fn from(&self) -> u32 {
        self.from
    }

    /// KV bytes that are moved.
    pub(crate) fn bytes(&self) -> u64 {
        self.expected.token_bytes * u64::from(self.expected.tokens.saturating_sub(self.from))
    }

    /// Whether a grant stands whose blocks the source may write.
    pub(crate) fn is_granted(&self) -> bool {
        matches!(self.state, State::Reserved | State::Receiving | State::Aborting(_))
    }

    /// Whether the blocks wait for a fence.
    pub(crate) fn is_quarantined(&self) -> bool {
        matches!(self.state, State::Quarantined)
    }

    /// Takes an input in, and says what to do, in order.
    pub(crate) fn handle(&mut self, now: Instant, input: SinkInput) -> Vec<SinkAction> {
        let mut actions = Vec::new();
        match input {
            SinkInput::Granted { from } => match self.state {
                State::Claimed => {
                    self.state = State::Reserved;
                    self.from = from;
                    self.received = Coverage::new(&self.layout, from..self.expected.tokens);
                    actions.push(SinkAction::SendGrant);
                }
                // Ended meanwhile: no peer knows of these blocks.
                _ => actions.push(SinkAction::Release),
            },
            SinkInput::Refused { reason, detail } => {
                if matches!(self.state, State::Claimed) {
                    // The worker's own decision: it need not be told that the handoff failed.
                    self.state = State::Free;
                    actions.extend([SinkAction::SendRefuse { reason, detail }, SinkAction::Forget]);
                }
            }
            SinkInput::Checksums(runs) => self.checksums(runs, now, &mut actions),
            SinkInput::Commit(commit) => self.commit(commit, now, &mut actions),
            SinkInput::Verified { sums } => {
                self.verified += sums;
                self.deliver_if_whole(&mut actions);
            }
            SinkInput::Corrupt(detail) => self.corrupt(detail, now, &mut actions),
            SinkInput::Delivered(answer) => self.delivered(answer, &mut actions),
            SinkInput::Aborted { flushed, detail } => self.aborted(flushed, detail, &mut actions),
            SinkInput::Cancel(failure) => self.give_up(failure, now, &mut actions),
            SinkInput::ConnectionLost { fenced, detail } => self.lost(fenced, detail, &mut actions),
            SinkInput::Fenced => self.lost(true, "the peer was fenced".into(), &mut actions),
            SinkInput::Tick => self.tick(now, &mut actions),
        }
        actions
    }

    fn checksums(&mut self, runs: Vec<SumRun>, now: Instant, actions: &mut Vec<SinkAction>) {
        if !matches!(self.state, State::Reserved | State::Receiving) {
            return;
        }
        if let Err(detail) = runs.iter().try_for_each(|run| self.received.add(run)) {
            return self.give_up(HandoffFailure::Protocol(detail.into()), now, actions);
        }
        self.state = State::Receiving;
        actions.push(SinkAction::Verify(runs));
    }

    fn commit(&mut self, commit: Box<Commit>, now: Instant, actions: &mut Vec<SinkAction>) {
        match self.state {
            _ if hazard!(self, LateCommits) => self.state = State::Receiving,
            // It crossed our abort. It was posted behind a flush, so it is as good as an acknowledgement.
            State::Aborting(_) => return self.free_or_quarantine(true, actions),
            // No tick may have come since.
            State::Reserved | State::Receiving if now >= self.deadline => {
                return self.give_up(HandoffFailure::Deadline("receiving"), now, actions);
            }
            State::Reserved | State::Receiving => {}
            _ => return,
        }
        let whole = commit.algorithm == self.expected.algorithm
            && commit.sums == self.received.sums()
            && commit.bytes == self.bytes()
            && commit.tokens.len() >= self.expected.tokens as usize
            && commit.prompt_len as usize <= commit.tokens.len();
        if !whole {
            // A commit is posted behind a flush, so nothing is under way and the blocks can go.
            let detail = "the commit does not cover the reservation".to_owned();
            actions.push(SinkAction::SendNack(HandoffFailure::Protocol(detail.clone())));
            return self.end(Some(SinkAction::Release), HandoffFailure::Protocol(detail), actions);
        }
        // A doubled commit changes nothing.
        if !std::mem::replace(&mut self.committed, true) || hazard!(self, DoubledCommits) {
            self.state = State::Receiving;
            self.commit = Some(commit);
            self.deliver_if_whole(actions);
        }
    }

    fn deliver_if_whole(&mut self, actions: &mut Vec<SinkAction>) {
        let whole = self.verified == self.received.sums() && self.committed;
        if !whole || !matches!(self.state, State::Receiving) {
            return;
        }
        actions.extend(self.commit.take().map(SinkAction::Deliver));
    }

    fn delivered(&mut self, answer: Result<(), String>, actions: &mut Vec<SinkAction>) {
        if !matches!(self.state, State::Receiving) {
            return; // It came too late: the source was told otherwise, and the worker that it failed.
        }
        match answer {
            Ok(()) => {
                self.state = State::Running;
                actions.extend([SinkAction::SendAck, SinkAction::Forget]);
            }
            Err(detail) => {
                let failure = HandoffFailure::NotAdopted(detail);
                actions.push(SinkAction::SendNack(failure.clone()));
                // The worker took the hold with the delivery and has dropped it.
                self.end(None, failure, actions);
            }
        }
    }

    fn corrupt(&mut self, detail: String, now: Instant, actions: &mut Vec<SinkAction>) {
        if !matches!(self.state, State::Receiving) {
            return;
        }
        // Checksums may come ahead of the commit, while later layers are still being written: the blocks go only behind the
        // source's flush, unless the commit said that it is done.
        let failure = HandoffFailure::Corrupt(detail);
        actions.push(SinkAction::SendNack(failure.clone()));
        if self.committed {
            self.end(Some(SinkAction::Release), failure, actions);
        } else {
            actions.push(SinkAction::Failed(failure));
            self.state = State::Aborting(now + self.abort_wait);
        }
    }

    fn aborted(&mut self, flushed: bool, detail: String, actions: &mut Vec<SinkAction>) {
        match self.state {
            State::Claimed => self.end(None, HandoffFailure::AbortedByPeer(detail), actions),
            State::Reserved | State::Receiving if flushed => {
                self.end(Some(SinkAction::Release), HandoffFailure::AbortedByPeer(detail), actions);
            }
            State::Reserved | State::Receiving => {
                actions.push(SinkAction::Failed(HandoffFailure::AbortedByPeer(detail)));
                self.quarantine(actions);
            }
            State::Aborting(_) if flushed => {
                self.state = State::Free;
                actions.extend([SinkAction::Release, SinkAction::Forget]);
            }
            State::Aborting(_) => self.quarantine(actions),
            State::Quarantined if flushed => self.release_quarantined(actions),
            State::Quarantined | State::Running | State::Free => {}
        }
    }

    fn lost(&mut self, fenced: bool, detail: String, actions: &mut Vec<SinkAction>) {
        let fenced = fenced || seeded!(ReleaseWithoutFence);
        match self.state {
            State::Claimed => self.end(None, HandoffFailure::PeerLost(detail), actions),
            State::Reserved | State::Receiving => {
                actions.push(SinkAction::Failed(HandoffFailure::PeerLost(detail)));
                self.free_or_quarantine(fenced, actions);
            }
            State::Aborting(_) => self.free_or_quarantine(fenced, actions),
            State::Quarantined if fenced => self.release_quarantined(actions),
            State::Quarantined | State::Running | State::Free => {}
        }
    }

    fn free_or_quarantine(&mut self, fenced: bool, actions: &mut Vec<SinkAction>) {
        if fenced {
            self.state = State::Free;
            actions.extend([SinkAction::Release, SinkAction::Forget]);
        } else {
            self.quarantine(actions);
        }
    }

    fn quarantine(&mut self, actions: &mut Vec<SinkAction>) {
        // A commit is posted behind a flush, so nothing is under way. The worker may have the blocks already.
        if self.committed {
            return self.free_or_quarantine(true, actions);
        }
        self.state = State::Quarantined;
        actions.push(SinkAction::Quarantine);
    }

    fn release_quarantined(&mut self, actions: &mut Vec<SinkAction>) {
        self.state = State::Free;
        actions.extend([SinkAction::ReleaseQuarantined, SinkAction::Forget]);
    }

    fn tick(&mut self, now: Instant, actions: &mut Vec<SinkAction>) {
        match self.state {
            State::Claimed | State::Reserved | State::Receiving if now >= self.deadline => {
                self.give_up(HandoffFailure::Deadline("receiving"), now, actions);
            }
            State::Aborting(until) if now >= until => self.quarantine(actions),
            _ => {}
        }
    }

    fn give_up(&mut self, failure: HandoffFailure, now: Instant, actions: &mut Vec<SinkAction>) {
        match self.state {
            State::Claimed => {
                let (reason, detail) = (RefuseReason::NoRoom, failure.to_string());
                actions.push(SinkAction::SendRefuse { reason, detail });
                self.end(None, failure, actions);
            }
            State::Reserved | State::Receiving => {
                actions.push(SinkAction::SendAbort(failure.to_string()));
                actions.push(SinkAction::Failed(failure));
                self.state = State::Aborting(now + self.abort_wait);
            }
            State::Aborting(_) | State::Quarantined | State::Running | State::Free => {}
        }
    }

    fn end(&mut self, blocks: Option<SinkAction>, failure: HandoffFailure, actions: &mut Vec<SinkAction>) {
        self.state = State::Free;
        actions.extend(blocks);
        actions.extend([SinkAction::Failed(failure), SinkAction::Forget]);
    }
}

#[cfg(test)]
mod tests;
