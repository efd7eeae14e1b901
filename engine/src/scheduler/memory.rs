//! Assigns blocks and batch places to sequences in order, by preemption of later ones if necessary.

use super::entry::{Stage, Standing};
use super::{Awaited, Scheduler, SequenceKey};
use baton_kv_cache::Lease;
use std::time::Instant;

impl Scheduler {
    /// Ensures that the blocks of `key` hold `positions` tokens, by preempting later sequences. `false` if there are still too few blocks:
    /// they are held outside the scheduler or pinned, and will be released.
    pub(super) fn ensure(&mut self, key: SequenceKey, positions: usize, preempted: &mut Vec<SequenceKey>) -> bool {
        let needed = positions.div_ceil(self.config.block_tokens);
        loop {
            let Some(lease) = self.entries.get_mut(&key).and_then(|e| e.lease.as_mut()) else { return false };
            let missing = needed.saturating_sub(lease.blocks_min());
            if missing == 0 || lease.grow(missing) {
                return true;
            }
            let reclaimed = self.can_reclaim(key, missing) && self.preempt_last_after(key, preempted);
            if !reclaimed && !self.waives_pins(key) {
                return false;
            }
        }
    }

    /// Blocks of a group that a sequence holds.
    pub(super) fn held_blocks(&self, key: SequenceKey) -> usize {
        self.lease(key).map_or(0, Lease::blocks_min)
    }

    /// Gets blocks for all `len` tokens of a waiting sequence: above the watermark, or from later sequences. A sequence after a reservation
    /// leaves the blocks that the reservation needs.
    pub(super) fn admit(&mut self, key: SequenceKey, now: Instant, preempted: &mut Vec<SequenceKey>) -> Option<Lease> {
        let needed = self.entries[&key].len.div_ceil(self.config.block_tokens);
        if let Some(awaited) = self.awaited_before(key) {
            // The watermark is not waived for an empty pool: the reservation will use the pool next.
            let kept = awaited.blocks + self.config.watermark_blocks;
            let leaves_enough = self.pool.free_min() >= needed + kept;
            return if leaves_enough { self.reserve(key, kept, now) } else { None };
        }
        if let Some(lease) = self.reserve(key, self.config.watermark_blocks, now) {
            return Some(lease);
        }
        // The watermark protects earlier sequences, which can preempt later ones.
        while self.last_preemptable_after(key).is_some() && self.can_reclaim(key, needed) {
            if let Some(lease) = self.reserve(key, 0, now) {
                return Some(lease);
            }
            self.preempt_last_after(key, preempted);
        }
        if preempted.is_empty() && !self.waives_pins(key) { None } else { self.reserve(key, 0, now) }
    }

    /// Ends pins for the first sequence: nothing else would free blocks before the pins end, and every other sequence waits for it.
    fn waives_pins(&self, key: SequenceKey) -> bool {
        self.is_first(key) && !self.has_launched() && self.pool.waive_pins()
    }

    fn is_first(&self, key: SequenceKey) -> bool {
        let place = self.place(key);
        self.entries.keys().all(|other| self.place(*other) >= place)
    }

    pub(super) fn has_launched(&self) -> bool {
        self.entries.values().any(|entry| entry.launched_rows > 0)
    }

    /// Whether quarantined blocks alone leave no room for `len` tokens, even if no other sequence used the pool.
    pub(super) fn quarantine_keeps_out(&self, len: usize) -> bool {
        let quarantined = self.pool.counts().quarantined.div_ceil(self.pool.groups());
        let needed = len.div_ceil(self.config.block_tokens);
        quarantined > 0 && needed + quarantined > self.pool.blocks_per_group() as usize
    }

    /// The reservation, if its turn is before that of `key`.
    pub(super) fn awaited_before(&self, key: SequenceKey) -> Option<Awaited> {
        self.awaited.filter(|awaited| self.awaited_place(awaited) < self.place(key))
    }

    /// Whether `needed` blocks would be free if every sequence after `key` were preempted. Checked first, so that no sequence is preempted
    /// in vain.
    pub(super) fn can_reclaim(&self, key: SequenceKey, needed: usize) -> bool {
        let held =
            self.after(self.place(key)).filter(|(_, e)| e.is_preemptable()).filter_map(|(_, e)| e.lease.as_ref());
        self.pool.free_min_without(held) >= needed
    }

    /// Whether `key` would get `needed` blocks if launched steps were done: by preemption of sequences after it, or, for the first, by the
    /// end of pins.
    pub(super) fn can_reclaim_launched(&self, key: SequenceKey, needed: usize) -> bool {
        let held = self.after(self.place(key)).filter(|(_, e)| e.may_be_preempted());
        let suffices = self.pool.free_min_without(held.filter_map(|(_, e)| e.lease.as_ref())) >= needed;
        self.has_launched() && (suffices || self.is_first(key))
    }

    /// Whether a sequence after `key` would lose its place to it if launched steps were done.
    pub(super) fn can_park_launched(&self, key: SequenceKey) -> bool {
        let mut after = self.after(self.place(key));
        after.any(|(_, e)| e.stage == Stage::Running && e.launched_rows > 0 && e.may_be_preempted())
    }

    fn last_preemptable_after(&self, key: SequenceKey) -> Option<SequenceKey> {
        let after = self.after(self.place(key)).filter(|(_, e)| e.is_preemptable());
        after.map(|(place, _)| place).max().map(Standing::key)
    }

    fn preempt_last_after(&mut self, key: SequenceKey, preempted: &mut Vec<SequenceKey>) -> bool {
        self.last_preemptable_after(key).is_some_and(|victim| self.preempt(victim, preempted))
    }

    /// Preempts `victim`, unless it is pinned.
    pub(super) fn preempt(&mut self, victim: SequenceKey, preempted: &mut Vec<SequenceKey>) -> bool {
        let Some(entry) = self.entries.get_mut(&victim).filter(|entry| entry.is_preemptable()) else { return false };
        entry.preempt();
        preempted.push(victim);
        true
    }

    /// Frees the batch place of the last running sequence after `key`. That sequence keeps its blocks and resumes where it was.
    pub(super) fn park_last_after(&mut self, key: SequenceKey) -> bool {
        let Some(parked) = self.last_parkable_after(key).and_then(|key| self.entries.get_mut(&key)) else {
            return false;
        };
        parked.stage = Stage::Waiting;
        true
    }

    /// The last running sequence after `key` that may lose its batch place.
    pub(super) fn last_parkable_after(&self, key: SequenceKey) -> Option<SequenceKey> {
        let after = self.after(self.place(key)).filter(|(_, e)| e.stage == Stage::Running && e.is_preemptable());
        after.map(|(place, _)| place).max().map(Standing::key)
    }
}
