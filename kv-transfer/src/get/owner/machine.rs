//! The owner of what is got: pins its blocks for a bounded time, and says afterwards whether the pin held all along.
//!
//! An expired pin frees its blocks at once: the reader is never told that it held. But what this side has posted by then is still on its way
//! into the reader's blocks, so the reader hears that the pin is over, and the get is forgotten, only behind a flush.

use crate::RefuseReason;
use crate::message::SumRun;
use baton_types::TicketId;
use std::time::{Duration, Instant};

/// What happened.
#[derive(Debug)]
pub(crate) enum OwnerInput {
    /// The worker pinned blocks.
    Pinned,
    /// It has nothing to be got.
    Refused { reason: RefuseReason, detail: String },
    /// The reader wants everything written to it.
    Asked,
    /// All that was posted is visible there.
    Written,
    /// The reader has got everything by itself and asks whether the pin held.
    Confirm,
    /// Checksums of one layer, over the blocks as they were under the pin.
    Summed(SumRun),
    /// The reader wants nothing any more.
    Unpin,
    /// This side wants its blocks back.
    Revoked(String),
    /// The connection is gone.
    ConnectionLost,
    /// Time passed.
    Tick,
}

/// What to do about it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OwnerAction {
    SendGrant,
    SendRefuse {
        reason: RefuseReason,
        detail: String,
    },
    /// Compute the checksums of every layer; each is told by [`OwnerInput::Summed`].
    Sum,
    /// Write every layer to the reader and flush; the end is [`OwnerInput::Written`].
    Write,
    /// The blocks are the worker's again.
    LetGo,
    /// Drop the writes that are not posted and flush the others; the end is [`OwnerInput::Written`].
    Flush,
    /// The reader takes none of what was posted: end it with its connection.
    Disconnect,
    /// Send the checksums, and that the pin held. Nothing is under way to the reader.
    SendHeld(Vec<SumRun>),
    /// The pin did not hold. Nothing is under way to the reader.
    SendNotHeld(String),
    /// The blocks are the worker's, and nothing is under way. Always the last action.
    Forget,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The worker has not answered.
    Asked,
    Pinned,
    /// Over for this reason; waits until then for the flush of what was posted.
    Flushing(String, Instant),
    Ended,
}

/// One get, seen from its owner.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) ticket: TicketId,
    deadline: Instant,
    flush_wait: Duration,
    state: State,
    /// The reader wants to be written to.
    asked: bool,
    /// Something may be under way to it.
    writing: bool,
    /// The reader has everything.
    got: bool,
    layers: usize,
    runs: Vec<SumRun>,
}

impl Owner {
    /// A pin of at most until `deadline`, over so many layers.
    pub(crate) fn new(ticket: TicketId, layers: usize, deadline: Instant, flush_wait: Duration) -> Self {
        let (state, asked, writing, got, runs) = (State::Asked, false, false, false, Vec::new());
        Self { ticket, deadline, flush_wait, state, asked, writing, got, layers, runs }
    }

    pub(crate) fn handle(&mut self, now: Instant, input: OwnerInput) -> Vec<OwnerAction> {
        let mut actions = Vec::new();
        self.writing &= !matches!(input, OwnerInput::Written);
        match (&self.state, input) {
            (State::Ended, _) => {}
            (_, OwnerInput::ConnectionLost) => self.end(&mut actions),
            (State::Flushing(detail, _), OwnerInput::Written) => {
                actions.push(OwnerAction::SendNotHeld(detail.clone()));
                self.end(&mut actions);
            }
            (State::Flushing(_, until), OwnerInput::Tick) if now >= *until => actions.push(OwnerAction::Disconnect),
            (State::Flushing(..), _) => {}
            (State::Asked, OwnerInput::Pinned) => {
                self.state = State::Pinned;
                actions.extend([OwnerAction::SendGrant, OwnerAction::Sum]);
            }
            (State::Asked, OwnerInput::Refused { reason, detail }) => self.refuse(reason, detail, &mut actions),
            (State::Asked, OwnerInput::Revoked(detail)) => self.refuse(RefuseReason::NoRoom, detail, &mut actions),
            (State::Asked, OwnerInput::Tick) if now >= self.deadline => {
                self.refuse(RefuseReason::NoRoom, "the deadline passed".into(), &mut actions);
            }
            // A reader that asked to be written to waits to hear that nothing more comes.
            (_, OwnerInput::Unpin) if self.asked => self.let_go("the reader let go".into(), now, &mut actions),
            (_, OwnerInput::Unpin) => self.end(&mut actions),
            // Looked at before everything else: what comes late must not be confirmed because no tick came first.
            (State::Pinned, _) if now >= self.deadline => self.let_go("the pin expired".into(), now, &mut actions),
            (State::Pinned, OwnerInput::Revoked(detail)) => self.let_go(detail, now, &mut actions),
            (State::Pinned, OwnerInput::Asked) if !self.asked => {
                (self.asked, self.writing) = (true, true);
                actions.push(OwnerAction::Write);
            }
            // One that asked to be written to has nothing to confirm.
            (State::Pinned, OwnerInput::Confirm) if self.asked => {}
            (State::Pinned, OwnerInput::Written | OwnerInput::Confirm) => {
                self.got = true;
                self.confirm_if_done(&mut actions);
            }
            (State::Pinned, OwnerInput::Summed(run)) => {
                self.runs.push(run);
                self.confirm_if_done(&mut actions);
            }
            _ => {}
        }
        actions
    }

    fn confirm_if_done(&mut self, actions: &mut Vec<OwnerAction>) {
        if self.got && self.runs.len() == self.layers {
            actions.push(OwnerAction::SendHeld(std::mem::take(&mut self.runs)));
            self.end(actions);
        }
    }

    fn refuse(&mut self, reason: RefuseReason, detail: String, actions: &mut Vec<OwnerAction>) {
        actions.push(OwnerAction::SendRefuse { reason, detail });
        self.end(actions);
    }

    fn let_go(&mut self, detail: String, now: Instant, actions: &mut Vec<OwnerAction>) {
        if self.writing {
            actions.extend([OwnerAction::LetGo, OwnerAction::Flush]);
            self.state = State::Flushing(detail, now + self.flush_wait);
        } else {
            actions.push(OwnerAction::SendNotHeld(detail));
            self.end(actions);
        }
    }

    fn end(&mut self, actions: &mut Vec<OwnerAction>) {
        self.state = State::Ended;
        actions.push(OwnerAction::Forget);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn summed() -> OwnerInput {
        OwnerInput::Summed(SumRun { group: 0, layer: 0, first_granule: 0, sums: vec![0; 2] })
    }
    fn revoked() -> OwnerInput {
        OwnerInput::Revoked("x".into())
    }

    fn describe(action: &OwnerAction) -> String {
        match action {
            OwnerAction::SendGrant => "grant".into(),
            OwnerAction::SendRefuse { reason, .. } => format!("refuse {}", reason.name()),
            OwnerAction::Sum => "sum".into(),
            OwnerAction::Write => "write".into(),
            OwnerAction::SendHeld(runs) => format!("held {}", runs.len()),
            OwnerAction::SendNotHeld(_) => "not held".into(),
            OwnerAction::LetGo => "let go".into(),
            OwnerAction::Flush => "flush".into(),
            OwnerAction::Disconnect => "disconnect".into(),
            OwnerAction::Forget => "forget".into(),
        }
    }

    /// Feeds the inputs, each at a number of milliseconds, and compares what comes of each. Two layers.
    fn check(steps: Vec<(u64, OwnerInput, &str)>) {
        let begin = Instant::now();
        let mut owner = Owner::new(TicketId(9), 2, begin + Duration::from_secs(1), Duration::from_millis(100));
        for (i, (at, input, expected)) in steps.into_iter().enumerate() {
            let what = format!("step {i}: {input:?}");
            let actions: Vec<_> = owner.handle(begin + Duration::from_millis(at), input).iter().map(describe).collect();
            assert_eq!(actions.join(", "), expected, "{what}");
        }
    }

    fn check_pinned(steps: Vec<(u64, OwnerInput, &str)>) {
        let mut all = vec![(0, OwnerInput::Pinned, "grant, sum")];
        all.extend(steps);
        check(all);
    }

    #[test]
    fn confirms_once_everything_is_read_and_summed() {
        let sum = || (0, summed(), "");
        check_pinned(vec![sum(), sum(), (0, OwnerInput::Confirm, "held 2, forget"), (0, OwnerInput::Confirm, "")]);
        check_pinned(vec![
            (0, OwnerInput::Asked, "write"),
            (0, OwnerInput::Asked, ""),
            sum(),
            (0, OwnerInput::Written, ""),
            (0, summed(), "held 2, forget"),
        ]);
    }

    #[test]
    fn an_expired_pin_is_let_go_and_never_confirmed() {
        check_pinned(vec![
            (999, OwnerInput::Tick, ""),
            (1000, OwnerInput::Tick, "not held, forget"),
            (1000, OwnerInput::Confirm, ""),
        ]);
        check_pinned(vec![(0, summed(), ""), (0, summed(), ""), (1000, OwnerInput::Confirm, "not held, forget")]);
        check_pinned(vec![(0, revoked(), "not held, forget"), (0, summed(), ""), (0, OwnerInput::Written, "")]);
        check_pinned(vec![(0, OwnerInput::Asked, "write"), (1000, OwnerInput::Written, "not held, forget")]);
    }

    #[test]
    fn what_is_under_way_is_flushed_before_the_reader_hears_that_it_is_over() {
        for end in [revoked(), OwnerInput::Unpin] {
            check_pinned(vec![
                (0, OwnerInput::Asked, "write"),
                (0, end, "let go, flush"),
                (0, OwnerInput::Unpin, ""),
                (0, summed(), ""),
                (50, OwnerInput::Written, "not held, forget"),
            ]);
        }
        check_pinned(vec![
            (0, OwnerInput::Asked, "write"),
            (1000, OwnerInput::Tick, "let go, flush"),
            (1099, OwnerInput::Tick, ""),
            (1100, OwnerInput::Tick, "disconnect"),
            (1101, OwnerInput::ConnectionLost, "forget"),
        ]);
        // Everything is there already; its checksums are not.
        check_pinned(vec![
            (0, OwnerInput::Asked, "write"),
            (0, OwnerInput::Written, ""),
            (0, OwnerInput::Unpin, "not held, forget"),
        ]);
    }

    #[test]
    fn a_reader_that_is_written_to_confirms_nothing() {
        check_pinned(vec![
            (0, OwnerInput::Asked, "write"),
            (0, summed(), ""),
            (0, summed(), ""),
            (0, OwnerInput::Confirm, ""),
            (0, OwnerInput::Written, "held 2, forget"),
        ]);
    }

    #[test]
    fn the_reader_lets_go() {
        check_pinned(vec![(0, OwnerInput::Unpin, "forget")]);
        check_pinned(vec![(0, OwnerInput::ConnectionLost, "forget")]);
        check(vec![(0, OwnerInput::Unpin, "forget"), (0, OwnerInput::Pinned, "")]);
        // What comes after its end does not end it again.
        for late in [OwnerInput::Unpin, OwnerInput::ConnectionLost] {
            check_pinned(vec![(0, OwnerInput::Unpin, "forget"), (0, late, "")]);
        }
    }

    #[test]
    fn without_a_pin_it_refuses() {
        let refused = OwnerInput::Refused { reason: RefuseReason::UnknownRequest, detail: String::new() };
        check(vec![(0, refused, "refuse unknown_request, forget")]);
        check(vec![(0, revoked(), "refuse no_room, forget")]);
        check(vec![(999, OwnerInput::Tick, ""), (1000, OwnerInput::Tick, "refuse no_room, forget")]);
    }
}
