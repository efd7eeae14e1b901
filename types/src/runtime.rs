//! What tasks ask of whoever runs them: the time, timers, tasks beside them, chance.
//!
//! Processes answer with the system's clock and an async runtime (`node`). The simulation answers with virtual time, one thread and
//! numbers of its seed, which is how the tasks that ship run in it.

use std::fmt::Debug;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::task::Poll;
use std::time::{Duration, Instant};

/// A future that may move between threads.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Where instants come from: the system, or a simulation.
pub trait Clock: Send + Sync + Debug {
    /// Now; never earlier than what it said before.
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

/// Runs tasks.
pub trait Runtime: Clock {
    /// Ready from `at` on, at once where that has passed.
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()>;

    /// Runs `task` beside the caller, to its end.
    fn spawn(&self, task: BoxFuture<'static, ()>);

    /// Runs work that takes milliseconds of a processor, where it holds up no task if there is such a place.
    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        work();
    }

    /// A number that nobody can guess; in the simulation one of its seed.
    fn random(&self) -> u64;
}

impl dyn Runtime + '_ {
    /// Ready after `time`.
    pub fn sleep(&self, time: Duration) -> BoxFuture<'static, ()> {
        self.sleep_until(self.now() + time)
    }

    /// What `work` yields, or `None` where it is not ready by `at`. Dropped then, it is cancelled.
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
        // As many bits as a double holds.
        (self.random() >> 11) as f64 / (1u64 << 53) as f64
    }
}
