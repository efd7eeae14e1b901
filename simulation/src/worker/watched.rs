//! Looks at what the transfer tells a worker, before the worker hears it.

use crate::counts::Counting;
use crate::invariant::{Breaches, Invariant};
use crate::model::Memory;
use baton_kv_transfer::{
    AdoptReply, GrantReply, HandoffFailure, PinQuestion, PinReply, ReserveOffer, SinkHandler, VerifiedHandoff,
};
use baton_types::{Party, RequestId, Share};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

/// KV that was adopted: whose, since when its offer waited, and when it was granted.
#[derive(Clone, Copy, Debug)]
pub struct ServedOffer {
    pub share: Share,
    pub priority: i32,
    pub offered_at: Instant,
    pub granted_at: Instant,
}

/// Which start of which worker the KV of each request is claimed from, as the last call says, and what was granted of that. Clones are the
/// same ones.
#[derive(Clone, Default)]
pub(super) struct Sources(Arc<Mutex<Told>>);

/// What a call claims.
#[derive(Clone)]
pub(super) struct Claimed {
    /// Whose KV it waits for.
    pub(super) source: Option<Party>,
    pub(super) share: Share,
    pub(super) priority: i32,
}

#[derive(Default)]
struct Told {
    claims: BTreeMap<RequestId, Claimed>,
    granted: Vec<ServedOffer>,
}

impl Sources {
    /// A call claims room for what a source will put.
    pub(super) fn add(&self, request: RequestId, claimed: Claimed) {
        self.0.lock().claims.insert(request, claimed);
    }

    /// Everything that was adopted.
    pub(super) fn granted(&self) -> Vec<ServedOffer> {
        self.0.lock().granted.clone()
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
        let claimed = self.claims.0.lock().claims.get(&handoff.request_id).cloned();
        if let Some(Claimed { source, share, priority }) = claimed {
            if source.as_ref() != Some(&handoff.source) {
                let what = format!("{} comes from {}, claimed is {source:?}", handoff.request_id, handoff.source);
                self.breaches.add(Invariant::RightIncarnation, what);
            }
            let (offered_at, granted_at) = (handoff.timings.offered_at, handoff.timings.granted_at);
            self.claims.0.lock().granted.push(ServedOffer { share, priority, offered_at, granted_at });
        }
        let tokens = &handoff.tokens[..handoff.kv_tokens as usize];
        let wrong = |memory: &Memory| memory.wrong_in(handoff.hold.blocks(), tokens);
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

    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        self.check(&handoff);
        self.handler.verified(handoff, reply);
    }

    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        // Correct workers never send what another does not understand.
        if let HandoffFailure::Protocol(detail) = &reason {
            self.breaches.add(Invariant::NoProtocolError, format!("{}: {detail}", offer.request_id));
        }
        self.handler.failed(offer, reason);
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        self.handler.pin(question, reply);
    }

    fn joins_legs(&self) -> bool {
        self.handler.joins_legs()
    }
}
