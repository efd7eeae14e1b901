//! One prompt's KV on its way: joins the engine, which tells of finished layers, with the transfer, which writes them.

use baton_engine::api::PrefillObserver;
use baton_kv_cache::Lease;
use baton_kv_transfer::{CommitPayload, HandoffFailure, KvTransfer, OpenRequest, Outgoing, Peer, TransferError};
use baton_types::{ErrorKind, Fence, GroupBlocks, RequestError, RequestId};
use parking_lot::Mutex;
use std::future::{Future as _, poll_fn};
use std::pin::pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Instant;
use tokio::sync::Notify;

/// Where a prompt's KV goes.
#[derive(Clone)]
pub(crate) struct Destination {
    pub(crate) transfer: KvTransfer,
    pub(crate) peer: Peer,
    pub(crate) request_id: RequestId,
    pub(crate) tokens: u32,
    pub(crate) deadline: Instant,
}

/// Keeps the blocks once the engine gave them up. The transfer holds one reference and drops it when nothing reads them any more.
type Pouch = Arc<Mutex<Option<Lease>>>;

/// The task's end of a shipment.
#[derive(Clone)]
pub(crate) struct Shipment {
    outgoing: Arc<Mutex<Option<Result<Outgoing, TransferError>>>>,
    opened: Arc<Notify>,
}

/// The engine's end.
pub(crate) struct Loader {
    destination: Destination,
    pouch: Pouch,
    shipment: Shipment,
}

/// A shipment to `destination`, opened when the engine takes the prompt from its queue: the round trip for the grant hides under the
/// first layer.
pub(crate) fn shipment(destination: Destination) -> (Loader, Shipment) {
    let shipment = Shipment { outgoing: Arc::default(), opened: Arc::default() };
    (Loader { destination, pouch: Pouch::default(), shipment: shipment.clone() }, shipment)
}

impl PrefillObserver for Loader {
    fn started(&mut self, blocks: &GroupBlocks, _now: Instant) {
        let to = &self.destination;
        let request = OpenRequest {
            request_id: to.request_id.clone(),
            tokens: to.tokens,
            blocks: blocks.clone(),
            deadline: to.deadline,
            hold: Box::new(Arc::clone(&self.pouch)),
        };
        *self.shipment.outgoing.lock() = Some(to.transfer.open(&to.peer, request));
        self.shipment.opened.notify_one();
    }

    fn layer_launched(&mut self, layer: u32, tokens_end: usize, fence: &Fence) {
        if let Some(Ok(outgoing)) = &*self.shipment.outgoing.lock() {
            outgoing.layer_launched(layer, tokens_end, fence);
        }
    }

    fn prefilled(&mut self, lease: Lease) {
        // Whatever becomes of the request: the transfer may still read these blocks; they go back when it dropped its hold.
        *self.pouch.lock() = Some(lease);
    }

    fn ended(&mut self, lease: Lease) {
        self.prefilled(lease);
        self.shipment.abandon("the prefill ended early");
    }

    fn restarted(&mut self) {
        // Dropping an open handoff aborts it.
        *self.shipment.outgoing.lock() = None;
    }
}

impl Shipment {
    /// Waits for the handoff to fail while the prompt is still computed. Never ready once it is sealed or abandoned.
    pub(crate) async fn failure(&self) -> RequestError {
        self.opened.notified().await;
        poll_fn(|cx| match &mut *self.outgoing.lock() {
            Some(Ok(outgoing)) => match pin!(outgoing.outcome()).poll(cx) {
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
    pub(crate) fn seal(&self, commit: CommitPayload) -> Option<Result<Outgoing, TransferError>> {
        let outgoing = self.outgoing.lock().take()?;
        if let Ok(outgoing) = &outgoing {
            outgoing.finish(commit);
        }
        Some(outgoing)
    }

    /// Gives the handoff up: nobody will want this KV.
    pub(crate) fn abandon(&self, reason: &str) {
        if let Some(Ok(outgoing)) = self.outgoing.lock().take() {
            outgoing.abort(reason);
        }
    }
}

/// What the router is told of a handoff that failed. A handoff has deadlines of its own: the request may have time for another.
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
