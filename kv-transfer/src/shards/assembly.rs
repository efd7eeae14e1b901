//! Adoption by instances with several shards: all parts of a sequence, or none.

use crate::{AdoptReply, VerifiedHandoff};
use baton_types::RequestId;
use parking_lot::Mutex;
use std::collections::BTreeMap;

/// Parts of sequences that arrived at the shards of one instance, until the last part is there. [`Assembly::failed`] drops a part whose
/// handoff ends meanwhile, so there are never more parts than open handoffs.
#[derive(Debug)]
pub struct Assembly {
    shards: usize,
    waiting: Mutex<BTreeMap<RequestId, Parts>>,
}

/// The parts of one request that have arrived, by shard.
type Parts = BTreeMap<u16, (VerifiedHandoff, AdoptReply)>;

impl Assembly {
    /// For an instance with this many shards.
    pub fn new(shards: u16) -> Self {
        Self { shards: shards.into(), waiting: Mutex::default() }
    }

    /// A part arrived. With the last one, `adopt` gets all parts in order of their shards, and every shard receives its answer. Parts that
    /// name different tokens are not adopted.
    pub fn arrived(
        &self,
        shard: u16,
        part: VerifiedHandoff,
        reply: AdoptReply,
        adopt: impl FnOnce(Vec<VerifiedHandoff>) -> Result<(), String>,
    ) {
        let request_id = part.request_id.clone();
        let all = {
            let mut waiting = self.waiting.lock();
            let parts = waiting.entry(request_id.clone()).or_default();
            parts.insert(shard, (part, reply));
            if parts.len() < self.shards {
                return;
            }
            waiting.remove(&request_id).unwrap_or_default()
        };
        let (parts, replies): (Vec<_>, Vec<_>) = all.into_values().unzip();
        let agree = parts.windows(2).all(|two| two[0].tokens == two[1].tokens && two[0].source == two[1].source);
        let answer = if agree { adopt(parts) } else { Err("its shards sent different sequences".into()) };
        replies.into_iter().for_each(|reply| reply.answer(answer.clone()));
    }

    /// The handoff of one part failed: the parts that arrived are not adopted.
    pub fn failed(&self, request_id: &RequestId) {
        let parts = self.waiting.lock().remove(request_id).unwrap_or_default();
        for (part, reply) in parts.into_values() {
            drop(part); // Its blocks are back before any shard is notified.
            reply.answer(Err("another shard failed".into()));
        }
    }
}
