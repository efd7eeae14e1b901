//! Prefixes that are being computed because this router placed them, until their worker reports them as cached.

use baton_kv_cache::{HASH_TOKENS, PrefixHash};
use baton_types::InstanceId;
use std::collections::HashMap;
use std::time::Instant;

/// Placed prompts that are not reported as cached yet. They run before a later prompt with the same prefix, so the
/// prefix counts as cached for it. Thus concurrent requests follow the first one instead of computing the same prefix
/// on every worker.
#[derive(Debug)]
pub(crate) struct PendingPrefixes {
    workers: HashMap<InstanceId, HashMap<PrefixHash, Made>>,
    hashes: usize,
    names_max: usize,
}

#[derive(Debug)]
struct Made {
    /// Requests that compute it, or wait for it.
    by: u32,
    until: Instant,
}

impl PendingPrefixes {
    /// At most `names_max` prefixes; more are not remembered.
    pub(crate) fn new(names_max: usize) -> Self {
        Self { workers: HashMap::new(), hashes: 0, names_max }
    }

    /// How many prefixes are remembered.
    pub(crate) fn len(&self) -> usize {
        self.hashes
    }

    /// A prompt with these hashes was placed on a worker, and is expected to be computed there before `until`.
    pub(crate) fn placed(&mut self, worker: &InstanceId, hashes: &[PrefixHash], until: Instant) {
        if !self.workers.contains_key(worker) {
            self.workers.insert(worker.clone(), HashMap::new());
        }
        let Some(made) = self.workers.get_mut(worker) else { return };
        for hash in hashes {
            if let Some(known) = made.get_mut(hash) {
                (known.by, known.until) = (known.by.saturating_add(1), known.until.max(until));
            } else if self.hashes < self.names_max {
                made.insert(*hash, Made { by: 1, until });
                self.hashes += 1;
            } else {
                return; // Blocks after a gap do not count.
            }
        }
    }

    /// The prompt is computed, or was given up: from now on only the worker's own reports count. Call it once for each
    /// [`PendingPrefixes::placed`], with the same hashes.
    pub(crate) fn ended(&mut self, worker: &InstanceId, hashes: &[PrefixHash]) {
        let Some(made) = self.workers.get_mut(worker) else { return };
        for hash in hashes {
            let Some(known) = made.get_mut(hash) else { continue };
            known.by -= 1;
            if known.by == 0 {
                made.remove(hash);
                self.hashes -= 1;
            }
        }
        if made.is_empty() {
            self.workers.remove(worker);
        }
    }

    pub(crate) fn left(&mut self, worker: &InstanceId) {
        self.hashes -= self.workers.remove(worker).map_or(0, |made| made.len());
    }

    /// Tokens that a worker has of a prompt with these hashes, or will have before it begins with it, if `cached`
    /// tokens are there now. Counted in whole blocks of `block_tokens` tokens.
    pub(crate) fn tokens(
        &self,
        worker: &InstanceId,
        hashes: &[PrefixHash],
        cached: usize,
        block_tokens: usize,
        now: Instant,
    ) -> usize {
        let Some(made) = self.workers.get(worker) else { return cached };
        let is_coming = |hash: &&PrefixHash| made.get(hash).is_some_and(|made| made.until > now);
        let coming = hashes.iter().skip(cached / HASH_TOKENS).take_while(is_coming).count();
        (cached + coming * HASH_TOKENS) / block_tokens * block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn hashes(ids: &[u8]) -> Vec<PrefixHash> {
        ids.iter().map(|id| PrefixHash([*id; 16])).collect()
    }

    #[test]
    fn what_was_placed_counts_until_it_ended() {
        let (p, q) = (InstanceId::try_new("p").unwrap(), InstanceId::try_new("q").unwrap());
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut pending = PendingPrefixes::new(100);
        let (a, b) = (hashes(&[1, 2, 3, 4]), hashes(&[1, 2, 9]));
        pending.placed(&p, &a, later);
        pending.placed(&p, &b, later);
        assert_eq!(pending.tokens(&p, &a, 0, 16, now), 64);
        assert_eq!(pending.tokens(&p, &a, 16, 16, now), 64, "what is cached comes before");
        assert_eq!(pending.tokens(&p, &hashes(&[7, 2]), 0, 16, now), 0);
        assert_eq!(pending.tokens(&p, &hashes(&[7, 2]), 16, 16, now), 32, "the chain goes on where the cache ends");
        assert_eq!(pending.tokens(&p, &b, 0, 32, now), 32, "whole blocks");
        assert_eq!(pending.tokens(&q, &a, 0, 16, now), 0, "another worker");
        assert_eq!(pending.tokens(&p, &a, 0, 16, later), 0, "it never came");
        pending.ended(&p, &a);
        assert_eq!(pending.tokens(&p, &a, 0, 16, now), 32, "the other one is still to compute these");
        pending.ended(&p, &b);
        assert_eq!(pending.tokens(&p, &b, 0, 16, now), 0);
        assert_eq!((pending.hashes, pending.workers.len()), (0, 0));
    }

    #[test]
    fn the_later_of_two_counts() {
        let (p, begin) = (InstanceId::try_new("p").unwrap(), Instant::now());
        let after = |seconds| begin + Duration::from_secs(seconds);
        for until in [[9, 3], [3, 9]] {
            let (mut pending, a) = (PendingPrefixes::new(100), hashes(&[1, 2]));
            until.iter().for_each(|until| pending.placed(&p, &a, after(*until)));
            assert_eq!(pending.tokens(&p, &a, 0, 16, after(6)), 32, "{until:?}");
            assert_eq!(pending.tokens(&p, &a, 0, 16, after(9)), 0, "{until:?}");
        }
    }

    #[test]
    fn it_is_bounded() {
        let (p, q) = (InstanceId::try_new("p").unwrap(), InstanceId::try_new("q").unwrap());
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut pending = PendingPrefixes::new(3);
        pending.placed(&p, &hashes(&[1, 2]), later);
        pending.placed(&q, &hashes(&[1, 2]), later);
        assert_eq!(pending.tokens(&q, &hashes(&[1, 2]), 0, 16, now), 16);
        pending.ended(&q, &hashes(&[1, 2]));
        pending.left(&p);
        pending.ended(&p, &hashes(&[1, 2]));
        assert_eq!(pending.hashes, 0);
        pending.placed(&q, &hashes(&[5, 6, 7]), later);
        assert_eq!(pending.tokens(&q, &hashes(&[5, 6, 7]), 0, 16, now), 48);
    }
}
