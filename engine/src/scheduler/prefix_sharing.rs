//! Prefixes that sequences share: found in the cache, stored there, or waited for while another sequence computes them.

use super::entry::{Entry, Stage};
use super::{Scheduler, SequenceKey};
use crate::api::Reuse;
use baton_kernels::device::STEPS_MAX;
use baton_kv_cache::{Fill, HASH_TOKENS, Lease, PrefixHash, Reserve};
use std::time::{Duration, Instant};

/// A sequence waits at most this many times the time that the common tokens take at the measured rate.
const PATIENCE: f64 = 2.0;
/// The limit while no rate is measured.
const UNMEASURED: Duration = Duration::from_secs(2);

impl Entry {
    pub(super) fn hashes(&self) -> &[PrefixHash] {
        self.prefix.as_ref().map_or(&[], |prefix| &prefix.hashes)
    }

    /// Hash of the block at an index of its table.
    fn hash_of(&self, block: usize, block_tokens: usize) -> Option<&PrefixHash> {
        self.hashes().get((block + 1) * block_tokens / HASH_TOKENS - 1)
    }

    /// Caches the blocks that became full. Its retention time also applies to blocks that it found cached.
    pub(super) fn share(&mut self, block_tokens: usize, now: Instant) {
        let (Some(prefix), Some(lease)) = (&self.prefix, &mut self.lease) else { return };
        // The one step that may still be running was launched after the exchange. With more of them, spares would have to be counted by
        // step.
        const { assert!(STEPS_MAX == 2) };
        if std::mem::take(&mut self.reads_spares) {
            lease.let_go_of_spares();
        }
        if self.computed / block_tokens > lease.kept_blocks() {
            lease.store(&prefix.hashes, self.computed, prefix.keep, now);
            // The observer of a prefill may still be reading blocks that would be exchanged, and so may the step that was launched ahead.
            if self.launched_rows > 0 {
                self.reads_spares = !self.pinned;
            } else if !self.pinned {
                lease.let_go_of_spares();
            }
        }
    }

    /// Tokens that this sequence is computing, up to the end of its prefill, and that the other needs next; 0 if there are none.
    fn makes_for(&self, other: &Self, has: usize, block_tokens: usize) -> usize {
        if self.stage != Stage::Running || self.is_prefilled() {
            return 0;
        }
        // All but the last token, whose logits it needs. A rest of fewer than `HASH_TOKENS` is not worth waiting for.
        let rest = (other.len - 1).saturating_sub(has * block_tokens);
        if rest >= HASH_TOKENS && other.prompt().is_some_and(|prompt| self.prompt() == Some(prompt)) {
            return rest;
        }
        if self.computed / block_tokens > has {
            return 0;
        }
        let both =
            (has..).map_while(|block| Some(self.hash_of(block, block_tokens)? == other.hash_of(block, block_tokens)?));
        // The block of its last token belongs to the other alone.
        let max = (other.len - 1) / block_tokens;
        both.take(max.saturating_sub(has)).take_while(|same| *same).count() * block_tokens
    }
}

impl Scheduler {
    /// The hash of the next 16 tokens of a sequence, the last of which was just generated.
    pub fn hashed(&mut self, key: SequenceKey, hash: PrefixHash) {
        if let Some(prefix) = self.entries.get_mut(&key).and_then(|entry| entry.prefix.as_mut()) {
            prefix.hashes.push(hash);
        }
    }

    /// Sets the measured prefill rate, which bounds how long to wait for another sequence.
    pub fn measured(&mut self, prefill_tokens_per_s: f64) {
        self.prefill_tokens_per_s = prefill_tokens_per_s;
    }

    /// How many of a sequence's first `given` tokens (those it came with) were read from the cache, and stored there.
    pub fn reuse(&self, key: SequenceKey, given: usize) -> Reuse {
        let Some(entry) = self.entries.get(&key) else { return Reuse::default() };
        let cached_tokens = entry.cached.min(given);
        let added = entry.lease.as_ref().map_or(0, Lease::added_blocks) * self.config.block_tokens;
        Reuse { cached_tokens, written_tokens: added.min(given - cached_tokens) }
    }

    /// Blocks for a waiting sequence, including those cached for it.
    pub(super) fn reserve(&self, key: SequenceKey, keep_free: &[usize], now: Instant) -> Option<Lease> {
        let entry = &self.entries[&key];
        let (hashes, tokens, reuse_tokens_max) = (entry.hashes(), entry.len, entry.reuse_tokens_max());
        let fill = Fill::Computed { chunk: self.chunk() };
        self.pool.try_reserve(Reserve { hashes, reuse_tokens_max, tokens, fill, keep_free, now })
    }

    /// Whether a waiting sequence should wait while a running one computes their common prefix.
    pub(super) fn awaits_prefix(&mut self, key: SequenceKey, ready: &[SequenceKey], now: Instant) -> bool {
        let entry = &self.entries[&key];
        if entry.prefix.is_none() || entry.is_scored() || entry.shares_until.is_some_and(|until| until <= now) {
            return false;
        }
        let block_tokens = self.config.block_tokens;
        let mut has = None;
        let common = ready.iter().filter(|other| **other != key).map(|other| &self.entries[other]);
        let first = entry.hash_of(0, block_tokens);
        let common = common.filter(|other| {
            other.stage == Stage::Running && !other.is_prefilled() && other.hash_of(0, block_tokens) == first
        });
        let common = common.map(|other| {
            // Looked up only if another sequence is computing a prompt with a common prefix.
            let has = *has.get_or_insert_with(|| self.pool.cached_tokens(entry.hashes()) / block_tokens);
            other.makes_for(entry, has, block_tokens)
        });
        let Some(common) = common.max().filter(|common| *common > 0) else { return false };
        if entry.shares_until.is_none() {
            let seconds = PATIENCE * common as f64 / self.prefill_tokens_per_s;
            let patience = Duration::try_from_secs_f64(seconds).unwrap_or(UNMEASURED);
            if let Some(entry) = self.entries.get_mut(&key) {
                entry.shares_until = Some(now + patience);
            }
        }
        true
    }
}
