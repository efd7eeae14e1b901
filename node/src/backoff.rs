//! Waits between sessions with another process, and which of their failures are logged.

use std::time::Duration;

/// Doubles with every wait, with jitter, and remembers the failure that was logged last. Failures are compared by `P`.
#[derive(Debug)]
pub struct Backoff<P> {
    min: Duration,
    max: Duration,
    next: Duration,
    known: Option<P>,
}

impl<P: PartialEq> Backoff<P> {
    /// Waits of `min` to `max`.
    pub const fn new(min: Duration, max: Duration) -> Self {
        Self { min, max, next: min, known: None }
    }

    /// A session worked: the waits start again at the minimum, and the next failure is logged again.
    pub fn reset(&mut self) {
        (self.next, self.known) = (self.min, None);
    }

    /// Whether this failure differs from the last one: repetitions are not logged.
    pub fn is_news(&mut self, problem: P) -> bool {
        let is_news = self.known.as_ref() != Some(&problem);
        self.known = Some(problem);
        is_news
    }

    /// Wait time: half to all of the backoff, so that many clients do not return at the same time.
    pub fn jittered(&self) -> Duration {
        self.jittered_by(rand::random())
    }

    fn jittered_by(&self, share: f64) -> Duration {
        self.next.mul_f64(0.5 + share / 2.0)
    }

    /// [`Self::jittered`], and doubles the next wait.
    pub fn wait(&mut self) -> Duration {
        self.wait_by(rand::random())
    }

    /// [`Self::wait`] with the caller's jitter: a random number from 0 to 1.
    pub fn wait_by(&mut self, share: f64) -> Duration {
        let wait = self.jittered_by(share);
        self.next = (self.next * 2).min(self.max);
        wait
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn backoff() -> Backoff<&'static str> {
        Backoff::new(Duration::from_millis(100), Duration::from_millis(300))
    }

    #[test]
    fn a_reason_is_told_once_until_it_changes() {
        let mut told = backoff();
        let news = ["a", "a", "b", "b", "a"].map(|reason| told.is_news(reason));
        assert_eq!(news, [true, false, true, false, true]);
        told.reset();
        assert!(told.is_news("a"));
    }

    #[test]
    fn waits_double_to_the_maximum_and_begin_anew() {
        let mut backoff = backoff();
        for most in [100, 200, 300, 300] {
            let wait = backoff.wait();
            assert!((most / 2..=most).contains(&(wait.as_millis() as u64)), "{wait:?} of {most} ms");
        }
        backoff.reset();
        assert!(backoff.jittered() <= Duration::from_millis(100));
        assert!(backoff.wait() <= Duration::from_millis(100), "only a wait doubles");
    }
}
