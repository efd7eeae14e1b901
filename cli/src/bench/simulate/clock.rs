//! Virtual time: what is to happen, in order.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Nanoseconds since the start of the trace.
pub(super) type Time = u64;

/// Seconds as nanoseconds.
pub(super) fn ns(seconds: f64) -> Time {
    (seconds * 1e9).round() as Time
}

/// Nanoseconds as seconds.
pub(super) fn seconds(time: Time) -> f64 {
    time as f64 / 1e9
}

/// What is to happen, the earliest first; what is due at the same time in the order in which it was posted.
pub(super) struct Clock<E> {
    start: Instant,
    now: Time,
    posted: u64,
    queue: BinaryHeap<Reverse<Posted<E>>>,
}

struct Posted<E> {
    at: Time,
    number: u64,
    event: E,
}

impl<E> Clock<E> {
    /// Time 0, and nothing to happen.
    pub(super) fn new() -> Self {
        Self { start: Instant::now(), now: 0, posted: 0, queue: BinaryHeap::new() }
    }

    /// The time.
    pub(super) fn now(&self) -> Time {
        self.now
    }

    /// The time, as code that runs in earnest is told it.
    pub(super) fn instant(&self) -> Instant {
        self.start + Duration::from_nanos(self.now)
    }

    /// Something happens at a time, or now if that is over.
    pub(super) fn post(&mut self, at: Time, event: E) {
        self.posted += 1;
        self.queue.push(Reverse(Posted { at: at.max(self.now), number: self.posted, event }));
    }

    /// Goes on to what happens next.
    pub(super) fn next(&mut self) -> Option<E> {
        let Reverse(Posted { at, event, .. }) = self.queue.pop()?;
        self.now = at;
        Some(event)
    }
}

impl<E> Posted<E> {
    fn key(&self) -> (Time, u64) {
        (self.at, self.number)
    }
}

impl<E> PartialEq for Posted<E> {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl<E> Eq for Posted<E> {}

impl<E> PartialOrd for Posted<E> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl<E> Ord for Posted<E> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.key().cmp(&other.key())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_earliest_comes_first_and_equal_ones_in_order() {
        let mut clock = Clock::new();
        [(30, 'c'), (10, 'a'), (30, 'd'), (20, 'b')].into_iter().for_each(|(at, event)| clock.post(at, event));
        assert_eq!(clock.next(), Some('a'));
        clock.post(5, 'x');
        let rest: String = std::iter::from_fn(|| clock.next()).collect();
        assert_eq!((rest.as_str(), clock.now()), ("xbcd", 30));
    }
}
