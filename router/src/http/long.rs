//! Work on long texts runs off the threads that serve connections.

use baton_types::{ErrorKind, RequestError};

/// Reading or writing a longer text takes milliseconds.
const LONG_BYTES: u64 = 256 << 10;

/// Whether a text of so many bytes is long.
pub(super) fn is_long(bytes: u64) -> bool {
    bytes > LONG_BYTES
}

/// Does the work on a text of so many bytes, on a thread of its own if the text is long.
pub(super) async fn run<T: Send + 'static>(
    bytes: u64,
    work: impl FnOnce() -> Result<T, RequestError> + Send + 'static,
) -> Result<T, RequestError> {
    if !is_long(bytes) {
        return work();
    }
    let failed = |_| RequestError::new(ErrorKind::Internal, "the router failed on a long text; send it again");
    tokio::task::spawn_blocking(work).await.map_err(failed)?
}
