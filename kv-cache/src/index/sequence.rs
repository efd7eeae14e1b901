//! What the number of a message says: it follows, it is old, or something is missing before it.

/// How far one incarnation of a worker was followed.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequence {
    state: State,
    /// The highest number that any message had. What is current has applied all up to it.
    seen: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Something is missing, or nothing came yet.
    Lost,
    /// A snapshot is on its way.
    Filling {
        next_part: u32,
    },
    Current,
}

/// What to do with a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Replaces all that is known.
    Begin,
    /// Follows what is known.
    Apply,
    /// Is known already.
    Stale,
    /// What is known can no longer be relied on.
    Lost,
}

impl Sequence {
    pub(super) fn new() -> Self {
        Self { state: State::Lost, seen: 0 }
    }

    /// Whether everything up to the newest message is known.
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
            // A snapshot whose beginning is missing, or one from before what was lost.
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
