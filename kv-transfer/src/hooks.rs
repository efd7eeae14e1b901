//! Where tests take hold of the service: handoffs held, and messages forged.

use baton_types::RequestId;

/// Points at which a handoff can be held open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HoldPoint {
    /// Source: before the offer is sent.
    Offer,
    /// Source: granted, before writes are posted.
    Puts,
    /// Source: everything written and flushed, before the commit is sent.
    Commit,
    /// Sink: commit received, before verification.
    Verify,
    /// Reader of a get: blocks are pinned, before anything is got.
    Gets,
}

/// Called on the progress thread; everything must return at once. The defaults change nothing.
pub trait TransferHooks: Send + Sync {
    /// Whether the handoff is to wait here. Asked again until the answer is no.
    fn hold(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        let _ = (point, request_id);
        false
    }

    /// Replaces an encoded control message on its way out. Returning it twice doubles it, not at all drops it.
    #[cfg(any(test, feature = "testing"))]
    fn bend_message(&self, to: Option<&crate::Party>, message: Vec<u8>) -> Vec<Vec<u8>> {
        let _ = to;
        vec![message]
    }
}

/// Changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl TransferHooks for NoHooks {}
