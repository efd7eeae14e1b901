//! The runtime of a shipped router.

use crate::port::Runtime;
use futures::future::{BoxFuture, FutureExt as _};
use std::time::Instant;

/// Tokio, and the clock of the host. Used within a runtime alone.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TokioRuntime;

impl Runtime for TokioRuntime {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        tokio::time::sleep_until(at.into()).boxed()
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        tokio::spawn(task);
    }

    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        tokio::task::spawn_blocking(work);
    }

    fn random_u64(&self) -> u64 {
        rand::random()
    }
}
