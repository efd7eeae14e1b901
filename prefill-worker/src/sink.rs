//! Nobody hands sequences to a prefill worker today: every offer is refused with that reason. What it has cached others may get.

use baton_engine::EngineHandle;
use baton_kv_transfer::{
    GrantReply, HandoffFailure, PinQuestion, PinReply, RefuseReason, ReserveOffer, SinkHandler, VerifiedHandoff,
};
use baton_node::membership::Members;
use baton_types::RequestId;
use baton_worker::prefix_get;

/// Takes nothing in.
#[derive(Clone, Debug)]
pub struct NoSink {
    /// Whose cache others may get from.
    pub engine: EngineHandle,
    /// Who may get what is cached.
    pub members: Members,
}

impl SinkHandler for NoSink {
    fn reserve(&self, _offer: ReserveOffer, reply: GrantReply) {
        reply.refuse(RefuseReason::UnknownRequest, "this is a prefill worker: it takes no sequences in");
    }

    fn verified(&self, _handoff: VerifiedHandoff) -> Result<(), String> {
        Err("this is a prefill worker: it takes no sequences in".into())
    }

    fn failed(&self, _request_id: &RequestId, _reason: HandoffFailure) {}

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        prefix_get::pin_prefix(&self.engine, &self.members, &question, reply);
    }
}
