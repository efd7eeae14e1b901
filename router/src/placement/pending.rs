//! Prefixes that are being computed because this router placed them, until their worker says itself that it has them.

use baton_kv_cache::{HASH_TOKENS, PrefixHash};
use baton_types::InstanceId;
use std::collections::HashMap;
use std::time::Instant;

/// What was placed and not heard back. A prompt that begins like one that waits on a worker finds that prefix there when its own turn
/// comes, so it counts as cached: requests that come together follow the first one instead of computing the same everywhere.
#[derive(Debug)]
pub struct PendingPrefixes {
    workers: HashMap<InstanceId, HashMap<PrefixHash, Made>>,
    names: usize,
    names_max: usize,
}

#[derive(Debug)]
struct Made {
    /// Requests that are to compute it, or wait for it.
    by: u32,
    until: Instant,
}

impl PendingPrefixes {
    /// At most `names_max` prefixes; more are not remembered.
    pub fn new(names_max: usize) -> Self {
        Self { workers: HashMap::new(), names: 0, names_max }
    }

    /// A prompt with these names was placed on a worker, and is believed to be computed there before `until`.
    pub fn placed(&mut self, worker: &InstanceId, names: &[PrefixHash], until: Instant) {
        if !self.workers.contains_key(worker) {
            self.workers.insert(worker.clone(), HashMap::new());
        }
        let Some(made) = self.workers.get_mut(worker) else { return };
        for name in names {
            if let Some(known) = made.get_mut(name) {
                (known.by, known.until) = (known.by.saturating_add(1), known.until.max(until));
            } else if self.names < self.names_max {
                made.insert(*name, Made { by: 1, until });
                self.names += 1;
            } else {
                return; // What is behind a hole counts for nothing.
            }
        }
    }

    /// The prompt is computed, or was given up: from now on the worker's own word counts. To be called once for each
    /// [`PendingPrefixes::placed`], with the same names.
    pub fn ended(&mut self, worker: &InstanceId, names: &[PrefixHash]) {
        let Some(made) = self.workers.get_mut(worker) else { return };
        for name in names {
            let Some(known) = made.get_mut(name) else { continue };
            known.by -= 1;
            if known.by == 0 {
                made.remove(name);
                self.names -= 1;
            }
        }
        if made.is_empty() {
            self.workers.remove(worker);
        }
    }

    /// Forgets a worker.
    pub fn left(&mut self, worker: &InstanceId) {
        self.names -= self.workers.remove(worker).map_or(0, |made| made.len());
    }

    /// Tokens that a worker has of a prompt with these names, or will have before it begins with it, if `cached` tokens are there now.
    /// Whole blocks of `block_tokens` tokens.
    pub fn tokens(
        &self,
        worker: &InstanceId,
        names: &[PrefixHash],
        cached: usize,
        block_tokens: usize,
        now: Instant,
    ) -> usize {
        let Some(made) = self.workers.get(worker) else { return cached };
        let is_coming = |name: &&PrefixHash| made.get(name).is_some_and(|made| made.until > now);
        let coming = names.iter().skip(cached / HASH_TOKENS).take_while(is_coming).count();
        (cached + coming * HASH_TOKENS) / block_tokens * block_tokens
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn names(ids: &[u8]) -> Vec<PrefixHash> {
        ids.iter().map(|id| PrefixHash([*id; 16])).collect()
    }

    #[test]
    fn what_was_placed_counts_until_it_ended() {
        let (p, q) = (InstanceId::try_new("p").unwrap(), InstanceId::try_new("q").unwrap());
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut pending = PendingPrefixes::new(100);
        let (a, b) = (names(&[1, 2, 3, 4]), names(&[1, 2, 9]));
        pending.placed(&p, &a, later);
        pending.placed(&p, &b, later);
        assert_eq!(pending.tokens(&p, &a, 0, 16, now), 64);
        assert_eq!(pending.tokens(&p, &a, 16, 16, now), 64, "what is cached comes before");
        assert_eq!(pending.tokens(&p, &names(&[7, 2]), 0, 16, now), 0);
        assert_eq!(pending.tokens(&p, &names(&[7, 2]), 16, 16, now), 32, "the chain goes on where the cache ends");
        assert_eq!(pending.tokens(&p, &b, 0, 32, now), 32, "whole blocks");
        assert_eq!(pending.tokens(&q, &a, 0, 16, now), 0, "another worker");
        assert_eq!(pending.tokens(&p, &a, 0, 16, later), 0, "it never came");
        pending.ended(&p, &a);
        assert_eq!(pending.tokens(&p, &a, 0, 16, now), 32, "the other one is still to compute these");
        pending.ended(&p, &b);
        assert_eq!(pending.tokens(&p, &b, 0, 16, now), 0);
        assert_eq!((pending.names, pending.workers.len()), (0, 0));
    }

    #[test]
    fn it_is_bounded() {
        let (p, q) = (InstanceId::try_new("p").unwrap(), InstanceId::try_new("q").unwrap());
        let (now, later) = (Instant::now(), Instant::now() + Duration::from_secs(9));
        let mut pending = PendingPrefixes::new(3);
        pending.placed(&p, &names(&[1, 2]), later);
        pending.placed(&q, &names(&[1, 2]), later);
        assert_eq!(pending.tokens(&q, &names(&[1, 2]), 0, 16, now), 16);
        pending.ended(&q, &names(&[1, 2]));
        pending.left(&p);
        pending.ended(&p, &names(&[1, 2]));
        assert_eq!(pending.names, 0);
        pending.placed(&q, &names(&[5, 6, 7]), later);
        assert_eq!(pending.tokens(&q, &names(&[5, 6, 7]), 0, 16, now), 48);
    }
}
