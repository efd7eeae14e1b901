//! The runtime of processes: tokio.

use baton_types::{BoxFuture, Clock, Runtime};
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::oneshot;

/// A handle to one tokio runtime; timers and tasks use that runtime on any thread.
#[derive(Clone, Debug)]
pub struct TokioRuntime(Handle);

impl TokioRuntime {
    /// The runtime that the caller runs in.
    ///
    /// # Panics
    /// If called outside of a runtime.
    pub fn current() -> Self {
        Self(Handle::current())
    }
}

impl Clock for TokioRuntime {
    fn now(&self) -> Instant {
        // Tokio's clock, which tests may pause.
        tokio::time::Instant::now().into_std()
    }
}

impl Runtime for TokioRuntime {
    fn sleep_until(&self, at: Instant) -> BoxFuture<'static, ()> {
        let _inside = self.0.enter();
        Box::pin(tokio::time::sleep_until(at.into()))
    }

    fn spawn(&self, task: BoxFuture<'static, ()>) {
        drop(self.0.spawn(task));
    }

    fn blocking(&self, work: Box<dyn FnOnce() + Send>) {
        drop(self.0.spawn_blocking(work));
    }

    fn random(&self) -> u64 {
        rand::random()
    }
}

/// The result of work that takes milliseconds of CPU time; `None` if it panics.
pub async fn blocking<T: Send + 'static>(
    runtime: &dyn Runtime,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = oneshot::channel();
    // The caller may have stopped waiting.
    runtime.blocking(Box::new(move || drop(done.send(work()))));
    result.await.ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;
    use std::time::Duration;

    #[tokio::test(start_paused = true)]
    async fn time_is_tokios_and_tasks_run_beside_the_caller() {
        let runtime: Arc<dyn Runtime> = Arc::new(TokioRuntime::current());
        let (begin, (done, waits)) = (runtime.now(), tokio::sync::oneshot::channel());
        let later = begin + Duration::from_secs(1_000);
        let inner = runtime.clone();
        runtime.spawn(Box::pin(async move {
            inner.sleep_until(later).await;
            let _ = done.send(inner.now());
        }));
        assert_eq!(runtime.until(later + Duration::from_secs(1), waits).await, Some(Ok(later)));
        assert_eq!(runtime.until(runtime.now(), std::future::pending::<()>()).await, None);
    }
}
