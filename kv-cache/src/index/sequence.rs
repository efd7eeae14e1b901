//! Classifies a message by its number: it is next, it is old, or an earlier one is missing.

/// How far the events of one worker incarnation were followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    state: State,
    /// The highest number of any message. A current worker's events are applied up to it.
    seen: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// A message is missing, or none has come yet.
    Lost,
    /// A snapshot is being received.
    Filling {
        next_part: u32,
    },
    Current,
}

/// What to do with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// It replaces all earlier information.
    Begin,
    /// It follows on the last one: apply it.
    Apply,
    /// It was already covered: ignore it.
    Stale,
    /// Earlier information is no longer reliable.
    Lost,
}

impl Sequence {
    pub(super) fn new() -> Self {
        Self { state: State::Lost, seen: 0 }
    }

    /// Whether all messages up to the newest were applied.
    pub(super) fn is_current(&self) -> bool {
        self.state == State::Current
    }

    /// An event with number `sequence`.
    pub(super) fn event(&mut self, sequence: u64) -> Verdict {
        let known = self.state != State::Lost && sequence <= self.seen;
        if known {
            return Verdict::Stale;
        }
        let follows = self.state == State::Current && self.seen.checked_add(1) == Some(sequence);
        self.seen = self.seen.max(sequence);
        if follows { Verdict::Apply } else { self.lose() }
    }

    /// Part `part` of the snapshot after event `sequence`.
    pub(super) fn snapshot(&mut self, sequence: u64, part: u32, last: bool) -> Verdict {
        let verdict = match (self.state, part) {
            (State::Current, _) if sequence <= self.seen => return Verdict::Stale,
            (_, 0) if sequence >= self.seen => Verdict::Begin,
            (State::Filling { .. }, _) if sequence < self.seen => return Verdict::Stale,
            (State::Filling { next_part }, _) if sequence == self.seen && part < next_part => return Verdict::Stale,
            (State::Filling { next_part }, _) if sequence == self.seen && part == next_part => Verdict::Apply,
            // A snapshot whose beginning is missing, or one from before the missing message.
            _ => {
                self.seen = self.seen.max(sequence);
                return self.lose();
            }
        };
        self.seen = sequence;
        self.state = if last { State::Current } else { State::Filling { next_part: part.saturating_add(1) } };
        verdict
    }

    fn lose(&mut self) -> Verdict {
        self.state = State::Lost;
        Verdict::Lost
    }
}
