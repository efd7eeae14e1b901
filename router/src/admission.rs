//! Bounded admission: so many requests run, so many wait, the rest is told at once to come again.

use baton_types::{ErrorKind, RequestError};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// A retry hint where no rate is known: long enough to matter, short enough to fill what became free.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The gate that every request passes. Clones share it.
#[derive(Clone, Debug)]
pub struct Admission(Arc<Gate>);

#[derive(Debug)]
struct Gate {
    running: Arc<Semaphore>,
    inside: AtomicUsize,
    inside_max: usize,
}

/// A place inside the gate; dropping it leaves.
#[derive(Debug)]
pub struct Place {
    gate: Arc<Gate>,
    running: Option<OwnedSemaphorePermit>,
}

impl Admission {
    /// At most `running_max` requests run and `queued_max` more wait.
    pub fn new(running_max: usize, queued_max: usize) -> Self {
        let running = Arc::new(Semaphore::new(running_max));
        Self(Arc::new(Gate { running, inside: AtomicUsize::new(0), inside_max: running_max + queued_max }))
    }

    /// A place, at once or never.
    pub fn enter(&self) -> Result<Place, RequestError> {
        let gate = self.0.clone();
        let full =
            gate.inside.fetch_update(Ordering::AcqRel, Ordering::Acquire, |n| (n < gate.inside_max).then_some(n + 1));
        if full.is_err() {
            let message =
                format!("{} requests are running or waiting, which is the limit; try again later", gate.inside_max);
            return Err(RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER));
        }
        Ok(Place { gate, running: None })
    }

    /// Requests inside.
    pub fn inside(&self) -> usize {
        self.0.inside.load(Ordering::Acquire)
    }
}

impl Place {
    /// Waits for its turn, first come first served. The caller bounds the wait by the deadline.
    pub async fn run(&mut self) {
        if self.running.is_none() {
            let permit = self.gate.running.clone().acquire_owned().await;
            self.running = Some(permit.expect("the semaphore is never closed"));
        }
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.gate.inside.fetch_sub(1, Ordering::AcqRel);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    #[test]
    fn over_the_limit_is_refused_and_places_come_back() {
        let admission = Admission::new(1, 1);
        let mut first = admission.enter().unwrap();
        first.run().now_or_never().unwrap();
        let mut second = admission.enter().unwrap();
        assert!(second.run().now_or_never().is_none(), "the second waits");
        let error = admission.enter().unwrap_err();
        assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
        drop(first);
        second.run().now_or_never().unwrap();
        assert_eq!(admission.inside(), 1);
        drop(second);
        assert_eq!(admission.inside(), 0);
    }
}
