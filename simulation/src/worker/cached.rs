//! What a worker caches is the KV of the tokens that it is cached for, whoever wrote it.

use crate::invariant::{Breaches, Invariant};
use crate::model::Memory;
use crate::prompts::Prompts;
use baton_kv_cache::{Change, ChangeCursor, SharedPool};
use baton_router::Prepared;
use parking_lot::Mutex;
use std::sync::Arc;

/// Changes that are looked at together.
const CHANGES_MAX: usize = 64;

/// Looks at what is stored in one pool, as it is.
pub(super) struct Cached {
    pool: SharedPool,
    memory: Memory,
    prompts: Prompts,
    breaches: Breaches,
    seen: Mutex<Option<ChangeCursor>>,
}

impl Cached {
    /// Looks from now on, for as long as the result lives.
    pub(super) fn look(pool: SharedPool, memory: Memory, prompts: Prompts, breaches: Breaches) -> Arc<Self> {
        let seen = Mutex::new(pool.snapshot().map(|(_, end)| end));
        let cached = Arc::new(Self { pool, memory, prompts, breaches, seen });
        // Weak: the pool keeps its listeners.
        let told = Arc::downgrade(&cached);
        cached.pool.on_changed(move || told.upgrade().iter().for_each(|cached| cached.changed()));
        cached
    }

    fn changed(&self) {
        let mut seen = self.seen.lock();
        while let Some((changes, end)) = seen.and_then(|cursor| self.pool.changes_since(cursor, CHANGES_MAX)) {
            if *seen == Some(end) {
                return;
            }
            *seen = Some(end);
            let stored = changes.iter().filter(|change| matches!(change, Change::Stored(_)));
            for (prompt, names) in stored.flat_map(Change::hashes).filter_map(|name| self.prompts.named(name)) {
                self.check(&prompt, names);
            }
        }
    }

    /// Looks at so many names of a prompt.
    fn check(&self, prompt: &Prepared, names: usize) {
        let blocks = self.pool.cached_blocks(&prompt.hashes()[..names]);
        let len = blocks.0[0].blocks.len() * self.memory.map.layout().block_tokens() as usize;
        if let Some(position) = self.memory.wrong_in(&blocks, &prompt.tokens()[..len]) {
            let what = format!("a prefix of {} is cached, and wrong from position {position} on", prompt.id);
            self.breaches.add(Invariant::VerifiedKv, what);
        }
    }
}
