//! Waits between sessions with etcd.

use super::EtcdConfig;
use super::error::EtcdError;
use std::time::Duration;

/// Doubles with every failure, with jitter, and says each failure once.
pub(super) struct Backoff {
    min: Duration,
    max: Duration,
    next: Duration,
    known: Option<String>,
}

impl Backoff {
    pub(super) fn new(config: &EtcdConfig) -> Self {
        let (min, max) = (Duration::from_millis(config.backoff_ms_min), Duration::from_millis(config.backoff_ms_max));
        Self { min, max, next: min, known: None }
    }

    /// A session that `worked` ended so: how long to wait.
    pub(super) fn after(&mut self, error: &EtcdError, worked: bool) -> Duration {
        if worked {
            (self.next, self.known) = (self.min, None);
        }
        let text = error.to_string();
        if self.known.as_ref() != Some(&text) {
            tracing::warn!(problem = text, "begins a new session with etcd");
            self.known = Some(text);
        }
        // Half to all of it, so that a cluster does not come back in step.
        let wait = self.next.mul_f64(rand::random_range(0.5..=1.0));
        if !(worked && error.is_answered()) {
            self.next = (self.next * 2).min(self.max);
        }
        wait
    }
}
