//! Which worker has which prefix cached: a flat map from hashes to sets of workers, maintained from the workers' numbered events.
//!
//! ```text
//! join ──> lost ── Snapshot 0..last ──> current ── Stored, Removed in order ──> current
//!            ^                             │
//!            └────── a number is missing ──┘
//! ```
//!
//! - A worker counts only while it is *current*: its snapshot and every later event were received. After a gap, lookups treat it as holding
//!   nothing until its next snapshot, which the caller requests.
//! - Caches evict leaves first, so after each of its events, a worker that holds a block holds all blocks before it. Lookups rely on that:
//!   they search by subdivision for the block at which each worker's hits end. If a worker's events leave holes, its hits are assumed to
//!   end at one of them; the worker's own lookup decides in any case.
//! - Blocks beyond the bound are refused and counted: hits come out shorter, never wrong.
//! - No caller waits for a scan. A worker's blocks are bits under a *slot*. When a worker leaves, restarts or is lost, its slot is retired,
//!   which costs nothing; later events sweep retired slots out, one segment of the map at a time.

mod holders;
mod sequence;
mod slots;
mod table;
#[cfg(test)]
mod tests;

use crate::{HASH_TOKENS, PrefixHash};
use baton_types::{Incarnation, InstanceId, seeded};
use holders::{Added, Holders};
use sequence::{Sequence, Verdict};
use slots::{SLOTS, SlotSet};
use std::collections::HashMap;
use table::{BATCH, Table};

/// Entries of the map that are swept per block of an event, while there are retired slots.
const SWEEP_PER_BLOCK: usize = 8;
/// Fewest blocks that a round of a lookup reads.
const READS: usize = 16;
/// Most groups of [`HASH_TOKENS`] in a block: 128 tokens.
const BLOCK_GROUPS_MAX: usize = 8;

/// An update from a worker about its cache.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct CacheUpdate<'a> {
    /// The worker's incarnation. Updates of incarnations other than the joined one are ignored.
    pub incarnation: Incarnation,
    /// Number of the event, one more than that of the previous event; for a snapshot, the number of the last event in it.
    pub sequence: u64,
    pub change: CacheChange<'a>,
}

/// A change of what a worker has cached. A block is identified by the prefix that ends with it.
#[derive(Clone, Copy, Debug)]
pub enum CacheChange<'a> {
    /// Blocks that are cached from now on.
    Stored(&'a [PrefixHash]),
    /// Blocks that are no longer cached.
    Removed(&'a [PrefixHash]),
    /// A part of all cached blocks, which replaces all earlier information. Events continue after the last part.
    Snapshot {
        /// Number of the part, from 0.
        part: u32,
        /// Whether it is the last one.
        last: bool,
        /// Blocks of this part.
        blocks: &'a [PrefixHash],
    },
}

/// Result of an update.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Applied {
    /// The update was applied.
    Done,
    /// The update is old, and changed nothing.
    Stale,
    /// An earlier update is missing: the worker counts as holding nothing until it sends a snapshot.
    SnapshotNeeded,
    /// This incarnation did not join.
    Unknown,
}

/// A worker that cannot be indexed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// The limit of workers is reached.
    #[error("the prefix index holds at most {} workers", PrefixIndex::WORKERS_MAX)]
    Workers,
    /// Block sizes must be multiples of 16 tokens, because hashes end every 16 tokens.
    #[error("block_tokens must be a multiple of 16 between 16 and 128, got {0}")]
    BlockTokens(u32),
}

/// The cached prefix of one prompt on one worker.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CachedPrefix<'a> {
    pub worker: &'a InstanceId,
    /// Cached tokens from the prompt's start, in whole blocks of the worker.
    pub tokens: usize,
}

/// Sizes of the index.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct IndexCounts {
    /// Workers that joined and have not left.
    pub workers: usize,
    /// Workers that wait for a snapshot or for the rest of one.
    pub workers_lost: usize,
    /// Distinct blocks, each once however many workers hold it; those of retired slots count until they are swept.
    pub blocks: usize,
    /// Blocks that were refused because the index was full, since it was created.
    pub refused: u64,
}

/// The index of a cluster's cached prefixes. It takes about 64 to 96 bytes per block, and 8 more where blocks are on many of more than 64
/// workers.
pub struct PrefixIndex {
    table: Table,
    workers: HashMap<InstanceId, Worker>,
    slots: Vec<Slot>,
    /// Slots that may still have blocks.
    taken: SlotSet,
    /// Slots of workers that are current.
    current: SlotSet,
    /// Slots that are being swept.
    retired: SlotSet,
    /// Slots by groups per block, minus one.
    strides: [SlotSet; BLOCK_GROUPS_MAX],
    sweep_due: usize,
    refused: u64,
}

struct Worker {
    incarnation: Incarnation,
    block_groups: usize,
    sequence: Sequence,
    /// `None` before the first part of a snapshot.
    slot: Option<usize>,
}

#[derive(Clone, Default)]
struct Slot {
    worker: Option<InstanceId>,
    block_groups: usize,
    blocks: usize,
}

/// A part of a chain in which the hits of some workers end.
#[derive(Clone, Copy)]
struct Stretch {
    /// Number of blocks that all of them hold.
    held: usize,
    /// The first block that none of them holds, as far as is known; otherwise the chain's end.
    missed: usize,
    slots: SlotSet,
}

impl Stretch {
    /// Up to `n` blocks that divide it, ascending.
    fn reads(&self, n: usize) -> impl Iterator<Item = usize> + use<> {
        let (held, blocks) = (self.held, self.missed - self.held);
        let n = n.min(blocks);
        (1..=n).map(move |i| held + blocks * i / (n + 1))
    }

    /// Reports the parts in which any worker's hits end, given which of its workers hold the blocks that were read.
    fn narrow(&self, read: impl Iterator<Item = (usize, SlotSet)>, mut part: impl FnMut(Self)) {
        let mut rest = *self;
        for (at, holding) in read {
            let without = rest.slots.and_not(&holding);
            if !without.is_empty() {
                part(Self { missed: at, slots: without, ..rest });
            }
            rest = Self { held: at + 1, slots: rest.slots.and(&holding), ..rest };
        }
        if !rest.slots.is_empty() {
            part(rest);
        }
    }
}

impl PrefixIndex {
    /// Most workers that one index can hold.
    pub const WORKERS_MAX: usize = 1024;

    /// An empty index of at most `blocks_max` different blocks. `secret` is two random numbers that no worker knows: otherwise a worker could
    /// report hashes that make each operation as slow as a scan.
    pub fn new(blocks_max: usize, secret: [u64; 2]) -> Self {
        Self {
            table: Table::new(blocks_max, secret),
            workers: HashMap::new(),
            slots: vec![Slot::default(); SLOTS],
            taken: SlotSet::default(),
            current: SlotSet::default(),
            retired: SlotSet::default(),
            strides: [SlotSet::default(); BLOCK_GROUPS_MAX],
            sweep_due: 0,
            refused: 0,
        }
    }

    /// Accepts updates from this incarnation of a worker from now on; its blocks have `block_tokens` tokens. Blocks of another incarnation
    /// of the worker are dropped. Changes nothing if this incarnation has joined already.
    pub fn join(&mut self, worker: &InstanceId, incarnation: Incarnation, block_tokens: u32) -> Result<(), JoinError> {
        let block_groups = block_tokens as usize / HASH_TOKENS;
        if !(block_tokens as usize).is_multiple_of(HASH_TOKENS) || !(1..=BLOCK_GROUPS_MAX).contains(&block_groups) {
            return Err(JoinError::BlockTokens(block_tokens));
        }
        let former = self.workers.get(worker);
        if former.is_some_and(|w| w.incarnation == incarnation && w.block_groups == block_groups) {
            return Ok(());
        }
        if former.is_none() && self.workers.len() == Self::WORKERS_MAX {
            return Err(JoinError::Workers);
        }
        self.leave(worker);
        self.workers
            .insert(worker.clone(), Worker { incarnation, block_groups, sequence: Sequence::new(), slot: None });
        Ok(())
    }

    /// Removes a worker and its blocks.
    pub fn leave(&mut self, worker: &InstanceId) {
        if seeded!(IndexKeepsDeparted) {
            return;
        }
        if let Some(slot) = self.workers.remove(worker).and_then(|w| w.slot) {
            self.retire(slot);
        }
    }

    /// Applies a worker's update. The time depends on the blocks of the update, not on the size of the index.
    pub fn apply(&mut self, worker: &InstanceId, update: CacheUpdate<'_>) -> Applied {
        let Some(known) = self.workers.get_mut(worker).filter(|w| w.incarnation == update.incarnation) else {
            return Applied::Unknown;
        };
        let verdict = match update.change {
            CacheChange::Stored(_) | CacheChange::Removed(_) => known.sequence.event(update.sequence),
            CacheChange::Snapshot { part, last, .. } => known.sequence.snapshot(update.sequence, part, last),
        };
        let (current, block_groups) = (known.sequence.is_current(), known.block_groups);
        let former = if matches!(verdict, Verdict::Begin | Verdict::Lost) { known.slot.take() } else { None };
        if let Some(slot) = former {
            self.retire(slot);
        }
        let slot = match verdict {
            Verdict::Stale => return Applied::Stale,
            Verdict::Lost => return Applied::SnapshotNeeded,
            Verdict::Begin => Some(self.open_slot(worker, block_groups)),
            Verdict::Apply => self.workers.get(worker).and_then(|w| w.slot),
        };
        // A worker that is current or receiving a snapshot has had a slot since the snapshot began.
        let Some(slot) = slot else { return Applied::SnapshotNeeded };
        if current {
            self.current.insert(slot);
        }
        let blocks = match update.change {
            CacheChange::Stored(blocks) | CacheChange::Snapshot { blocks, .. } => {
                blocks.iter().for_each(|block| self.store(block, slot));
                blocks.len()
            }
            CacheChange::Removed(blocks) => {
                let removed = blocks.iter().filter(|block| self.table.take(block, slot)).count();
                self.slots[slot].blocks -= removed;
                blocks.len()
            }
        };
        self.sweep_some(SWEEP_PER_BLOCK * (1 + blocks));
        Applied::Done
    }

    /// The cached prefix of a prompt on each worker; `chain` has the prompt's hashes from its first group on. Workers without any of it are
    /// left out. In no particular order.
    pub fn lookup(&self, chain: &[PrefixHash]) -> Vec<CachedPrefix<'_>> {
        let mut found = Vec::new();
        for (slots, groups) in self.strides.iter().zip(1..) {
            let alive = self.current.and(slots);
            let ends: Vec<&PrefixHash> = chain.iter().skip(groups - 1).step_by(groups).collect();
            if alive.is_empty() || ends.is_empty() {
                continue;
            }
            let mut end = |slots: &SlotSet, blocks: usize| {
                let tokens = blocks * groups * HASH_TOKENS;
                let workers = slots.iter().filter_map(|slot| self.slots[slot].worker.as_ref());
                found.extend(workers.filter(|_| tokens > 0).map(|worker| CachedPrefix { worker, tokens }));
            };
            let mut open = vec![Stretch { held: 0, missed: ends.len(), slots: alive }];
            while !open.is_empty() {
                // The reads of a round overlap in memory, so many cost little more than one.
                let each = (READS / open.len()).max(1);
                let mut narrower = Vec::with_capacity(2 * open.len());
                for stretches in open.chunks(BATCH / each) {
                    let at = stretches.iter().flat_map(|stretch| stretch.reads(each));
                    let (holders, _) = self.table.holders(at.map(|at| ends[at]));
                    let mut holders = holders.iter();
                    for stretch in stretches {
                        let read = stretch.reads(each).zip(&mut holders);
                        stretch.narrow(read.map(|(at, holders)| (at, self.holding(&stretch.slots, holders))), |part| {
                            if part.held == part.missed { end(&part.slots, part.held) } else { narrower.push(part) }
                        });
                    }
                }
                open = narrower;
            }
        }
        found
    }

    /// The subset of `slots` that holds a block.
    fn holding(&self, slots: &SlotSet, holders: &Holders) -> SlotSet {
        let mut holding = SlotSet { near: slots.near & holders.near, ..SlotSet::default() };
        if holders.has_far() {
            let far = self.table.far_set(holders);
            slots.far_words().for_each(|i| holding.far[i] = slots.far[i] & far[i]);
        }
        holding
    }

    /// Number of different blocks that a worker reported and the index holds, also while its snapshot is not complete.
    pub fn blocks_of(&self, worker: &InstanceId) -> usize {
        self.workers.get(worker).and_then(|w| w.slot).map_or(0, |slot| self.slots[slot].blocks)
    }

    /// Whether a worker joined and must send a snapshot, or the rest of one, before it counts.
    pub fn is_lost(&self, worker: &InstanceId) -> bool {
        self.workers.get(worker).is_some_and(|w| !w.sequence.is_current())
    }

    /// Sizes of the index, computed by a pass over the workers.
    pub fn counts(&self) -> IndexCounts {
        let workers_lost = self.workers.values().filter(|w| !w.sequence.is_current()).count();
        let (workers, blocks) = (self.workers.len(), self.table.held());
        IndexCounts { workers, workers_lost, blocks, refused: self.refused }
    }

    /// Sweeps about `entries_max` entries of the map, so that blocks without holders are removed even without events. Returns whether there
    /// is more to sweep.
    pub fn sweep(&mut self, entries_max: usize) -> bool {
        self.sweep_some(entries_max);
        !self.retired.is_empty()
    }

    fn store(&mut self, block: &PrefixHash, slot: usize) {
        match self.table.add(block, slot) {
            Added::New => self.slots[slot].blocks += 1,
            Added::Already => {}
            Added::Refused => self.refused += 1,
        }
    }

    fn open_slot(&mut self, worker: &InstanceId, block_groups: usize) -> usize {
        // There are more slots than workers, so if all are taken some are retired; a complete pass frees those.
        let slot = loop {
            match self.taken.lowest_absent() {
                Some(slot) => break slot,
                None => self.sweep_segment(),
            }
        };
        self.slots[slot] = Slot { worker: Some(worker.clone()), block_groups, blocks: 0 };
        self.taken.insert(slot);
        self.strides[block_groups - 1].insert(slot);
        if let Some(known) = self.workers.get_mut(worker) {
            known.slot = Some(slot);
        }
        slot
    }

    fn retire(&mut self, slot: usize) {
        self.current.remove(slot);
        self.strides[self.slots[slot].block_groups - 1].remove(slot);
        self.slots[slot].worker = None;
        if self.slots[slot].blocks == 0 {
            self.taken.remove(slot);
        } else {
            self.retired.insert(slot);
        }
    }

    /// Segments are swept completely, so a remainder smaller than the next segment is carried over.
    fn sweep_some(&mut self, entries: usize) {
        self.sweep_due += entries;
        while !self.retired.is_empty() && self.sweep_due >= self.table.next_sweep() {
            self.sweep_due -= self.table.next_sweep();
            self.sweep_segment();
        }
        if self.retired.is_empty() {
            self.sweep_due = 0;
        }
    }

    fn sweep_segment(&mut self) {
        let slots = &mut self.slots;
        self.table.sweep(&self.retired, |slot| slots[slot].blocks -= 1);
        let done: Vec<usize> = self.retired.iter().filter(|slot| self.slots[*slot].blocks == 0).collect();
        for slot in done {
            self.retired.remove(slot);
            self.taken.remove(slot);
        }
    }
}
