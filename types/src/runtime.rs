//! Runtime services that tasks use: clock, timers, spawn, random numbers.
//!
//! Processes provide the system's clock and an async runtime (`node`). The simulation provides virtual time, one thread and seeded random
//! numbers, so product tasks run in it unchanged.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

/// A future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The source of instants: the system, or a simulation.
pub trait Clock: Send + Sync + Debug {
    /// Now; never earlier than a value returned before.
    fn now(&self) -> Instant;
}

/// The clock of this machine.
#[derive(Clone, Copy, Debug, Default)]
pub struct SystemClock;

impl Clock for SystemClock {
    fn now(&self) -> Instant {
        Instant::now()
    }
}

/// What tasks need of their surroundings.
pub trait Runtime: Clock {
    /// Ready from `at` on; ready at once if that has passed.
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()>;

    /// Runs `task` concurrently with the caller, to its end.
    fn spawn(&self, task: BoxFuture<'static, ()>);

    /// Runs work that takes milliseconds of CPU time. If the runtime has threads for such work, it delays no other task.
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }

    /// An unpredictable number; in the simulation one drawn from its seed.
    fn random(&self) -> u64;
}

impl dyn Runtime + '_ {
    /// Ready after the duration `time`.
    pub fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        self.sleep_until(self.now() + time)
    }

    /// The result of `work`, or `None` if it is not ready by `at`. Then it is dropped, which cancels it.
    pub async fn until<T>(&self, at: Instant, work: impl Future<Output = T>) -> Option<T> {
        // Most work is ready at once, and needs no timer.
        let (mut work, mut end) = (pin!(work), None);
        poll_fn(|cx| match work.as_mut().poll(cx) {
            Poll::Ready(done) => Poll::Ready(Some(done)),
            Poll::Pending => end.get_or_insert_with(|| self.sleep_until(at)).as_mut().poll(cx).map(|()| None),
        })
        .await
    }

    /// A number below `n`, which is not 0.
    pub fn random_below(&self, n: usize) -> usize {
        ((u128::from(self.random()) * n as u128) >> u64::BITS) as usize
    }

    /// A number from 0 up to 1.
    pub fn random_share(&self) -> f64 {
        // As many bits as the mantissa of a double has.
        (self.random() >> 11) as f64 / (1u64 << 53) as f64
    }
}
