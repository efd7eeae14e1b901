//! Instances with several shards, as a layer above the service. Several shards of a source each put a part into the blocks of one
//! reservation here; the sequence is adopted as a whole or not at all. No shipped binary contains this layer until engines compute several
//! shards; a service with one shard does not use it.
//!
//! For the service, each leg is a separate put with its own connection, ticket, checksums and fences. [`Joined`] sits between the service
//! and the worker's handler. It asks for blocks once, gives each leg its share, and delivers the whole when the last leg is verified.
//! [`Assembly`] does the same for the shards of the sink, each of which has its own service.
//!
//! The bound on quarantined blocks counts the blocks once for each leg.

mod assembly;
mod hold;

pub use assembly::Assembly;

use crate::handler::StandingOffer;
use crate::{
    AdoptReply, BlockHold, GrantReply, HandoffFailure, Party, PinQuestion, PinReply, RefuseReason, ReserveOffer,
    SinkHandler, VerifiedHandoff,
};
use baton_types::{RequestId, TokenId};
use hold::Shared;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// What the legs of one handoff have in common.
type JointKey = (RequestId, Party);

/// A handler that joins the legs of a handoff for the handler that it wraps.
pub struct Joined<H> {
    inner: Arc<H>,
    joints: Arc<Mutex<BTreeMap<JointKey, Joint>>>,
}

/// The legs of one handoff that were offered here and have not ended.
struct Joint {
    /// The number of legs to expect.
    legs_max: u16,
    /// Legs that wait for blocks, by shard of the source.
    waiting: BTreeMap<u16, GrantReply>,
    offers: BTreeMap<u16, Arc<dyn StandingOffer>>,
    shared: Option<Arc<Shared>>,
    /// Legs that were verified, with the replies for their results.
    arrived: BTreeMap<u16, (VerifiedHandoff, AdoptReply)>,
    tokens: Option<Vec<TokenId>>,
    /// Nothing of it will be adopted, and the worker was notified.
    failed: bool,
}

impl<H: SinkHandler> Joined<H> {
    /// Wraps the handler of this shard.
    pub fn new(inner: Arc<H>) -> Self {
        Self { inner, joints: Arc::default() }
    }
}

/// A leg has ended. The last one removes its joint.
fn leg_over(joints: &mut BTreeMap<JointKey, Joint>, key: &JointKey, shard: u16) {
    if let Some(joint) = joints.get_mut(key) {
        joint.offers.remove(&shard);
        joint.waiting.remove(&shard);
        if joint.offers.is_empty() {
            joints.remove(key);
        }
    }
}

/// Sends the worker's answer for the whole to every leg.
struct ToAllLegs {
    joints: Arc<Mutex<BTreeMap<JointKey, Joint>>>,
    key: JointKey,
    replies: Vec<(u16, AdoptReply)>,
}

impl ToAllLegs {
    fn tell(self, answer: &Result<(), String>) {
        // The worker decided this itself, so it is not notified of the failure.
        if let Some(joint) = self.joints.lock().get_mut(&self.key) {
            joint.failed |= answer.is_err();
        }
        for (shard, reply) in self.replies {
            reply.answer(answer.clone());
            if answer.is_ok() {
                leg_over(&mut self.joints.lock(), &self.key, shard);
            }
        }
    }
}

/// The handoff that the worker's single answer is for.
struct JointOffer {
    joints: Arc<Mutex<BTreeMap<JointKey, Joint>>>,
    key: JointKey,
}

impl StandingOffer for JointOffer {
    /// Gives every waiting leg its share; later legs get theirs when they come.
    fn granted(&self, hold: Box<dyn BlockHold>) {
        let shared = Shared::new(hold);
        let waiting = match self.joints.lock().get_mut(&self.key).filter(|joint| !joint.failed) {
            Some(joint) => {
                joint.shared = Some(shared.clone());
                std::mem::take(&mut joint.waiting)
            }
            None => BTreeMap::new(),
        };
        waiting.into_values().for_each(|reply| reply.grant(shared.leg()));
    }

    fn refused(&self, reason: RefuseReason, detail: String) {
        let waiting = match self.joints.lock().get_mut(&self.key) {
            Some(joint) => {
                joint.failed = true;
                let waiting = std::mem::take(&mut joint.waiting);
                joint.offers.retain(|shard, _| !waiting.contains_key(shard));
                waiting
            }
            None => return,
        };
        waiting.into_values().for_each(|reply| reply.refuse(reason, detail.clone()));
        self.joints.lock().retain(|key, joint| *key != self.key || !joint.offers.is_empty());
    }

    fn is_wanted(&self) -> bool {
        self.joints.lock().get(&self.key).is_some_and(|joint| joint.waiting.values().any(GrantReply::is_wanted))
    }

    fn cancel(&self, reason: String) {
        let offers = self.joints.lock().get(&self.key).map(|joint| joint.offers.values().cloned().collect::<Vec<_>>());
        offers.into_iter().flatten().for_each(|offer| offer.cancel(reason.clone()));
    }
}

impl<H: SinkHandler> SinkHandler for Joined<H> {
    fn reserve(&self, offer: ReserveOffer, reply: GrantReply) {
        let Some(standing) = reply.offer().filter(|_| offer.legs > 1).cloned() else {
            return self.inner.reserve(offer, reply);
        };
        let key = (offer.request_id.clone(), offer.source.clone());
        let mut joints = self.joints.lock();
        let begun = !joints.contains_key(&key);
        let joint = joints.entry(key.clone()).or_insert_with(|| Joint {
            legs_max: offer.legs,
            waiting: BTreeMap::new(),
            offers: BTreeMap::new(),
            shared: None,
            arrived: BTreeMap::new(),
            tokens: None,
            failed: false,
        });
        // An earlier attempt has not ended, or has failed, or the legs disagree on their number.
        if joint.failed || joint.offers.contains_key(&offer.shard) || joint.legs_max != offer.legs {
            drop(joints);
            return reply.refuse(RefuseReason::NoRoom, "another leg of it has failed");
        }
        joint.offers.insert(offer.shard, standing);
        if let Some(shared) = &joint.shared {
            let leg = shared.leg();
            drop(joints);
            return reply.grant(leg);
        }
        joint.waiting.insert(offer.shard, reply);
        drop(joints);
        if begun {
            let joint = JointOffer { joints: self.joints.clone(), key };
            self.inner.reserve(ReserveOffer { legs: 1, ..offer }, GrantReply::new(Arc::new(joint)));
        }
    }

    /// With the last leg the worker gets the blocks, and every leg receives its answer.
    fn verified(&self, handoff: VerifiedHandoff, reply: AdoptReply) {
        let key = (handoff.request_id.clone(), handoff.source.clone());
        let mut joints = self.joints.lock();
        let Some(joint) = joints.get_mut(&key).filter(|joint| joint.offers.contains_key(&handoff.shard)) else {
            drop(joints);
            return self.inner.verified(handoff, reply);
        };
        let refused = if *joint.tokens.get_or_insert_with(|| handoff.tokens.clone()) != handoff.tokens {
            Some("its legs commit different sequences")
        } else {
            joint.failed.then_some("another leg has failed")
        };
        if let Some(why) = refused {
            drop(joints);
            drop(handoff); // Its share is back before the source is notified.
            return reply.answer(Err(why.into()));
        }
        joint.arrived.insert(handoff.shard, (handoff, reply));
        if joint.arrived.len() < usize::from(joint.legs_max) {
            return;
        }
        let (legs, hold) = (std::mem::take(&mut joint.arrived), joint.shared.take().and_then(|shared| shared.take()));
        drop(joints);
        let bytes = legs.values().map(|(leg, _)| leg.bytes).sum();
        let (mut whole, mut replies) = (None, Vec::new());
        for (shard, (leg, reply)) in legs {
            replies.push((shard, reply));
            whole = Some(leg);
        }
        let to_all = ToAllLegs { joints: self.joints.clone(), key, replies };
        let reply = AdoptReply::new(move |answer| to_all.tell(&answer));
        match whole.zip(hold) {
            Some((whole, hold)) => self.inner.verified(VerifiedHandoff { hold, bytes, ..whole }, reply),
            None => reply.answer(Err("a leg has let go".into())),
        }
    }

    /// A leg failed, so all others fail.
    fn failed(&self, offer: &ReserveOffer, reason: HandoffFailure) {
        let key = (offer.request_id.clone(), offer.source.clone());
        let mut joints = self.joints.lock();
        let Some(joint) = joints.get_mut(&key).filter(|joint| joint.offers.contains_key(&offer.shard)) else {
            drop(joints);
            return if offer.legs == 1 {
                self.inner.failed(offer, reason)
            };
        };
        let first = !std::mem::replace(&mut joint.failed, true);
        let arrived = std::mem::take(&mut joint.arrived);
        joint.shared = None;
        let others: Vec<_> =
            joint.offers.iter().filter(|(shard, _)| **shard != offer.shard).map(|(_, o)| o.clone()).collect();
        leg_over(&mut joints, &key, offer.shard);
        drop(joints);
        if first {
            others.into_iter().for_each(|other| other.cancel(format!("another leg failed: {reason}")));
            for (leg, reply) in arrived.into_values() {
                drop(leg); // Its share is back before any leg is notified.
                reply.answer(Err("another leg failed".into()));
            }
            self.inner.failed(&ReserveOffer { legs: 1, ..offer.clone() }, reason);
        }
    }

    fn pin(&self, question: PinQuestion, reply: PinReply) {
        self.inner.pin(question, reply);
    }

    fn joins_legs(&self) -> bool {
        true
    }
}

impl<H> std::fmt::Debug for Joined<H> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Joined").finish_non_exhaustive()
    }
}
