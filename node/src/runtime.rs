//! The runtime of processes: tokio, the clock of this machine, and its random numbers.

use baton_types::{BoxFuture, Clock, Runtime};
use std::time::Instant;

/// Tokio. Used within one of its runtimes alone.
#[derive(Clone, Copy, Debug, Default)]
pub struct TokioRuntime;

impl Clock for TokioRuntime {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

impl Runtime for TokioRuntime {
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        Box::pin(tokio::time::sleep_until(at.into()))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        tokio::spawn(task);
    }

    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        tokio::task::spawn_blocking(work);
    }

    fn random(&self) -> u64 {
        rand::random()
    }
}
