//! Probation of a worker that just failed: requests prefer other workers for a while.

use parking_lot::Mutex;
use std::time::{Duration, Instant};

/// How long workers are avoided.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ProbationLimits {
    /// After one failure; doubles with each further one.
    pub min: Duration,
    pub max: Duration,
}

/// Failures of one worker since it last completed a request.
#[derive(Debug, Default)]
pub(crate) struct Probation(Mutex<State>);

#[derive(Clone, Copy, Debug, Default)]
struct State {
    failures: u32,
    until: Option<Instant>,
}

impl Probation {
    /// The worker failed. Failures of concurrent requests count once.
    pub(crate) fn failed(&self, now: Instant, limits: &ProbationLimits) {
        let mut state = self.0.lock();
        if state.until.is_some_and(|until| now < until) {
            return;
        }
        let spell = limits.min.saturating_mul(2u32.saturating_pow(state.failures)).min(limits.max);
        *state = State { failures: state.failures.saturating_add(1), until: Some(now + spell) };
    }

    /// The worker completed a request.
    pub(crate) fn served(&self) {
        *self.0.lock() = State::default();
    }

    /// Whether other workers are preferred.
    pub(crate) fn lasts(&self, now: Instant) -> bool {
        self.0.lock().until.is_some_and(|until| now < until)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_is_avoided_for_a_while_that_doubles_and_never_for_ever() {
        let limits = ProbationLimits { min: Duration::from_secs(1), max: Duration::from_secs(3) };
        let (probation, start) = (Probation::default(), Instant::now());
        let at = |s: f64| start + Duration::from_secs_f64(s);
        assert!(!probation.lasts(at(0.0)));
        // (failure at, avoided until)
        for (failed, until) in [(0.0, 1.0), (0.5, 1.0), (1.0, 3.0), (5.0, 8.0), (10.0, 13.0)] {
            probation.failed(at(failed), &limits);
            assert!(probation.lasts(at(until - 0.01)) && !probation.lasts(at(until)), "failed at {failed}");
        }
        probation.served();
        assert!(!probation.lasts(at(12.0)));
        probation.failed(at(20.0), &limits);
        assert!(!probation.lasts(at(21.0)), "what it served was forgiven");
    }
}
