//! The put of one prompt's KV: connects the engine, which reports finished layers, with the transfer, which writes them.

use baton_engine::api::PrefillObserver;
use baton_kv_cache::Lease;
use baton_kv_transfer::{CommitPayload, HandoffFailure, KvTransfer, Peer, PutHandle, PutRequest, TransferError};
use baton_types::{BlockTables, ErrorKind, Fence, RequestError, RequestId};
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

/// Holds the blocks once the engine has released them. The transfer holds one reference and drops it when it no longer reads them.
type HeldLease = Arc<Mutex<Option<Lease>>>;

/// The put as the request's task sees it.
#[derive(Clone)]
pub(crate) struct PromptPut {
    handle: Arc<Mutex<Option<Result<PutHandle, TransferError>>>>,
    begun: Arc<Notify>,
}

/// The put as the engine sees it.
pub(crate) struct PutObserver {
    target: PutTarget,
    lease: HeldLease,
    put: PromptPut,
}

/// A put to `target`, begun when the engine takes the prompt from its queue: the round trip for the grant overlaps with the first layer.
pub(crate) fn prompt_put(target: PutTarget) -> (PutObserver, PromptPut) {
    let put = PromptPut { handle: Arc::default(), begun: Arc::default() };
    (PutObserver { target, lease: HeldLease::default(), put: put.clone() }, put)
}

impl PrefillObserver for PutObserver {
    fn started(&mut self, blocks: &BlockTables, _now: Instant) {
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

    fn grown(&mut self, blocks: &BlockTables) {
        if let Some(Ok(handle)) = &*self.put.handle.lock() {
            handle.grown(blocks.clone());
        }
    }

    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence) {
        if let Some(Ok(handle)) = &*self.put.handle.lock() {
            handle.layer_launched(layer, tokens_end, fence);
        }
    }

    fn prefilled(&mut self, lease: Lease) {
        // However the request ends, the transfer may still read these blocks; they are freed when it drops its reference.
        *self.lease.lock() = Some(lease);
    }

    fn ended(&mut self, lease: Lease) {
        self.prefilled(lease);
        self.put.abort("the prefill ended early");
    }
}

impl PromptPut {
    /// Waits for the handoff to fail while the prompt is still being computed. Never ready once the handoff is committed or aborted.
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

    /// Everything is computed: commits, and returns the handoff so that the caller can wait for its outcome. `None` if it never started.
    pub(crate) fn commit(&self, commit: CommitPayload) -> Option<Result<PutHandle, TransferError>> {
        let handle = self.handle.lock().take()?;
        if let Ok(handle) = &handle {
            handle.finish(commit);
        }
        Some(handle)
    }

    /// Aborts the handoff: its KV is no longer needed.
    pub(crate) fn abort(&self, reason: &str) {
        if let Some(Ok(handle)) = self.handle.lock().take() {
            handle.abort(reason);
        }
    }
}

/// The error for the router when a handoff failed. A handoff has deadlines of its own, so the request may have time for another.
pub fn handoff_error(failure: &HandoffFailure, first_token_sent: bool) -> RequestError {
    let kind = match failure.kind() {
        ErrorKind::DeadlineExceeded => ErrorKind::Unavailable,
        kind if first_token_sent => kind,
        // The prompt itself is valid, and the client has received nothing of its answer: other workers may serve it.
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
