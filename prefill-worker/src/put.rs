//! The put of one prompt's KV: joins the engine, which tells of finished layers, with the transfer, which writes them.

use baton_engine::api::PrefillObserver;
use baton_kv_cache::Lease;
use baton_kv_transfer::{CommitPayload, HandoffFailure, KvTransfer, Peer, PutHandle, PutRequest, TransferError};
use baton_types::{ErrorKind, Fence, GroupBlocks, RequestError, RequestId};
use parking_lot::Mutex;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;
use tokio::sync::Notify;

/// Where the KV of a prompt is put.
#[derive(Clone)]
pub(crate) struct PutTarget {
    pub(crate) transfer: KvTransfer,
    pub(crate) peer: Peer,
    pub(crate) request_id: RequestId,
    pub(crate) tokens: u32,
    pub(crate) deadline: Instant,
}

/// Keeps the blocks once the engine gave them up. The transfer holds one reference and drops it when nothing reads them any more.
type HeldLease = Arc<Mutex<Option<Lease>>>;

/// The end of a put that the request's task has.
#[derive(Clone)]
pub(crate) struct PromptPut {
    handle: Arc<Mutex<Option<Result<PutHandle, TransferError>>>>,
    begun: Arc<Notify>,
}

/// The end that the engine has.
pub(crate) struct PutObserver {
    target: PutTarget,
    lease: HeldLease,
    put: PromptPut,
}

/// A put to `target`, begun when the engine takes the prompt from its queue: the round trip for the grant hides under the
/// first layer.
pub(crate) fn prompt_put(target: PutTarget) -> (PutObserver, PromptPut) {
    let put = PromptPut { handle: Arc::default(), begun: Arc::default() };
    (PutObserver { target, lease: HeldLease::default(), put: put.clone() }, put)
}

impl PrefillObserver for PutObserver {
    fn started(&mut self, blocks: &GroupBlocks, _now: Instant) {
        let to = &self.target;
        let request = PutRequest {
            request_id: to.request_id.clone(),
            tokens: to.tokens,
            blocks: blocks.clone(),
            deadline: to.deadline,
            hold: Box::new(Arc::clone(&self.lease)),
        };
        *self.put.handle.lock() = Some(to.transfer.put(&to.peer, request));
        self.put.begun.notify_one();
    }

    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence) {
        if let Some(Ok(handle)) = &*self.put.handle.lock() {
            handle.layer_launched(layer, tokens_end, fence);
        }
    }

    fn prefilled(&mut self, lease: Lease) {
        // Whatever becomes of the request: the transfer may still read these blocks; they go back when it dropped its hold.
        *self.lease.lock() = Some(lease);
    }

    fn ended(&mut self, lease: Lease) {
        self.prefilled(lease);
        self.put.abort("the prefill ended early");
    }

    fn restarted(&mut self) {
        // Dropping an open handoff aborts it.
        *self.put.handle.lock() = None;
    }
}

impl PromptPut {
    /// Waits for the handoff to fail while the prompt is still computed. Never ready once it is committed or aborted.
    pub(crate) async fn failure(&self) -> RequestError {
        self.begun.notified().await;
        poll_fn(|cx| match &mut *self.handle.lock() {
            Some(Ok(handle)) => match pin!(handle.outcome()).poll(cx) {
                Poll::Ready(Err(failure)) => Poll::Ready(handoff_error(&failure, false)),
                // No handoff succeeds before its commit.
                Poll::Ready(Ok(_)) | Poll::Pending => Poll::Pending,
            },
            Some(Err(error)) => Poll::Ready(RequestError::new(ErrorKind::Unavailable, error.to_string())),
            None => Poll::Pending,
        })
        .await
    }

    /// Everything is computed: commits and gives the handoff to whoever waits for its outcome. `None` where it never started.
    pub(crate) fn commit(&self, commit: CommitPayload) -> Option<Result<PutHandle, TransferError>> {
        let handle = self.handle.lock().take()?;
        if let Ok(handle) = &handle {
            handle.finish(commit);
        }
        Some(handle)
    }

    /// Gives the handoff up: nobody will want this KV.
    pub(crate) fn abort(&self, reason: &str) {
        if let Some(Ok(handle)) = self.handle.lock().take() {
            handle.abort(reason);
        }
    }
}

/// The error for the router of a handoff that failed. A handoff has deadlines of its own: the request may have time for another.
pub fn handoff_error(failure: &HandoffFailure, first_token_sent: bool) -> RequestError {
    let kind = match failure.kind() {
        ErrorKind::DeadlineExceeded => ErrorKind::Unavailable,
        kind if first_token_sent => kind,
        // The prompt itself is sound, and nobody has seen anything of its answer: other workers may serve it.
        ErrorKind::Overloaded => ErrorKind::Overloaded,
        _ => ErrorKind::Unavailable,
    };
    RequestError {
        retry_after: failure.retry_after(),
        ..RequestError::new(kind, format!("the handoff failed: {failure}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_kv_transfer::RefuseReason;

    #[test]
    fn a_failed_handoff_leaves_the_request_its_own_deadline() {
        let refused = |reason| HandoffFailure::Refused { reason, detail: String::new() };
        // failure, kind before and after the first token
        let cases = [
            (HandoffFailure::Deadline("writing"), ErrorKind::Unavailable, ErrorKind::Unavailable),
            (refused(RefuseReason::NoRoom), ErrorKind::Overloaded, ErrorKind::Overloaded),
            (refused(RefuseReason::UnknownRequest), ErrorKind::Unavailable, ErrorKind::Unavailable),
            (HandoffFailure::Corrupt(String::new()), ErrorKind::Unavailable, ErrorKind::Internal),
            (HandoffFailure::AbortedByPeer(String::new()), ErrorKind::Unavailable, ErrorKind::Cancelled),
        ];
        for (failure, before, after) in cases {
            assert_eq!([false, true].map(|sent| handoff_error(&failure, sent).kind), [before, after], "{failure}");
        }
    }
}
