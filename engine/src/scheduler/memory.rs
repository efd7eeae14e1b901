//! Assigns blocks and batch places to sequences in order, by preemption of later ones if necessary.

use super::entry::{Stage, Standing};
use super::{Awaited, Scheduler, SequenceKey};
use baton_kv_cache::{Lease, StateBefore};
use std::ops::Range;
use std::time::Instant;

/// Whether as many blocks of each group are available.
pub(super) fn has(available: &[usize], needed: &[usize]) -> bool {
    available.iter().zip(needed).all(|(available, needed)| available >= needed)
}

impl Scheduler {
    /// Most positions of a sequence that launched steps compute at once.
    pub(super) fn chunk(&self) -> usize {
        self.config.steps_max * self.config.chunk_tokens_max
    }

    /// Blocks of each group that a sequence of `len` tokens needs at once.
    pub(super) fn needs(&self, len: usize) -> Vec<usize> {
        self.pool.shape().blocks_at_once(len, self.chunk())
    }

    /// Blocks of each group that are kept for a reservation, and for growth.
    pub(super) fn kept(&self, awaited: Option<Awaited>) -> Vec<usize> {
        let shape = self.pool.shape();
        let for_it = awaited.map_or_else(|| vec![0; shape.groups.len()], |it| shape.blocks_received(it.tokens));
        for_it.into_iter().map(|blocks| blocks + self.config.watermark_blocks).collect()
    }

    /// Ensures that the blocks of `key` hold what computing these positions needs, by preempting later sequences; returns blocks that only
    /// earlier positions need. `false` if there are still too few blocks: they are held outside the scheduler or by launched steps, or
    /// pinned, and will be released.
    pub(super) fn ensure(
        &mut self,
        key: SequenceKey,
        positions: Range<usize>,
        preempted: &mut Vec<SequenceKey>,
    ) -> bool {
        loop {
            let Some(lease) = self.entries.get_mut(&key).and_then(|e| e.lease.as_mut()) else { return false };
            if lease.hold(positions.clone(), StateBefore::Replaced) {
                return true;
            }
            let missing = lease.missing(positions.clone(), StateBefore::Replaced);
            let may_preempt = !self.is_retiring && self.can_reclaim(key, &missing);
            let reclaimed = may_preempt && self.preempt_last_after(key, preempted);
            if !reclaimed && !self.waives_pins(key) {
                return false;
            }
        }
    }

    /// Gets blocks for all `len` tokens of a waiting sequence: above the watermark, or from later sequences. A sequence after a reservation
    /// leaves the blocks that the reservation needs.
    pub(super) fn admit(&mut self, key: SequenceKey, now: Instant, preempted: &mut Vec<SequenceKey>) -> Option<Lease> {
        let needed = self.needs(self.entries[&key].len);
        if let Some(awaited) = self.awaited_before(key) {
            // The watermark is not waived for an empty pool: the reservation will use the pool next.
            let kept = self.kept(Some(awaited));
            let all: Vec<usize> = needed.iter().zip(&kept).map(|(needed, kept)| needed + kept).collect();
            return if has(&self.pool.available(), &all) { self.reserve(key, &kept, now) } else { None };
        }
        if let Some(lease) = self.reserve(key, &self.kept(None), now) {
            return Some(lease);
        }
        // The watermark protects earlier sequences, which can preempt later ones.
        while !self.is_retiring && self.last_preemptable_after(key).is_some() && self.can_reclaim(key, &needed) {
            if let Some(lease) = self.reserve(key, &[], now) {
                return Some(lease);
            }
            self.preempt_last_after(key, preempted);
        }
        if preempted.is_empty() && !self.waives_pins(key) { None } else { self.reserve(key, &[], now) }
    }

    /// Ends pins for the first sequence: nothing else would free blocks before the pins end, and every other sequence waits for it.
    fn waives_pins(&self, key: SequenceKey) -> bool {
        self.is_first(key) && !self.has_launched() && self.pool.waive_pins()
    }

    fn is_first(&self, key: SequenceKey) -> bool {
        let place = self.place(key);
        self.entries.keys().all(|other| self.place(*other) >= place)
    }

    /// Whether launched steps use blocks, of sequences that are here or gone.
    pub(super) fn has_launched(&self) -> bool {
        self.is_retiring || self.entries.values().any(|entry| entry.launched_rows > 0)
    }

    /// Whether quarantined blocks alone leave no room for `len` tokens, even if no other sequence used the pool.
    pub(super) fn quarantine_keeps_out(&self, len: usize) -> bool {
        let mut needs = self.needs(len).into_iter().enumerate();
        needs.any(|(group, needed)| {
            let counts = self.pool.counts_of(group);
            counts.quarantined > 0 && needed + counts.quarantined > counts.total
        })
    }

    /// The reservation, if its turn is before that of `key`.
    pub(super) fn awaited_before(&self, key: SequenceKey) -> Option<Awaited> {
        self.awaited.filter(|awaited| self.awaited_place(awaited) < self.place(key))
    }

    /// Whether `needed` blocks of each group would be free if every sequence after `key` were preempted. Checked first, so that no sequence is preempted
    /// in vain.
    pub(super) fn can_reclaim(&self, key: SequenceKey, needed: &[usize]) -> bool {
        let held =
            self.after(self.place(key)).filter(|(_, e)| e.is_preemptable()).filter_map(|(_, e)| e.lease.as_ref());
        has(&self.pool.available_without(held), needed)
    }

    /// Whether `key` would get `needed` blocks if launched steps were done: by preemption of sequences after it, or, for the first, by the
    /// end of pins.
    pub(super) fn can_reclaim_launched(&self, key: SequenceKey, needed: &[usize]) -> bool {
        let held = self.after(self.place(key)).filter(|(_, e)| e.may_be_preempted());
        let suffices = has(&self.pool.available_without(held.filter_map(|(_, e)| e.lease.as_ref())), needed);
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
