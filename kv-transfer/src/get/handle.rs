//! The reader's end of a get.

use super::request::GetOutcome;
use crate::HandoffFailure;
use crate::inbox::Inbox;
use crate::role::HandoffKey;
use std::fmt;
use std::sync::Arc;
use tokio::sync::oneshot;

/// The reader's end of one get. If it is dropped before the outcome was received, the get is aborted.
pub struct GetHandle {
    inbox: Arc<Inbox>,
    key: HandoffKey,
    outcome: Option<oneshot::Receiver<GetOutcome>>,
}

impl GetHandle {
    pub(crate) fn new(inbox: Arc<Inbox>, key: HandoffKey, outcome: oneshot::Receiver<GetOutcome>) -> Self {
        Self { inbox, key, outcome: Some(outcome) }
    }

    /// Aborts the get. The outcome becomes [`HandoffFailure::Aborted`], unless the get ended before.
    pub fn abort(&self, reason: impl Into<String>) {
        self.inbox.abort(self.key, reason.into());
    }

    /// Waits for the end. Cancelling the wait (dropping the future) does not abort; dropping `self` does.
    pub async fn outcome(&mut self) -> GetOutcome {
        let Some(receiver) = &mut self.outcome else { return Err(HandoffFailure::Stopped) };
        let result = receiver.await.unwrap_or(Err(HandoffFailure::Stopped));
        self.outcome = None;
        result
    }

    /// [`GetHandle::outcome`] for threads outside a runtime.
    pub fn wait(mut self) -> GetOutcome {
        let outcome = self.outcome.take().map(oneshot::Receiver::blocking_recv);
        outcome.and_then(Result::ok).unwrap_or(Err(HandoffFailure::Stopped))
    }
}

impl Drop for GetHandle {
    fn drop(&mut self) {
        if self.outcome.is_some() {
            self.inbox.abort(self.key, "the reader dropped the get".into());
        }
    }
}

impl fmt::Debug for GetHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GetHandle({})", self.key)
    }
}
