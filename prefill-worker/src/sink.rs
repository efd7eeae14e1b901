//! Nobody hands sequences to a prefill worker today: every offer is refused with that reason.

use baton_kv_transfer::{GrantReply, HandoffFailure, RefuseReason, ReserveOffer, SinkHandler, VerifiedHandoff};
use baton_types::RequestId;

/// Refuses everything.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoSink;

impl SinkHandler for NoSink {
    fn reserve(&self, _offer: ReserveOffer, reply: GrantReply) {
        reply.refuse(RefuseReason::UnknownRequest, "this is a prefill worker: it takes no sequences in");
    }

    fn verified(&self, _handoff: VerifiedHandoff) -> Result<(), String> {
        Err("this is a prefill worker: it takes no sequences in".into())
    }

    fn failed(&self, _request_id: &RequestId, _reason: HandoffFailure) {}
}
