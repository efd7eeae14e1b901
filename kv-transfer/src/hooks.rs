//! Hooks for tests: hold handoffs, and alter messages.

use baton_types::RequestId;

/// Points at which a handoff can be held open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HoldPoint {
    /// Source: before the offer is sent.
    Offer,
    /// Source: granted, before it posts writes.
    Puts,
    /// Source: everything is written and flushed, before it sends the commit.
    Commit,
    /// Sink: commit received, before verification.
    Verify,
    /// Reader of a get: blocks are pinned, before it gets anything.
    Gets,
}

/// Called on the progress thread; each method must return at once. The defaults change nothing.
pub trait TransferHooks: Send + Sync {
    /// Whether the handoff must wait here. Called again until it returns false.
    fn hold(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        let _ = (point, request_id);
        false
    }

    /// Replaces an encoded control message before it is sent. Two copies duplicate it, none drops it.
    #[cfg(any(test, feature = "testing"))]
    fn bend_message(&self, to: Option<&crate::Party>, message: Vec<u8>) -> Vec<Vec<u8>> {
        let _ = to;
        vec![message]
    }
}

/// Hooks that change nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl TransferHooks for NoHooks {}
