//! The reader of one get: adopts only what it read whole, under a pin that still held afterwards, with the checksums of the owner.

use super::coverage::Coverage;
use crate::HandoffFailure;
use crate::message::SumRun;
use baton_types::{KvLayout, TicketId};
use std::time::{Duration, Instant};

/// What happened.
#[derive(Debug)]
pub(crate) enum ReaderInput {
    /// The owner pinned blocks; `by_itself` if this side reads them without the owner's help.
    Granted { ticket: TicketId, by_itself: bool },
    /// It did not, or cannot be asked.
    Refused(HandoffFailure),
    /// Everything that this side reads by itself is here, or never will be: no read is under way.
    Read,
    /// Checksums of what the owner pinned.
    Checksums(Vec<SumRun>),
    /// The reading is over, and the pin held until now; so many checksums were sent.
    Held { algorithm: u16, sums: u64 },
    /// The owner let go of the blocks.
    NotHeld(String),
    /// So many checksums were found right.
    Verified { sums: u64 },
    /// One was found wrong.
    Corrupt(String),
    /// The owner of this end gives up.
    Abort(HandoffFailure),
    /// The connection is gone, and with it every read.
    ConnectionLost(String),
    /// Time passed.
    Tick,
}

/// What to do about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReaderAction {
    /// Read everything; its end is [`ReaderInput::Read`].
    Read,
    /// Ask the owner to write everything; its end is [`ReaderInput::Held`].
    SendAsk,
    /// Ask whether the pin still holds.
    SendConfirm,
    /// Compare these with the blocks, in the background.
    Verify(Vec<SumRun>),
    /// Tell the owner that nothing of this is wanted any more.
    SendUnpin,
    /// Reads under way do not end by themselves: end them with their connection.
    Disconnect,
    /// The end. Always the last action; nothing writes to the blocks any more.
    Done(Result<(), HandoffFailure>),
}

#[derive(Debug)]
enum State {
    /// No grant yet.
    Offering,
    Reading,
    /// Everything is here; the owner is asked whether the pin held.
    Confirming,
    /// It did; checksums are being compared.
    Verifying,
    /// Given up; waits until then for reads under way.
    Draining(HandoffFailure, Instant),
    Ended,
}

/// One get, seen from its reader.
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
}

impl Reader {
    /// Of so many positions, counted from the first that is read.
    pub(crate) fn new(layout: &KvLayout, tokens: u32, algorithm: u16, deadline: Instant, drain_wait: Duration) -> Self {
        let (state, received) = (State::Offering, Coverage::new(layout, 0..tokens));
        let (ticket, by_itself, runs, verified) = (None, false, Vec::new(), 0);
        Self { algorithm, deadline, drain_wait, state, ticket, by_itself, runs, received, verified }
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
            (State::Draining(failure, _), ReaderInput::Read | ReaderInput::ConnectionLost(_)) => {
                let failure = failure.clone();
                self.end(Err(failure), &mut actions);
            }
            (State::Draining(_, until), ReaderInput::Tick) if now >= *until => actions.push(ReaderAction::Disconnect),
            (State::Draining(..), _) => {}
            (_, ReaderInput::ConnectionLost(detail)) => self.end(Err(HandoffFailure::PeerLost(detail)), &mut actions),
            (State::Offering, ReaderInput::Granted { ticket, by_itself }) => {
                (self.ticket, self.by_itself, self.state) = (Some(ticket), by_itself, State::Reading);
                actions.push(if by_itself { ReaderAction::Read } else { ReaderAction::SendAsk });
            }
            (State::Offering, ReaderInput::Refused(failure)) => self.end(Err(failure), &mut actions),
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
            (State::Verifying, ReaderInput::Verified { sums }) => {
                self.verified += sums;
                if self.verified == self.received.sums() {
                    self.end(Ok(()), &mut actions);
                }
            }
            (_, ReaderInput::Corrupt(detail)) => self.give_up(HandoffFailure::Corrupt(detail), now, &mut actions),
            (_, ReaderInput::NotHeld(detail)) => self.give_up(HandoffFailure::Unpinned(detail), now, &mut actions),
            (_, ReaderInput::Abort(failure)) => self.give_up(failure, now, &mut actions),
            (_, ReaderInput::Tick) if now >= self.deadline => {
                self.give_up(HandoffFailure::Deadline("reading"), now, &mut actions);
            }
            (_, ReaderInput::Tick | ReaderInput::Verified { .. } | ReaderInput::Read) => {}
            (_, input) => {
                let failure = HandoffFailure::Protocol(format!("{} out of turn", name(&input)));
                self.give_up(failure, now, &mut actions);
            }
        }
        actions
    }

    /// The owner says that what was read is what it pinned.
    fn held(&mut self, algorithm: u16, sums: u64, now: Instant, actions: &mut Vec<ReaderAction>) {
        let read = !self.by_itself || matches!(self.state, State::Confirming);
        let covered: u64 = self.runs.iter().map(|run| run.sums.len() as u64).sum();
        if !read || algorithm != self.algorithm || sums != covered || covered != self.received.sums() {
            let failure = HandoffFailure::Protocol("the owner confirms what was not read".into());
            return self.give_up(failure, now, actions);
        }
        self.state = State::Verifying;
        actions.push(ReaderAction::Verify(std::mem::take(&mut self.runs)));
    }

    fn give_up(&mut self, failure: HandoffFailure, now: Instant, actions: &mut Vec<ReaderAction>) {
        // Once it has said that the pin held, the owner knows nothing of it any more.
        if !matches!(self.state, State::Verifying) {
            actions.push(ReaderAction::SendUnpin);
        }
        if matches!(self.state, State::Reading) && self.by_itself {
            self.state = State::Draining(failure, now + self.drain_wait);
        } else {
            self.end(Err(failure), actions);
        }
    }

    fn end(&mut self, result: Result<(), HandoffFailure>, actions: &mut Vec<ReaderAction>) {
        self.state = State::Ended;
        actions.push(ReaderAction::Done(result));
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
#[path = "reader_tests.rs"]
mod tests;
