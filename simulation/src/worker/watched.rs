//! Looks at what the transfer tells a worker, before the worker hears it.

use crate::counts::Counting;
use crate::invariant::{Breaches, Invariant};
use crate::model::Memory;
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, PinQuestion, PinReply, ReserveOffer, SinkHandler, VerifiedHandoff,
};
use baton_types::{Party, RequestId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// Which start of which worker the KV of each request is claimed from, as the last call says. Clones are the same ones.
#[derive(Clone, Default)]
pub(super) struct Sources(Arc<Mutex<BTreeMap<RequestId, Option<Party>>>>);

impl Sources {
    /// A call claims room for what `source` will put.
    pub(super) fn add(&self, request: RequestId, source: Option<Party>) {
        self.0.lock().insert(request, source);
    }
}

/// A worker's handler, with the memory that its peers write.
pub(super) struct Watched {
    pub(super) handler: Arc<dyn SinkHandler>,
    /// Absent where KV has no content.
    pub(super) memory: Option<Memory>,
    pub(super) claims: Sources,
    pub(super) counts: Counting,
    pub(super) breaches: Breaches,
}

impl Watched {
    /// KV that is called verified is that of its tokens, and from the start of a worker that it is claimed from.
    fn check(&self, handoff: &VerifiedHandoff) {
        self.counts.lock().add("put: parts", u64::from(handoff.cached_tokens > 0));
        let source = Some(&handoff.source);
        if let Some(claimed) =
            self.claims.0.lock().get(&handoff.request_id).filter(|claimed| claimed.as_ref() != source)
        {
            let what = format!("{} comes from {}, claimed is {claimed:?}", handoff.request_id, handoff.source);
            self.breaches.add(Invariant::RightIncarnation, what);
        }
        let tokens = &handoff.tokens[..handoff.kv_tokens as usize];
        let wrong = |memory: &Memory| memory.wrong(&handoff.hold.blocks().0[0], tokens);
        if let Some(position) = self.memory.as_ref().and_then(wrong) {
            let what = format!("KV of {} is adopted, and wrong from position {position} on", handoff.request_id);
            self.breaches.add(Invariant::VerifiedKv, what);
        }
    }
}

impl SinkHandler for Watched {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        self.handler.reserve(offer, reply);
    }

    fn verified(&self, handoff: VerifiedHandoff) -> Result<(), String> {
        self.check(&handoff);
        self.handler.verified(handoff)
    }

    fn arrived(&self, handoff: VerifiedHandoff, reply: AdoptReply) -> Option<Result<(), String>> {
        self.check(&handoff);
        self.handler.arrived(handoff, reply)
    }

    fn failed(&self, request_id: &RequestId, reason: HandoffFailure) {
        self.handler.failed(request_id, reason);
    }

    fn ended(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        // Correct workers never send what another does not understand.
        if let HandoffFailure::Protocol(detail) = &reason {
            self.breaches.add(Invariant::NoProtocolError, format!("{}: {detail}", offer.request_id));
        }
        self.handler.ended(offer, reason);
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        self.handler.pin(question, reply);
    }

    fn joins_legs(&self) -> bool {
        self.handler.joins_legs()
    }
}
