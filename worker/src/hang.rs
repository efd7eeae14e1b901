//! Detects an engine whose loop makes no progress although its process still responds. Calls that wait for it end, as if the worker had
//! died, and routers continue them on other workers. Ending a call cancels its sequence. The engine keeps the sequence's resources until
//! its loop runs again and sees the cancellation.

use baton_engine::EngineHandle;
use baton_types::{ErrorKind, RequestError, Runtime};
use std::sync::Arc;
use std::time::Duration;

/// How often to check whether a hung engine makes progress again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Waits until a step of the engine hangs, and returns the error for the router of a call that waits for it.
pub async fn hung(engine: &EngineHandle, runtime: &dyn Runtime) -> RequestError {
    loop {
        let patience = engine.patience();
        if patience.is_zero() {
            let message = format!(
                "its engine has not moved for {:?}; send the request to another worker",
                engine.config().step_max
            );
            return RequestError::new(ErrorKind::Unavailable, message);
        }
        runtime.sleep_until(engine.now() + patience).await;
    }
}

/// Logs every hang and its end for the operator.
pub(crate) async fn tell(engine: EngineHandle, runtime: Arc<dyn Runtime>) {
    loop {
        hung(&engine, &*runtime).await;
        let step_max = engine.config().step_max;
        tracing::error!(?step_max, "the engine's loop does not move: what runs here goes on elsewhere");
        while engine.patience().is_zero() {
            runtime.sleep_until(engine.now() + LOOK_AGAIN).await;
        }
        tracing::info!("the engine's loop moves again");
    }
}
