//! One sequence as the scheduler sees it: lengths and blocks, no tokens.

use crate::fair::Start;
use crate::gate::SequencePhase;
use baton_kv_cache::{Keep, Lease, PrefixHash};
use baton_types::Share;
use std::cmp::Reverse;
use std::time::Instant;

/// Names a sequence and orders all of them: whoever is smaller is served first and preempted last, as far as no tenant has more than its
/// share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    priority: Reverse<i32>,
    start: Start,
    arrival: u64,
}

impl SequenceKey {
    /// `arrival` counts up; a higher `priority` comes first, then whose turn is earlier.
    pub fn new(priority: i32, start: Start, arrival: u64) -> Self {
        Self { priority: Reverse(priority), start, arrival }
    }

    /// Its priority.
    pub fn priority(self) -> i32 {
        self.priority.0
    }

    /// Its turn among those of its priority.
    pub fn start(self) -> Start {
        self.start
    }
}

/// The order of sequences in one plan: in a priority, who is beyond the share of its tenant comes last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Standing {
    priority: Reverse<i32>,
    is_beyond: bool,
    key: SequenceKey,
}

impl Standing {
    pub(super) fn new(key: SequenceKey, is_beyond: bool) -> Self {
        Self { priority: key.priority, is_beyond, key }
    }

    pub(super) fn key(self) -> SequenceKey {
        self.key
    }
}

/// A sequence that enters.
#[derive(Debug)]
pub struct Arrival {
    /// Tokens, of which the KV is to be computed before the next one is sampled.
    pub len: usize,
    /// Tokens whose KV is in the blocks of `lease` already.
    pub computed: usize,
    /// Blocks that it brings along.
    pub lease: Option<Lease>,
    /// Not to be preempted once it left the queue.
    pub pinned: bool,
    /// After this instant it ends.
    pub deadline: Instant,
    /// Whose it is.
    pub share: Share,
    /// Under which hashes its blocks are shared, if they are.
    pub prefix: Option<Prefix>,
}

/// Hashes of a sequence's prefixes, and how long what is stored under them is kept.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// One every 16 tokens, of all its tokens so far.
    pub hashes: Vec<PrefixHash>,
    /// Of all tokens that were to be computed when it came; of an adopted sequence, those that were computed.
    pub whole: PrefixHash,
    /// As it is stored.
    pub keep: Keep,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    Running,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) len: usize,
    /// Tokens that the hash of the whole covers.
    given: usize,
    pub(super) computed: usize,
    /// Where prefill ends: what comes after was generated since the last (re)start.
    prefill_end: usize,
    pub(super) lease: Option<Lease>,
    pub(super) pinned: bool,
    pub(super) deadline: Instant,
    pub(super) share: Share,
    /// Whether it is beyond the share of its tenant, as of the plan.
    pub(super) is_beyond: bool,
    pub(super) stage: Stage,
    /// Whether it ever left the queue.
    pub(super) started: bool,
    pub(super) paused_since: Option<Instant>,
    pub(super) prefix: Option<Prefix>,
    /// Tokens that it found cached when it was admitted last.
    pub(super) cached: usize,
    /// Most tokens that were computed of it, before it lost its blocks.
    computed_before: usize,
    /// Waits until then for another sequence to compute what both begin with.
    pub(super) shares_until: Option<Instant>,
}

impl Entry {
    pub(super) fn new(arrival: Arrival) -> Self {
        let Arrival { len, computed, lease, pinned, deadline, share, prefix } = arrival;
        // An adopted sequence has its past in its blocks and goes on with the one token behind it.
        let prefill_end = if computed > 0 && computed + 1 == len { computed } else { len };
        Self {
            len,
            given: if computed > 0 { computed } else { len },
            computed,
            prefill_end,
            lease,
            pinned,
            deadline,
            share,
            is_beyond: false,
            stage: Stage::Waiting,
            started: false,
            paused_since: None,
            prefix,
            cached: 0,
            computed_before: 0,
            shares_until: None,
        }
    }

    /// Tokens to compute before the next one is sampled.
    pub(super) fn pending(&self) -> usize {
        self.len - self.computed
    }

    /// Hash of all its tokens, as long as they are those that it came with to be computed; `None` where it shares nothing.
    pub(super) fn prompt(&self) -> Option<PrefixHash> {
        self.prefix.as_ref().filter(|_| self.len == self.given).map(|prefix| prefix.whole)
    }

    /// Hash of the prompt whose KV is in its blocks.
    pub(super) fn computed_prompt(&self) -> Option<PrefixHash> {
        let is_computed = self.lease.is_some() && self.computed >= self.given;
        self.prefix.as_ref().filter(|_| is_computed).map(|prefix| prefix.whole)
    }

    /// Past its prefill: one row is all it needs.
    pub(super) fn is_decode(&self) -> bool {
        self.computed >= self.prefill_end
    }

    /// Phase of a sequence that left the queue.
    pub(super) fn running_phase(&self) -> SequencePhase {
        if self.is_decode() { SequencePhase::Decode } else { SequencePhase::Prefill }
    }

    /// Phase for a gate.
    pub(super) fn phase(&self) -> SequencePhase {
        if self.stage == Stage::Waiting { SequencePhase::Queue } else { self.running_phase() }
    }

    /// Whether its blocks may be taken.
    pub(super) fn is_preemptable(&self) -> bool {
        self.lease.is_some() && !(self.pinned && self.started)
    }

    /// Takes blocks whose first `cached` tokens are computed.
    pub(super) fn admit(&mut self, lease: Lease, cached: usize) {
        (self.lease, self.computed, self.cached, self.shares_until) = (Some(lease), cached, cached, None);
    }

    /// Tokens computed by a step of so many rows that were computed before.
    pub(super) fn recomputed(&self, rows: usize) -> usize {
        (self.computed + rows).min(self.computed_before).saturating_sub(self.computed)
    }

    /// Back to the queue without blocks.
    pub(super) fn preempt(&mut self) {
        self.computed_before = self.computed_before.max(self.computed);
        self.lease = None;
        self.computed = 0;
        self.prefill_end = self.len;
        self.stage = Stage::Waiting;
    }
}

/// Sums over sequences, for [`crate::Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sequences that wait.
    pub waiting: usize,
    /// Prefill tokens still to compute, waiting and running.
    pub waiting_tokens: usize,
    /// Sequences in the running batch.
    pub running: usize,
    /// Sum of their lengths.
    pub running_tokens: usize,
    /// Blocks that sequences hold of a group, one that several share as often.
    pub blocks: usize,
    /// Tokens in those: computed ones, and those of prompts that are being computed.
    pub held_tokens: usize,
}

impl Totals {
    pub(super) fn of<'a>(entries: impl Iterator<Item = &'a Entry>) -> Self {
        entries.fold(Self::default(), |mut sum, entry| {
            match entry.stage {
                Stage::Waiting => sum.waiting += 1,
                Stage::Running => {
                    sum.running += 1;
                    sum.running_tokens += entry.len;
                }
            }
            if let Some(lease) = &entry.lease {
                sum.blocks += lease.blocks_min();
                sum.held_tokens += if entry.is_decode() { entry.computed } else { entry.len };
            }
            sum.waiting_tokens += if entry.is_decode() { 0 } else { entry.pending() };
            sum
        })
    }
}
