//! Waits for what comes a moment after an answer: counts, spans, ends.

use std::time::{Duration, Instant};

/// Longest wait for what must come, on however busy a machine.
pub const COMES_MAX: Duration = Duration::from_secs(60);
/// Interval of the checks.
const LOOK: Duration = Duration::from_millis(20);

/// Repeats `check` until it passes, and returns what it found; after [`COMES_MAX`] its error.
pub async fn eventually<T>(mut check: impl AsyncFnMut() -> anyhow::Result<T>) -> anyhow::Result<T> {
    let deadline = Instant::now() + COMES_MAX;
    loop {
        match check().await {
            Err(error) if Instant::now() >= deadline => return Err(error.context(format!("for {COMES_MAX:?}"))),
            Err(_) => tokio::time::sleep(LOOK).await,
            found => return found,
        }
    }
}
