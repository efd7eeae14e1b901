//! Whether the store behind a view is reachable. Pure.

use std::time::Instant;

/// Whether the view is up to date with the store, or as old as its last answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreState {
    /// Whether the store answers.
    pub reachable: bool,
    /// When `reachable` last changed, or when watching began.
    pub since: Instant,
}

impl StoreState {
    /// The store has not answered yet.
    pub(super) fn unheard(now: Instant) -> Self {
        Self { reachable: false, since: now }
    }

    /// Records whether it answers at `now`.
    pub(super) fn answers(&mut self, reachable: bool, now: Instant) {
        if self.reachable != reachable {
            *self = Self { reachable, since: now };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn an_absence_counts_from_its_first_moment() {
        let start = Instant::now();
        let at = |s| start + Duration::from_secs(s);
        let mut state = StoreState::unheard(start);
        state.answers(false, at(2));
        assert_eq!(state, StoreState { reachable: false, since: start });
        state.answers(true, at(3));
        state.answers(true, at(4));
        assert_eq!(state, StoreState { reachable: true, since: at(3) });
        state.answers(false, at(5));
        assert_eq!(state, StoreState { reachable: false, since: at(5) });
    }
}
