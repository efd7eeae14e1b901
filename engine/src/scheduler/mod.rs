//! Which sequence runs, how far, and on which blocks. Pure: `now` and conditions in, decisions out; it never sleeps.
//!
//! Rules, in the order of sequences (higher priority first; then who is within the share of its tenant; then by [`SequenceKey`], which is
//! earlier turn, then earlier arrival). With one tenant this is the order of arrivals.
//! - Every running sequence that needs one row gets it in each step. Prefill shares what is left of `chunk_tokens_max`.
//! - A waiting sequence is admitted when blocks for *all* its tokens are free above the watermark; nobody overtakes one that
//!   waits for blocks.
//! - A reservation for a peer that waits for blocks has its turn among the sequences: who comes after it leaves it that many.
//! - Tenants of one priority that have prompts to compute share the rows of each chunk by weight.
//! - A reservation within its tenant's share takes blocks from sequences that are beyond theirs.
//! - Who lacks a block takes it from the sequence that comes last: that one is preempted, waits, and is recomputed. Nobody takes
//!   from a sequence that comes before it, so the first of all always progresses and two can never starve each other.
//! - Where the batch is full, a sequence that comes before others takes the place of the last one, which keeps its blocks and waits.
//! - A prefill under observation is pinned: its blocks are being read. It holds all it needs from the start and ends by itself.
//! - What a sequence finds cached of its prefix it does not compute. Where one that runs is computing what comes next of it, it waits
//!   for that, at most as long as computing it once more might take; nobody waits for it meanwhile.
//! - One that waits with the very prompt whose KV another holds goes on with that one's blocks and a copy of the one that both would
//!   write, unless somebody before it waits for blocks.
//! - A sequence that is held or whose sink is full keeps what it has and stops nobody.

mod entry;
mod forks;
mod memory;
mod plan;
mod shares;
mod sharing;
#[cfg(test)]
mod tests;

pub use entry::{Arrival, Prefix, SequenceKey, Totals};
pub use plan::{Decisions, End, Segment};

use crate::fair::FairOrder;
use crate::gate::SequencePhase;
use baton_kv_cache::{Lease, SharedPool};
use baton_types::Share;
use entry::Entry;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The bounds that decisions depend on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens of a block.
    pub block_tokens: usize,
    /// See [`crate::EngineConfig::chunk_tokens_max`].
    pub chunk_tokens_max: usize,
    /// See [`crate::EngineConfig::running_max`].
    pub running_max: usize,
    /// See [`crate::EngineConfig::watermark_blocks`].
    pub watermark_blocks: usize,
    /// See [`crate::EngineConfig::stall`].
    pub stall: Duration,
    /// How soon to look again at sequences that are held or paused: neither gate nor sink tells when it opens.
    pub recheck: Duration,
}

/// Blocks that somebody outside waits for, with their turn among the sequences.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Sequences that come after it are admitted only where the blocks stay free.
    pub turn: SequenceKey,
    /// Whose it is.
    pub share: Share,
    /// Blocks of each group.
    pub blocks: usize,
}

/// What the scheduler is told of the world at one instant.
pub trait Conditions {
    /// Whether the sequence's sink has room.
    fn has_room(&self, key: SequenceKey) -> bool;
    /// Whether no gate holds the sequence in this phase.
    fn is_open(&self, key: SequenceKey, phase: SequencePhase) -> bool;
}

/// All sequences of an engine, waiting and running, with the blocks they hold.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: SharedPool,
    entries: BTreeMap<SequenceKey, Entry>,
    awaited: Option<Awaited>,
    /// As of the last plan.
    awaited_is_beyond: bool,
    /// Tenants that have anything here, as of the last plan.
    tenants: usize,
    /// Of rows of prefill.
    rows: FairOrder,
    prefill_tokens_per_s: f64,
    recomputed: u64,
}

impl Scheduler {
    /// A scheduler without sequences over `pool`.
    pub fn new(config: SchedulerConfig, pool: SharedPool) -> Self {
        Self {
            config,
            pool,
            entries: BTreeMap::new(),
            awaited: None,
            awaited_is_beyond: false,
            tenants: 0,
            rows: FairOrder::default(),
            prefill_tokens_per_s: 0.0,
            recomputed: 0,
        }
    }

    /// Adds a sequence; [`Scheduler::plan`] decides the rest.
    pub fn add(&mut self, key: SequenceKey, arrival: Arrival) {
        let before = self.entries.insert(key, Entry::new(arrival));
        debug_assert!(before.is_none(), "{key:?} is added once");
    }

    /// Keeps blocks for a reservation that waits, from the next plan on; `None` keeps nothing.
    pub fn keep_for(&mut self, awaited: Option<Awaited>) {
        self.awaited = awaited;
    }

    /// Takes a sequence out, wherever it is, with the blocks it holds.
    pub fn remove(&mut self, key: SequenceKey) -> Option<Lease> {
        self.entries.remove(&key)?.lease
    }

    /// Blocks of a sequence; `None` while it holds none.
    pub fn lease(&self, key: SequenceKey) -> Option<&Lease> {
        self.entries.get(&key)?.lease.as_ref()
    }

    /// Tokens of a sequence whose KV is in its blocks.
    pub fn computed(&self, key: SequenceKey) -> usize {
        self.entries.get(&key).map_or(0, |entry| entry.computed)
    }

    /// Records a step: KV of `rows` more tokens is in the pool, and where the step `appended` a token, that one is to compute next.
    /// Blocks that are whole now are shared.
    pub fn advance(&mut self, key: SequenceKey, rows: usize, appended: bool, now: Instant) {
        if let Some(entry) = self.entries.get_mut(&key) {
            self.recomputed += entry.recomputed(rows) as u64;
            entry.computed += rows;
            entry.len += usize::from(appended);
            entry.share(self.config.block_tokens, now);
        }
    }

    /// Tokens computed once more, of sequences that had lost their blocks.
    pub fn recomputed(&self) -> u64 {
        self.recomputed
    }

    /// Whether there is no sequence at all.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sums over all sequences.
    pub fn totals(&self) -> Totals {
        Totals::of(self.entries.values())
    }
}
