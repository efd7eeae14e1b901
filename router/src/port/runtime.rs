//! Work beside the tasks of a [`Runtime`].

use baton_types::Runtime;
use tokio::sync::oneshot;

/// What work that takes milliseconds yields, done where it holds up no task; `None` where it panics.
pub(crate) async fn blocking<T: Send + 'static>(
    runtime: &dyn Runtime,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = oneshot::channel();
    // Nobody may wait for it any more.
    runtime.blocking(Box::new(move || drop(done.send(work()))));
    result.await.ok()
}
