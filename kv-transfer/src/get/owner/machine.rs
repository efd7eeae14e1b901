//! The owner's state machine of one get: pins its blocks for a bounded time, and reports afterwards whether the pin held throughout.
//!
//! The owner never confirms an expired pin. Writes that this side has posted by then still read its blocks and are in flight to those of the
//! reader. So the owner reports the end of the pin, lets its blocks go and forgets the get only after a flush. Without posted writes it does
//! so at once: what a reader then still reads one-sided, it never adopts.

use crate::RefuseReason;
use crate::message::SumRun;
use baton_types::TicketId;
use std::time::{Duration, Instant};

/// An event of one get, as its owner sees it.
#[derive(Debug)]
pub(crate) enum OwnerInput {
    /// The worker pinned blocks.
    Pinned,
    /// The worker has nothing to pin.
    Refused { reason: RefuseReason, detail: String },
    /// The reader asks the owner to write everything to it.
    Asked,
    /// All posted writes are visible at the reader.
    Written,
    /// The reader has read everything and asks whether the pin held.
    Confirm,
    /// Checksums of one layer, computed over the blocks while they were pinned.
    Summed(SumRun),
    /// The reader no longer wants the blocks.
    Unpin,
    /// The worker of this side wants its blocks back.
    Revoked(String),
    /// The connection is gone.
    ConnectionLost,
    /// Time passed: deadlines may be over.
    Tick,
}

/// What the owner must do.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum OwnerAction {
    SendGrant,
    SendRefuse {
        reason: RefuseReason,
        detail: String,
    },
    /// Compute the checksums of every layer; each is reported by [`OwnerInput::Summed`].
    Sum,
    /// Write every layer to the reader and flush; [`OwnerInput::Written`] reports the end.
    Write,
    /// Drop the writes that are not posted and flush the others; [`OwnerInput::Written`] reports the end.
    Flush,
    /// The reader does not accept the posted writes: end them by closing the connection.
    Disconnect,
    /// Send the checksums and confirm that the pin held. Nothing is in flight to the reader.
    SendHeld(Vec<SumRun>),
    /// Report that the pin did not hold. Nothing is in flight to the reader.
    SendNotHeld(String),
    /// Return the blocks to the worker: no posted write of this get reads them. Always the last action.
    Forget,
}

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// The worker has not answered.
    Asked,
    Pinned,
    /// The get has ended for this reason; waits until this instant for the flush of posted writes.
    Flushing(String, Instant),
    Ended,
}

/// The owner's state of one get.
#[derive(Debug)]
pub(crate) struct Owner {
    pub(crate) ticket: TicketId,
    deadline: Instant,
    flush_wait: Duration,
    state: State,
    /// The reader asked the owner to write.
    asked: bool,
    /// Writes to the reader may be in flight.
    writing: bool,
    /// The reader has everything.
    got: bool,
    layers: usize,
    runs: Vec<SumRun>,
}

impl Owner {
    /// A pin that ends at `deadline` at the latest, over this many layers.
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
            // A reader that asked for writes waits for the notice that no more will come.
            (_, OwnerInput::Unpin) if self.asked => self.give_up("the reader let go".into(), now, &mut actions),
            (_, OwnerInput::Unpin) => self.end(&mut actions),
            // Checked first: a late request must not be confirmed because no tick came before it.
            (State::Pinned, _) if now >= self.deadline => self.give_up("the pin expired".into(), now, &mut actions),
            (State::Pinned, OwnerInput::Revoked(detail)) => self.give_up(detail, now, &mut actions),
            (State::Pinned, OwnerInput::Asked) if !self.asked => {
                (self.asked, self.writing) = (true, true);
                actions.push(OwnerAction::Write);
            }
            // A reader that asked for writes has nothing to confirm.
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

    fn give_up(&mut self, detail: String, now: Instant, actions: &mut Vec<OwnerAction>) {
        if self.writing {
            actions.push(OwnerAction::Flush);
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
            OwnerAction::Flush => "flush".into(),
            OwnerAction::Disconnect => "disconnect".into(),
            OwnerAction::Forget => "forget".into(),
        }
    }

    /// Feeds the inputs, each at a number of milliseconds, and compares the resulting actions. Two layers.
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
    fn an_expired_pin_is_never_confirmed() {
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
                (0, end, "flush"),
                (0, OwnerInput::Unpin, ""),
                (0, summed(), ""),
                (50, OwnerInput::Written, "not held, forget"),
            ]);
        }
        check_pinned(vec![
            (0, OwnerInput::Asked, "write"),
            (1000, OwnerInput::Tick, "flush"),
            (1099, OwnerInput::Tick, ""),
            (1100, OwnerInput::Tick, "disconnect"),
            (1101, OwnerInput::ConnectionLost, "forget"),
        ]);
        // All bytes are there already, but not their checksums.
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
        // Inputs after the end do not end it again.
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
