//! The reader's state machine of one get. It adopts only a complete copy whose pin still held after the last read, with the owner's
//! checksums.
//!
//! When a get is aborted, transfers may still be in flight: the reader's own one-sided reads, or the owner's writes, which may be one-sided
//! even where this side's are not. So the worker is notified of the failure at once. The blocks stay held until the owner has confirmed
//! that its writes have ended, or until closing its connection has fenced them.

use crate::HandoffFailure;
use crate::coverage::Coverage;
use crate::hazards::hazard;
use crate::message::SumRun;
use baton_types::{KvLayout, TicketId};
use std::time::{Duration, Instant};

/// An event of one get, as its reader sees it.
#[derive(Debug)]
pub(crate) enum ReaderInput {
    /// The owner pinned blocks. `by_itself`: this side reads them one-sided, without the owner's help.
    Granted { ticket: TicketId, by_itself: bool },
    /// The owner refused, or cannot be reached.
    Refused(HandoffFailure),
    /// Every one-sided read of this side has ended, successfully or not: nothing is in flight.
    Read,
    /// Checksums of what the owner pinned.
    Checksums(Vec<SumRun>),
    /// The owner confirms: everything is copied, nothing is in flight, and the pin held until now. It sent this many checksums.
    Held { algorithm: u16, sums: u64 },
    /// The owner released the blocks, and none of its writes are still in flight.
    NotHeld(String),
    /// No write is on its way into the blocks, after [`ReaderAction::CloseWindow`].
    WindowClosed,
    /// This many checksums matched.
    Verified { sums: u64 },
    /// A checksum did not match, or this side's device did not compute them.
    Unverified(HandoffFailure),
    /// The owner of the get's handle aborts.
    Abort(HandoffFailure),
    /// The connection is closed, and with it every read; `fenced` if nothing can be stored through it any more.
    ConnectionLost { fenced: bool, detail: String },
    /// Nothing can write to the blocks any more, even where that was uncertain before.
    Fenced,
    /// Time passed: deadlines may be over.
    Tick,
}

/// What the reader must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReaderAction {
    /// Read everything; [`ReaderInput::Read`] reports the end.
    Read,
    /// Ask the owner to write everything; [`ReaderInput::Held`] reports the end.
    SendAsk,
    /// Ask whether the pin still holds.
    SendConfirm,
    /// Let the owner write nothing more; [`ReaderInput::WindowClosed`] follows.
    CloseWindow,
    /// Compare these with the blocks, in the background.
    Verify(Vec<SumRun>),
    /// Notify the owner that the blocks are no longer wanted.
    SendUnpin,
    /// Transfers in flight do not end by themselves: end them by closing the connection.
    Disconnect,
    /// Report to the worker that the get failed. Its blocks may still be written.
    Failed(HandoffFailure),
    /// Give the blocks to the worker.
    Adopt,
    /// The owner may still write to the blocks: nothing is known to prevent it.
    Quarantine,
    /// Nothing writes to the blocks any more, once no write is on its way. Always the last action.
    Forget,
}

#[derive(Debug)]
enum State {
    /// The owner has not granted it yet.
    Offering,
    Reading,
    /// All bytes are here; waits for the owner's confirmation that the pin held.
    Confirming,
    /// The pin held, and the owner writes nothing more: waits for writes that are on their way.
    Closing,
    /// The pin held; checksums are being compared.
    Verifying,
    /// Aborted; waits until this instant for transfers in flight.
    Draining(Instant),
    /// The connection is closed, but closing it did not fence the writes.
    Quarantined,
    Ended,
}

/// The reader's state of one get.
#[derive(Debug)]
pub(crate) struct Reader {
    algorithm: u16,
    deadline: Instant,
    drain_wait: Duration,
    state: State,
    ticket: Option<TicketId>,
    by_itself: bool,
    runs: Vec<SumRun>,
    received: Coverage,
    verified: u64,
    #[cfg(any(test, feature = "testing"))]
    hazards: crate::Hazards,
}

impl Reader {
    /// A get of `tokens` positions, counted from the first that is read.
    /// Only the positions from `starts[group]` on move. Call it before the grant.
    pub(crate) fn start_at(&mut self, layout: &KvLayout, starts: &[u32], tokens: u32) {
        self.received = Coverage::new(layout, starts, tokens);
    }

    pub(crate) fn new(layout: &KvLayout, tokens: u32, algorithm: u16, deadline: Instant, drain_wait: Duration) -> Self {
        let (state, received) = (State::Offering, Coverage::new(layout, &vec![0; layout.groups().len()], tokens));
        Self {
            algorithm,
            deadline,
            drain_wait,
            state,
            ticket: None,
            by_itself: false,
            runs: Vec::new(),
            received,
            verified: 0,
            #[cfg(any(test, feature = "testing"))]
            hazards: crate::Hazards::default(),
        }
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn leave_out(&mut self, hazards: &crate::Hazards) {
        self.hazards = hazards.clone();
    }

    /// Whether the owner may write to the blocks.
    pub(crate) fn is_open(&self) -> bool {
        matches!(self.state, State::Reading | State::Draining(_)) && !self.by_itself
    }

    /// Whether the blocks wait for a fence.
    pub(crate) fn is_quarantined(&self) -> bool {
        matches!(self.state, State::Quarantined)
    }

    pub(crate) fn ticket(&self) -> Option<TicketId> {
        self.ticket
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.deadline
    }

    pub(crate) fn handle(&mut self, now: Instant, input: ReaderInput) -> Vec<ReaderAction> {
        let mut actions = Vec::new();
        match (&self.state, input) {
            (State::Ended, _) => {}
            (State::Draining(_) | State::Quarantined, ReaderInput::Fenced) => self.end(&mut actions),
            (State::Quarantined, _) => {}
            (State::Draining(_), ReaderInput::Read) if self.by_itself => self.end(&mut actions),
            // The owner sends either message only after its posted writes were flushed.
            (State::Draining(_), ReaderInput::Held { .. } | ReaderInput::NotHeld(_)) if !self.by_itself => {
                self.end(&mut actions);
            }
            (State::Draining(until), ReaderInput::Tick) if now >= *until => actions.push(ReaderAction::Disconnect),
            (_, ReaderInput::ConnectionLost { fenced, detail }) => self.lost(fenced, detail, &mut actions),
            (State::Draining(_), _) => {}
            (State::Offering, ReaderInput::Granted { ticket, by_itself }) => {
                (self.ticket, self.by_itself, self.state) = (Some(ticket), by_itself, State::Reading);
                actions.push(if by_itself { ReaderAction::Read } else { ReaderAction::SendAsk });
            }
            (State::Offering, ReaderInput::Refused(failure)) => self.fail(failure, &mut actions),
            (State::Reading, ReaderInput::Read) => {
                self.state = State::Confirming;
                actions.push(ReaderAction::SendConfirm);
            }
            (State::Reading | State::Confirming, ReaderInput::Checksums(runs)) => {
                match runs.iter().try_for_each(|run| self.received.add(run)) {
                    Ok(()) => self.runs.extend(runs),
                    Err(detail) => self.give_up(HandoffFailure::Protocol(detail.into()), now, &mut actions),
                }
            }
            (State::Reading | State::Confirming, ReaderInput::Held { algorithm, sums }) => {
                self.held(algorithm, sums, now, &mut actions);
            }
            (State::Closing, ReaderInput::WindowClosed) => self.verify(&mut actions),
            (State::Verifying, ReaderInput::Verified { sums }) => {
                self.verified += sums;
                if self.verified == self.received.sums() {
                    actions.push(ReaderAction::Adopt);
                    self.end(&mut actions);
                }
            }
            (_, ReaderInput::Unverified(failure)) => self.give_up(failure, now, &mut actions),
            (State::Reading, ReaderInput::NotHeld(detail)) if !self.by_itself => {
                self.fail(HandoffFailure::Unpinned(detail), &mut actions);
            }
            (_, ReaderInput::NotHeld(detail)) => self.give_up(HandoffFailure::Unpinned(detail), now, &mut actions),
            (_, ReaderInput::Abort(failure)) => self.give_up(failure, now, &mut actions),
            (_, ReaderInput::Tick) if now >= self.deadline => {
                self.give_up(HandoffFailure::Deadline("reading"), now, &mut actions);
            }
            (_, ReaderInput::Tick | ReaderInput::Verified { .. } | ReaderInput::Read | ReaderInput::Fenced) => {}
            (_, ReaderInput::WindowClosed) => {}
            (_, input) => {
                let failure = HandoffFailure::Protocol(format!("{} out of turn", name(&input)));
                self.give_up(failure, now, &mut actions);
            }
        }
        actions
    }

    /// The owner confirms that the bytes read are those that it pinned.
    fn held(&mut self, algorithm: u16, sums: u64, now: Instant, actions: &mut Vec<ReaderAction>) {
        let read = !self.by_itself || matches!(self.state, State::Confirming);
        let covered: u64 = self.runs.iter().map(|run| run.sums.len() as u64).sum();
        if !read || algorithm != self.algorithm || sums != covered || covered != self.received.sums() {
            let failure = HandoffFailure::Protocol("the owner confirms what was not read".into());
            return if self.by_itself { self.give_up(failure, now, actions) } else { self.fail(failure, actions) };
        }
        if self.by_itself {
            return self.verify(actions);
        }
        self.state = State::Closing;
        actions.push(ReaderAction::CloseWindow);
    }

    fn verify(&mut self, actions: &mut Vec<ReaderAction>) {
        self.state = State::Verifying;
        actions.push(ReaderAction::Verify(std::mem::take(&mut self.runs)));
    }

    fn give_up(&mut self, failure: HandoffFailure, now: Instant, actions: &mut Vec<ReaderAction>) {
        // After it has confirmed the pin, the owner has forgotten the get.
        if !matches!(self.state, State::Closing | State::Verifying) {
            actions.push(ReaderAction::SendUnpin);
        }
        if matches!(self.state, State::Reading) && (self.by_itself || !hazard!(self, PretendedFences)) {
            actions.push(ReaderAction::Failed(failure));
            self.state = State::Draining(now + self.drain_wait);
        } else {
            self.fail(failure, actions);
        }
    }

    fn lost(&mut self, fenced: bool, detail: String, actions: &mut Vec<ReaderAction>) {
        let unsure = self.is_open() && !fenced && !hazard!(self, PretendedFences);
        if !matches!(self.state, State::Draining(_)) {
            actions.push(ReaderAction::Failed(HandoffFailure::PeerLost(detail)));
        }
        if unsure {
            self.state = State::Quarantined;
            actions.push(ReaderAction::Quarantine);
        } else {
            self.end(actions);
        }
    }

    /// Ends without success, once nothing is in flight.
    fn fail(&mut self, failure: HandoffFailure, actions: &mut Vec<ReaderAction>) {
        actions.push(ReaderAction::Failed(failure));
        self.end(actions);
    }

    fn end(&mut self, actions: &mut Vec<ReaderAction>) {
        self.state = State::Ended;
        actions.push(ReaderAction::Forget);
    }
}

fn name(input: &ReaderInput) -> &'static str {
    match input {
        ReaderInput::Granted { .. } => "a grant",
        ReaderInput::Refused(_) => "a refusal",
        ReaderInput::Checksums(_) => "checksums",
        ReaderInput::Held { .. } => "a confirmation",
        _ => "something",
    }
}

#[cfg(test)]
mod tests;
