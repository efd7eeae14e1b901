//! The sink's state machine of one put: when to grant, verify and adopt, and when the blocks may be reused. Pure: it takes inputs and the
//! time, and returns actions.
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

/// An event of one put, as its sink sees it.
#[derive(Debug)]
pub(crate) enum SinkInput {
    /// The worker reserved blocks that already hold the positions before `from`: a multiple of a granule, below the positions expected.
    Granted { from: u32 },
    /// The worker refused the offer.
    Refused { reason: RefuseReason, detail: String },
    /// Checksums of bytes that are visible here.
    Checksums(Vec<SumRun>),
    /// The source wrote, flushed and committed everything.
    Commit(Box<Commit>),
    /// This many checksums matched.
    Verified { sums: u64 },
    /// A checksum did not match, or this side's device did not compute them.
    Unverified(HandoffFailure),
    /// No write is on its way into the blocks, after [`SinkAction::CloseWindow`].
    WindowClosed,
    /// The worker's answer to [`SinkAction::Deliver`].
    Delivered(Result<(), String>),
    /// The source writes no more; `flushed` if none of its writes are still in flight.
    Aborted { flushed: bool, detail: String },
    /// This side aborts, for this reason.
    Cancel(HandoffFailure),
    /// The connection is closed; `fenced` if nothing can be stored through it any more.
    ConnectionLost { fenced: bool, detail: String },
    /// Nothing can write to the blocks any more, even where that was uncertain before.
    Fenced,
    /// Time passed: deadlines may be over.
    Tick,
}

/// What the sink must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum SinkAction {
    /// Grant positions from [`Sink::from`] on.
    SendGrant,
    SendRefuse {
        reason: RefuseReason,
        detail: String,
    },
    /// Compare these with the blocks, in the background.
    Verify(Vec<SumRun>),
    /// Let the source write nothing more; [`SinkInput::WindowClosed`] follows.
    CloseWindow,
    /// Give the verified sequence to the worker; its answer is [`SinkInput::Delivered`].
    Deliver(Box<Commit>),
    SendAck,
    SendNack(HandoffFailure),
    SendAbort(String),
    /// Return the blocks to the pool, once no write is on its way into them.
    Release,
    /// Quarantine the blocks: they may still be written.
    Quarantine,
    /// The same with quarantined blocks: they can no longer be written.
    ReleaseQuarantined,
    /// Report to the worker that the handoff failed.
    Failed(HandoffFailure),
    /// The handoff has ended.
    Forget,
}

#[derive(Debug)]
enum State {
    /// The worker was asked and has not answered.
    Claimed,
    /// Granted; nothing has arrived yet.
    Reserved,
    /// At least one message of the source has arrived.
    Receiving,
    /// Adopted by the worker.
    Running,
    /// Aborted here; the source was sent an abort and must acknowledge it by this instant.
    Aborting(Instant),
    /// The source did not acknowledge it.
    Quarantined,
    Free,
}

/// The sink's state of one handoff.
#[derive(Debug)]
pub(crate) struct Sink {
    pub ticket: TicketId,
    layout: KvLayout,
    /// The expected size. The offer and the grant fix it, so that a source cannot commit less.
    expected: Expected,
    /// First position to move; known with the grant.
    from: u32,
    /// The same by group, and the bytes that move, where groups differ.
    limit: Option<(Vec<u32>, u64)>,
    deadline: Instant,
    abort_wait: Duration,
    state: State,
    #[cfg(any(test, feature = "testing"))]
    hazards: crate::Hazards,
    committed: bool,
    /// Nothing writes to the blocks any more, since the window was closed behind the commit.
    drained: bool,
    commit: Option<Box<Commit>>,
    /// The worker has the commit, and the blocks with it.
    delivered: bool,
    /// The parts whose checksums came, each once. So the count of matching checksums shows when all have matched.
    received: Coverage,
    verified: u64,
}

/// The size of a handoff.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Expected {
    pub tokens: u32,
    /// Bytes of one position, in all layers.
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
        let (state, committed, drained, commit) = (State::Claimed, false, false, None);
        let starts = vec![0; layout.groups().len()];
        let (from, received, verified) = (0, Coverage::new(layout, &starts, expected.tokens), 0);
        let layout = layout.clone();
        Self {
            ticket,
            layout,
            expected,
            from,
            limit: None,
            deadline,
            abort_wait,
            state,
            #[cfg(any(test, feature = "testing"))]
            hazards: crate::Hazards::default(),
            committed,
            drained,
            commit,
            delivered: false,
            received,
            verified,
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn leave_out(&mut self, hazards: &crate::Hazards) {
        self.hazards = hazards.clone();
    }

    /// Groups move different positions: those from `starts[group]` on, `bytes` in total. Call it before the grant.
    pub(crate) fn start_at(&mut self, starts: Vec<u32>, bytes: u64) {
        self.limit = Some((starts, bytes));
    }

    /// First position to move; 0 before the grant.
    pub(crate) fn from(&self) -> u32 {
        self.from
    }

    /// KV bytes to move.
    pub(crate) fn bytes(&self) -> u64 {
        let all = self.expected.token_bytes * u64::from(self.expected.tokens.saturating_sub(self.from));
        self.limit.as_ref().map_or(all, |(_, bytes)| *bytes)
    }

    /// Whether blocks are granted that the source may write.
    pub(crate) fn is_granted(&self) -> bool {
        matches!(self.state, State::Reserved | State::Receiving | State::Aborting(_))
    }

    /// Whether the blocks wait for a fence.
    pub(crate) fn is_quarantined(&self) -> bool {
        matches!(self.state, State::Quarantined)
    }

    /// Processes an input, and returns the actions in order.
    pub(crate) fn handle(&mut self, now: Instant, input: SinkInput) -> Vec<SinkAction> {
        let mut actions = Vec::new();
        match input {
            SinkInput::Granted { from } => match self.state {
                State::Claimed => {
                    self.state = State::Reserved;
                    self.from = from;
                    let all = vec![from; self.layout.groups().len()];
                    let starts = self.limit.as_ref().map_or(&all, |(starts, _)| starts);
                    self.received = Coverage::new(&self.layout, starts, self.expected.tokens);
                    actions.push(SinkAction::SendGrant);
                }
                // The handoff ended meanwhile: no peer knows of these blocks.
                _ => actions.push(SinkAction::Release),
            },
            SinkInput::Refused { reason, detail } => {
                if matches!(self.state, State::Claimed) {
                    // The worker decided this itself, so it is not notified of the failure.
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
            SinkInput::Unverified(failure) => self.unverified(failure, now, &mut actions),
            SinkInput::WindowClosed => {
                self.drained = true;
                self.deliver_if_whole(&mut actions);
            }
            SinkInput::Delivered(answer) => self.delivered(answer, &mut actions),
            SinkInput::Aborted { flushed, detail } => self.aborted(flushed, detail, &mut actions),
            // Once delivered, the sequence is the worker's: what ends its stream, even its last token, may overtake the worker's answer.
            SinkInput::Cancel(_) if self.delivered => {}
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
            // It crossed our abort. It was posted after a flush, so it is equivalent to an acknowledgement.
            State::Aborting(_) => return self.free_or_quarantine(true, actions),
            // There may have been no tick since the deadline.
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
            // A commit is posted after a flush, so no write of a correct source is in flight.
            let detail = "the commit does not cover the reservation".to_owned();
            actions.push(SinkAction::SendNack(HandoffFailure::Protocol(detail.clone())));
            return self.end(Some(SinkAction::Release), HandoffFailure::Protocol(detail), actions);
        }
        // A duplicate commit changes nothing.
        if !std::mem::replace(&mut self.committed, true) || hazard!(self, DoubledCommits) {
            self.state = State::Receiving;
            self.commit = Some(commit);
            actions.push(SinkAction::CloseWindow);
            self.deliver_if_whole(actions);
        }
    }

    fn deliver_if_whole(&mut self, actions: &mut Vec<SinkAction>) {
        let whole = self.verified == self.received.sums() && self.committed && self.drained;
        if !whole || !matches!(self.state, State::Receiving) {
            return;
        }
        self.delivered |= self.commit.is_some();
        actions.extend(self.commit.take().map(SinkAction::Deliver));
    }

    fn delivered(&mut self, answer: Result<(), String>, actions: &mut Vec<SinkAction>) {
        if !matches!(self.state, State::Receiving) {
            return; // It came too late: source and worker were already notified of the failure.
        }
        match answer {
            Ok(()) => {
                self.state = State::Running;
                actions.extend([SinkAction::SendAck, SinkAction::Forget]);
            }
            Err(detail) => {
                let failure = HandoffFailure::NotAdopted(detail);
                actions.push(SinkAction::SendNack(failure.clone()));
                // The worker received the hold with the delivery and has dropped it.
                self.end(None, failure, actions);
            }
        }
    }

    fn unverified(&mut self, failure: HandoffFailure, now: Instant, actions: &mut Vec<SinkAction>) {
        if !matches!(self.state, State::Receiving) {
            return;
        }
        // Checksums may come before the commit, while later layers are still being written. So the blocks are released only after the
        // source's flush, unless the commit reported that.
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
