//! Virtual time, and what is to happen in it.

use super::event::Event;
use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::{Duration, Instant};

/// Microseconds since the schedule began.
pub(super) type Time = u64;

/// Milliseconds as [`Time`].
pub(super) const fn ms(ms: u64) -> Time {
    ms * 1000
}

/// One start of a process, as events are addressed to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Addr {
    pub(super) process: usize,
    pub(super) incarnation: u64,
}

impl Addr {
    /// Nobody's: the world itself.
    pub(super) const WORLD: Self = Self { process: usize::MAX, incarnation: 0 };

    /// Whoever runs at this address when the event comes.
    pub(super) const fn whoever(process: usize) -> Self {
        Self { process, incarnation: u64::MAX }
    }
}

/// Order of events: time, then the order in which they were posted.
#[derive(Debug)]
struct Entry {
    at: Reverse<(Time, u64)>,
    to: Addr,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        self.at == other.at
    }
}
impl Eq for Entry {}
impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.at.cmp(&other.at)
    }
}

/// The clock with everything that is to come.
#[derive(Debug)]
pub(super) struct Clock {
    now: Time,
    /// What the cores are given as their first instant. They only ever compare.
    origin: Instant,
    posted: u64,
    queue: BinaryHeap<Entry>,
}

impl Clock {
    pub(super) fn new() -> Self {
        Self { now: 0, origin: Instant::now(), posted: 0, queue: BinaryHeap::new() }
    }

    pub(super) fn now(&self) -> Time {
        self.now
    }

    /// `at` as the cores see it.
    pub(super) fn instant(&self, at: Time) -> Instant {
        self.origin + Duration::from_micros(at)
    }

    /// When a core's instant is.
    pub(super) fn time(&self, at: Instant) -> Time {
        at.saturating_duration_since(self.origin).as_micros() as Time
    }

    pub(super) fn post(&mut self, at: Time, to: Addr, event: Event) {
        self.posted += 1;
        self.queue.push(Entry { at: Reverse((at.max(self.now), self.posted)), to, event });
    }

    /// The next event, unless it is after `end`. Time is then its time.
    pub(super) fn next(&mut self, end: Time) -> Option<(Addr, Event)> {
        if self.queue.peek()?.at.0.0 > end {
            return None;
        }
        let Entry { at: Reverse((at, _)), to, event } = self.queue.pop()?;
        self.now = at;
        Some((to, event))
    }
}

/// Keeps what goes through one channel in order.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fifo(Time);

impl Fifo {
    /// When something that would arrive at `at` does, behind what was sent before.
    pub(super) fn arrive(&mut self, at: Time) -> Time {
        self.0 = self.0.max(at);
        self.0
    }
}
