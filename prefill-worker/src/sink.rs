//! The receiving side of handoffs on a prefill worker. It refuses every put, because nothing hands sequences to a prefill worker today.
//! Other workers may get what it has cached.

use baton_engine::EngineHandle;
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, PinQuestion, PinReply, RefuseReason, ReserveOffer, SinkHandler,
    VerifiedHandoff,
};
use baton_node::membership::Members;
use baton_worker::prefix_get;

/// Refuses all puts, and serves gets from the cache.
#[derive(Clone, Debug)]
pub struct NoSink {
    /// The engine whose cache others may get from.
    pub engine: EngineHandle,
    /// The members that may get cached prefixes.
    pub members: Members,
}

impl SinkHandler for NoSink {
    fn reserve(&self, _offer: ReserveOffer, reply: GrantReply) {
        reply.refuse(RefuseReason::UnknownRequest, "this is a prefill worker: it takes no sequences in");
    }

    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        drop(handoff);
        reply.answer(Err("this is a prefill worker: it takes no sequences in".into()));
    }

    fn failed(&self, _offer: &ReserveOffer, _reason: HandoffFailure) {}

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        prefix_get::pin_prefix(&self.engine, &self.members, &question, reply);
    }
}
