//! Heartbeat of an engine thread, and when the engine counts as hung.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Shared progress record, written by the engine thread.
pub(crate) struct Health {
    epoch: Instant,
    steps: AtomicU64,
    /// Time of the last progress, in microseconds from `epoch`.
    progress_us: AtomicU64,
    busy: AtomicBool,
    pub(crate) failed: AtomicBool,
}

impl Health {
    pub(crate) fn new(epoch: Instant) -> Self {
        Self {
            epoch,
            steps: AtomicU64::new(0),
            progress_us: AtomicU64::new(0),
            busy: AtomicBool::new(false),
            failed: AtomicBool::new(false),
        }
    }

    /// Records progress at `now`, and whether a step follows.
    pub(crate) fn alive(&self, now: Instant, busy: bool) {
        self.progress_us.store(now.saturating_duration_since(self.epoch).as_micros() as u64, Ordering::Relaxed);
        self.busy.store(busy, Ordering::Release);
    }

    pub(crate) fn stepped(&self) -> u64 {
        self.steps.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn beat(&self) -> Heartbeat {
        Heartbeat {
            steps: self.steps.load(Ordering::Relaxed),
            busy: self.busy.load(Ordering::Acquire),
            last_progress: self.epoch + Duration::from_micros(self.progress_us.load(Ordering::Relaxed)),
            failed: self.failed.load(Ordering::Acquire),
        }
    }
}

/// Progress of an engine thread.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Heartbeat {
    /// Steps since the start; increases while there is work.
    pub steps: u64,
    /// When the thread last finished something or went to sleep.
    pub last_progress: Instant,
    /// Whether it is inside a step.
    pub busy: bool,
    /// Whether it ended by a panic or a device error.
    pub failed: bool,
}

impl Heartbeat {
    /// How long the current step has taken so far at `now`; zero if there is none.
    pub fn still(&self, now: Instant) -> Duration {
        if self.busy { now.saturating_duration_since(self.last_progress) } else { Duration::ZERO }
    }

    /// How long the thread may make no progress from `now` on before a step counts as hung, which is one that takes `step_max`; zero once
    /// one hangs. A caller that checks again after this time detects each hang as soon as it counts as one: a step that begins meanwhile
    /// may take longer than that.
    pub fn patience(&self, step_max: Duration, now: Instant) -> Duration {
        step_max.saturating_sub(self.still(now))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_hangs_that_outlasts_its_bound_and_no_other() {
        let (start, step_max) = (Instant::now(), Duration::from_secs(60));
        // (inside a step, seconds since the last progress, seconds until it counts as hung)
        let cases = [(true, 0, 60), (true, 59, 1), (true, 60, 0), (true, 3_600, 0), (false, 0, 60), (false, 3_600, 60)];
        for (busy, since, patience) in cases {
            let beat = Heartbeat { steps: 1, last_progress: start, busy, failed: false };
            let now = start + Duration::from_secs(since);
            assert_eq!(beat.patience(step_max, now).as_secs(), patience, "busy: {busy}, for {since} s");
            assert_eq!(beat.still(now).as_secs(), if busy { since } else { 0 }, "busy: {busy}, for {since} s");
        }
        let ahead = Heartbeat { steps: 1, last_progress: start + step_max, busy: true, failed: false };
        assert_eq!(ahead.patience(step_max, start), step_max, "a step that began after the look");
    }

    #[test]
    fn who_looks_again_after_its_patience_sees_each_hang_as_soon_as_it_is_one() {
        let (start, step_max) = (Instant::now(), Duration::from_millis(1_000));
        // A step begins at each of these times, in milliseconds, and the last one hangs.
        for steps in [&[1][..], &[999], &[0, 10, 1_005], &[0, 990, 1_900, 2_899], &[5_000]] {
            let beat = |now: Instant| {
                let begun = steps.iter().map(|ms| start + Duration::from_millis(*ms)).rfind(|at| *at <= now);
                Heartbeat { steps: 0, last_progress: begun.unwrap_or(start), busy: begun.is_some(), failed: false }
            };
            let mut now = start;
            loop {
                match beat(now).patience(step_max, now) {
                    Duration::ZERO => break,
                    patience => now += patience,
                }
            }
            let hangs = Duration::from_millis(steps[steps.len() - 1]) + step_max;
            assert_eq!(now - start, hangs, "{steps:?}");
        }
    }
}
