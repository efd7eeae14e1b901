//! An engine whose loop does not move although its process answers on. Calls that wait for it end, as they would if the worker had died:
//! routers go on with them elsewhere. Ending a call cancels its sequence, and what the engine holds for it stays its own until the loop
//! moves again and sees that.

use baton_engine::EngineHandle;
use baton_types::{ErrorKind, RequestError, Runtime};
use std::sync::Arc;
use std::time::Duration;

/// How often it is looked whether an engine that hung moves again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// Waits until a step of the engine hangs, and returns what to tell the router of a call that waits for it.
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

/// Tells the operator of every hang and of its end.
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
