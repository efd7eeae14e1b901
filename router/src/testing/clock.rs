//! A runtime whose time a test moves on.

use baton_node::runtime::TokioRuntime;
use baton_types::{BoxFuture, Clock, Runtime};
use futures::FutureExt as _;
use std::time::{Duration, Instant};
use tokio::sync::watch;

/// Tasks and threads are tokio's.
#[derive(Debug)]
pub(crate) struct ByHand {
    tokio: TokioRuntime,
    now: watch::Sender<Instant>,
}

impl ByHand {
    /// In the current runtime, of one thread.
    pub(crate) fn new() -> Self {
        Self { tokio: TokioRuntime::current(), now: watch::Sender::new(Instant::now()) }
    }

    /// Moves time on, and lets all tasks of this thread react to it.
    pub(crate) async fn advance(&self, time: Duration) {
        self.now.send_modify(|now| *now += time);
        for _ in 0..20 {
            tokio::task::yield_now().await;
        }
    }
}

impl Clock for ByHand {
    fn now(&self) -> Instant {
        *self.now.borrow()
    }
}

impl Runtime for ByHand {
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let mut time = self.now.subscribe();
        async move { drop(time.wait_for(|now| *now >= at).await) }.boxed()
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        self.tokio.spawn(task);
    }

    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        self.tokio.blocking(work);
    }

    fn random(&self) -> u64 {
        self.tokio.random()
    }
}
