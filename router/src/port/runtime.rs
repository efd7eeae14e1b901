//! The port to time, tasks and chance.

use futures::future::BoxFuture;
use std::fmt::Debug;
use std::pin::pin;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

/// What runs a router. Futures that it runs may use any channel, and nothing else that is bound to a runtime.
pub trait Runtime: Debug + Send + Sync {
    /// The time now.
    fn now(&self) -> Instant;

    /// Ends at `at`, or at once where that has passed.
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()>;

    /// Runs a task beside the others, to its end.
    fn spawn(&self, task: BoxFuture<'static, ()>);

    /// Runs work that takes milliseconds, where it holds up no task.
    fn blocking(&self, work: Box<dyn FnOnce() + Send>);

    /// A random number.
    fn random_u64(&self) -> u64;
}

impl dyn Runtime {
    /// Ends after `time`.
    pub fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        self.sleep_until(self.now() + time)
    }

    /// What the future yields; `None` where that comes after `at`.
    pub async fn timeout_at<T>(&self, at: Instant, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        // Most are ready at once, and need no timer.
        if let Some(ready) = futures::future::poll_immediate(&mut future).await {
            return Some(ready);
        }
        tokio::select! {
            biased;
            value = future => Some(value),
            () = self.sleep_until(at) => None,
        }
    }

    /// What the future yields; `None` where that takes longer than `time`.
    pub async fn timeout<T>(&self, time: Duration, future: impl Future<Output = T>) -> Option<T> {
        self.timeout_at(self.now() + time, future).await
    }

    /// What [`Runtime::blocking`] work yields; `None` where it panics.
    pub async fn run_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> Option<T> {
        let (done, result) = oneshot::channel();
        // Nobody may wait for it any more.
        self.blocking(Box::new(move || drop(done.send(work()))));
        result.await.ok()
    }

    /// A random number below `n`, which is not 0.
    pub fn random_below(&self, n: usize) -> usize {
        (u128::from(self.random_u64()) * n as u128 >> u64::BITS) as usize
    }

    /// A random number from 0 up to 1.
    pub fn random_share(&self) -> f64 {
        // As many bits as a double holds.
        (self.random_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}
