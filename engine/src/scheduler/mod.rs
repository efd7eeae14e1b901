//! Decides which sequence runs, how many rows, and on which blocks. Pure: `now` and conditions in, decisions out; it never sleeps.
//!
//! Rules, in the order of sequences: higher priority first, then sequences within their tenant's share, then by [`SequenceKey`] (earlier
//! start, then earlier arrival). With one tenant this is the order of arrivals.
//! - Every running sequence that needs one row gets it in each step. Prefill gets the rest of `chunk_tokens_max`, and beside decode rows
//!   at most `mixed_chunk_tokens_max`.
//! - A waiting sequence is admitted when blocks for *all* its tokens are free above the watermark, in every group: of a group with a window,
//!   those that its window and one chunk need at once. No sequence overtakes one that waits for blocks.
//! - Before each step, a sequence returns the blocks that left its windows, and gets those that the step needs.
//! - A reservation for a peer that waits for blocks has a place in this order: later sequences leave it the blocks that it needs.
//! - Tenants of one priority that have prompts to compute share the rows of each chunk by weight.
//! - A reservation within its tenant's share takes blocks from sequences beyond theirs.
//! - A sequence that lacks a block takes it from the last sequence: that one is preempted, waits, and is recomputed. A sequence never takes
//!   from an earlier one, so the first always progresses and two can never starve each other.
//! - When the batch is full, an earlier sequence takes the place of the last one, which keeps its blocks and waits.
//! - An observed prefill is pinned, because its blocks are being read. It holds all the blocks it needs from the start and ends by itself.
//! - Cached tokens of a prefix are not computed. If a running sequence is computing the next part of the prefix, the other waits for it, at
//!   most about as long as recomputing might take; no sequence is held up by that wait.
//! - A waiting sequence whose identical prompt another has computed shares its full blocks and copies the partial last one, unless an
//!   earlier sequence waits for blocks.
//! - The rows of a prompt whose logits come back are computed here, each once: until then, no cached token behind them is used for it, and a step has
//!   a bounded number of such rows.
//! - A step may be planned while another runs. It goes on with what that one computes and samples. Sequences of the running step keep blocks
//!   and places, also those that have ended; if an earlier one needs those, no later sequence is launched until the step is done.
//! - In models with states, a part of a prompt ends behind whole blocks where it can, and always behind its last whole block and where other
//!   prompts went on in another way: such states are cached, and later prompts go on from them. A step is planned ahead for a sequence only
//!   within a block.
//! - A step of decode rows alone may have rows for proposed tokens, in blocks that nobody else waits for. The next step is planned once it is
//!   known which of them were sampled.
//! - A sequence that is held or whose sink is full keeps its resources and does not block others.

mod entry;
mod fair_share;
mod forks;
mod memory;
mod plan;
mod prefix_sharing;
mod proposals;
mod states;
#[cfg(test)]
mod tests;

pub use entry::{Arrival, Prefix, SequenceKey, Standing, Totals};
pub use fair_share::Accounts;
pub use plan::{Decisions, End, Segment};
pub use proposals::Rest;

use crate::fair::FairOrder;
use crate::gate::SequencePhase;
use baton_kv_cache::{Lease, SharedPool};
use baton_types::Share;
use entry::Entry;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The bounds of the scheduler. Fields without a comment are as in [`crate::EngineConfig`].
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SchedulerConfig {
    /// Tokens of a block.
    pub block_tokens: usize,
    pub chunk_tokens_max: usize,
    pub mixed_chunk_tokens_max: usize,
    /// Steps that may be launched at once.
    pub steps_max: usize,
    pub running_max: usize,
    /// Most rows of one step whose logits come back.
    pub scored_rows_max: usize,
    pub watermark_blocks: usize,
    pub stall: Duration,
    /// How soon to check held or paused sequences again: neither gate nor sink reports when it opens.
    pub recheck: Duration,
}

/// Blocks that a request of a peer waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Awaited {
    /// Its place in the order ([`crate::EngineHandle::take_turn`]). Sequences after it are admitted only if these blocks stay free.
    pub turn: SequenceKey,
    /// The tenant that asks, and its weight.
    pub share: Share,
    /// Tokens that the blocks are to hold.
    pub tokens: usize,
}

/// Conditions outside the scheduler at one instant.
pub trait Conditions {
    /// Whether the sequence's sink has room.
    fn has_room(&self, key: SequenceKey) -> bool;
    /// Whether the sequence goes on after the tokens that its launched steps will sample, whatever these are, unless they end it.
    fn continues(&self, key: SequenceKey) -> bool;
    /// Whether no gate holds the sequence in this phase.
    fn is_open(&self, key: SequenceKey, phase: SequencePhase) -> bool;
    /// Whether the sequence can take part in a step.
    fn is_prepared(&self, key: SequenceKey) -> bool;
    /// Whether launched steps use blocks of sequences that were removed. These are free once the steps are done.
    fn is_retiring(&self) -> bool;
}

/// All sequences of an engine, waiting and running, with the blocks they hold.
#[derive(Debug)]
pub struct Scheduler {
    config: SchedulerConfig,
    pool: SharedPool,
    /// The pool has groups of states.
    has_states: bool,
    entries: BTreeMap<SequenceKey, Entry>,
    awaited: Option<Awaited>,
    /// As of the last plan.
    awaited_is_beyond: bool,
    /// Tenants with sequences or a reservation here, as of the last plan.
    tenants: usize,
    /// What the sequences hold or need by tenant, as of the last plan.
    accounts: Accounts,
    /// Launched steps use blocks of sequences that are gone, as of this plan.
    is_retiring: bool,
    /// Fair order of prefill rows.
    rows: FairOrder,
    prefill_tokens_per_s: f64,
    recomputed: u64,
}

impl Scheduler {
    /// A scheduler without sequences over `pool`.
    pub fn new(config: SchedulerConfig, pool: SharedPool) -> Self {
        let has_states = pool.shape().groups.iter().any(|group| !group.kind.is_by_position());
        Self {
            config,
            pool,
            has_states,
            entries: BTreeMap::new(),
            awaited: None,
            awaited_is_beyond: false,
            tenants: 0,
            accounts: Accounts::default(),
            is_retiring: false,
            rows: FairOrder::default(),
            prefill_tokens_per_s: 0.0,
            recomputed: 0,
        }
    }

    /// Adds a sequence; [`Scheduler::plan`] decides the rest.
    pub fn add(&mut self, key: SequenceKey, arrival: Arrival) {
        let mut entry = Entry::new(arrival);
        if entry.lease.is_none() {
            let whole = entry.reuse_tokens_max() / self.config.block_tokens * self.config.block_tokens;
            entry.expected = self.pool.cached_tokens(entry.hashes()).min(whole);
        }
        let before = self.entries.insert(key, entry);
        debug_assert!(before.is_none(), "{key:?} is added once");
    }

    /// Reserves blocks for a waiting reservation, from the next plan on; `None` ends that.
    pub fn keep_for(&mut self, awaited: Option<Awaited>) {
        self.awaited = awaited;
    }

    /// Removes a sequence, whatever its stage, and returns the blocks it holds.
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

    /// Records a launch: a step will compute `rows` more tokens, and sample at most `tokens`. Until [`Scheduler::advance`] the sequence is
    /// planned as if that were done, and its blocks stay its own.
    pub fn launched(&mut self, key: SequenceKey, rows: usize, tokens: usize) {
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.launched_rows += rows;
            entry.launched_tokens += tokens;
        }
    }

    /// Records a finished step: KV of `rows` more tokens is in the pool. If the step `appended` a token, that one is to be computed next. Blocks
    /// that are full now are cached.
    ///
    /// The state that a step leaves is that of all its rows: it counts once they are recorded, and if all of them hold.
    pub fn advance(&mut self, key: SequenceKey, rows: usize, appended: bool, rest: Rest, now: Instant) {
        let has_states = self.has_states;
        if let Some(entry) = self.entries.get_mut(&key) {
            entry.launched_rows = entry.launched_rows.saturating_sub(rows);
            entry.launched_tokens = entry.launched_tokens.saturating_sub(usize::from(appended));
            entry.len += usize::from(appended);
            if has_states && rest == Rest::Rejected {
                return;
            }
            self.recomputed += entry.recomputed(rows) as u64;
            entry.computed += rows;
            entry.scored.start = entry.scored.start.max(entry.computed).min(entry.scored.end);
            if !has_states {
                entry.share(self.config.block_tokens, now);
            } else if rest == Rest::Nothing {
                entry.settle();
                entry.share(self.config.block_tokens, now);
            }
        }
    }

    /// Tokens recomputed for sequences that had lost their blocks.
    pub fn recomputed(&self) -> u64 {
        self.recomputed
    }

    /// Whether there are no sequences.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    /// Sums over all sequences.
    pub fn totals(&self) -> Totals {
        Totals::of(self.entries.values(), self.pool.shape().limiting_index(), self.config.block_tokens)
    }
}
