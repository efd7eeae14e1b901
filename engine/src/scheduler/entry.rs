//! The scheduler's record of one sequence: lengths and blocks, no tokens.

use crate::fair::Start;
use crate::gate::SequencePhase;
use baton_kv_cache::{Keep, Lease, PrefixHash};
use baton_types::Share;
use std::cmp::Reverse;
use std::ops::Range;
use std::time::Instant;

/// Identifies a sequence and orders all of them: smaller keys are served first and preempted last, as long as no tenant exceeds its share.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    priority: Reverse<i32>,
    start: Start,
    arrival: u64,
}

impl SequenceKey {
    /// `arrival` counts up. A higher `priority` comes first, then the earlier start.
    pub fn new(priority: i32, start: Start, arrival: u64) -> Self {
        Self { priority: Reverse(priority), start, arrival }
    }

    /// The priority that was given; higher ones come first.
    pub fn priority(self) -> i32 {
        self.priority.0
    }

    /// Its virtual start among the sequences of its priority.
    pub fn start(self) -> Start {
        self.start
    }
}

/// The order of sequences in one plan: within a priority, sequences beyond their tenant's share come last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Standing {
    priority: Reverse<i32>,
    is_beyond: bool,
    key: SequenceKey,
}

impl Standing {
    /// The position of a sequence that may be beyond the share.
    pub fn new(key: SequenceKey, is_beyond: bool) -> Self {
        Self { priority: key.priority, is_beyond, key }
    }

    /// Key of the sequence with this position.
    pub fn key(self) -> SequenceKey {
        self.key
    }
}

/// A sequence that the scheduler does not know yet.
#[derive(Debug)]
pub struct Arrival {
    /// Number of tokens whose KV must be computed before the next one is sampled.
    pub len: usize,
    /// Number of tokens whose KV is in the blocks of `lease` already.
    pub computed: usize,
    /// Blocks that it already holds.
    pub lease: Option<Lease>,
    /// It must not be preempted once it left the queue.
    pub pinned: bool,
    /// After this instant it ends.
    pub deadline: Instant,
    /// The tenant and its weight.
    pub share: Share,
    /// The hashes under which its blocks are cached, if they are.
    pub prefix: Option<Prefix>,
    /// Positions whose logits come back; mostly none.
    pub scored: Range<usize>,
}

/// Hashes of a sequence's prefixes, and how long blocks stored under them are kept.
#[derive(Clone, Debug)]
pub struct Prefix {
    /// One per 16 tokens, of all its tokens so far.
    pub hashes: Vec<PrefixHash>,
    /// Hash of all tokens that were to be computed when the sequence came; for an adopted sequence, of those that were computed.
    pub whole: PrefixHash,
    /// How long to keep stored blocks.
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
    /// Number of tokens that the hash of the whole covers.
    pub(super) given: usize,
    pub(super) computed: usize,
    /// Rows of steps that are launched and not finished, and tokens that those will sample.
    pub(super) launched_rows: usize,
    pub(super) launched_tokens: usize,
    /// Where prefill ends: later tokens were generated since the last (re)start.
    prefill_end: usize,
    /// Whether it ends there because a state went back to before a rejected proposal.
    went_back: bool,
    pub(super) lease: Option<Lease>,
    pub(super) pinned: bool,
    pub(super) deadline: Instant,
    pub(super) share: Share,
    /// Whether it was beyond its tenant's share at the last plan.
    pub(super) is_beyond: bool,
    pub(super) stage: Stage,
    /// Whether it has left the queue before.
    pub(super) started: bool,
    pub(super) paused_since: Option<Instant>,
    pub(super) prefix: Option<Prefix>,
    /// Tokens that were cached when it came. They count as computed until it is admitted, when those that are cached then are known.
    pub(super) expected: usize,
    /// Tokens that were cached when it was last admitted.
    pub(super) cached: usize,
    /// The same, if states are not counted.
    pub(super) known: usize,
    /// Most tokens that were computed for it before it lost its blocks.
    computed_before: usize,
    /// Until this instant it waits for another sequence to compute their common prefix.
    pub(super) shares_until: Option<Instant>,
    /// A launched step may still read blocks that were exchanged for cached ones.
    pub(super) reads_spares: bool,
    /// Positions whose logits have not come back yet.
    pub(super) scored: Range<usize>,
}

impl Entry {
    pub(super) fn new(arrival: Arrival) -> Self {
        let Arrival { len, computed, lease, pinned, deadline, share, prefix, scored } = arrival;
        // An adopted sequence has the KV of its past in its blocks and continues with the one token after it.
        let prefill_end = if computed > 0 && computed + 1 == len { computed } else { len };
        Self {
            len,
            given: if computed > 0 { computed } else { len },
            computed,
            launched_rows: 0,
            launched_tokens: 0,
            prefill_end,
            went_back: false,
            lease,
            pinned,
            deadline,
            share,
            is_beyond: false,
            stage: Stage::Waiting,
            started: false,
            paused_since: None,
            prefix,
            expected: 0,
            cached: 0,
            known: 0,
            computed_before: 0,
            shares_until: None,
            reads_spares: false,
            scored,
        }
    }

    /// How many of its first tokens may come from the cache: not the last one, whose logits it needs, and none whose logits come back.
    pub(super) fn reuse_tokens_max(&self) -> usize {
        if self.is_scored() { self.scored.start } else { self.len.saturating_sub(1) }
    }

    /// Whether logits of its prompt have not come back yet.
    pub(super) fn is_scored(&self) -> bool {
        !self.scored.is_empty()
    }

    /// Of `rows` rows from `position` on, the positions whose logits come back.
    pub(super) fn scored_in(&self, position: usize, rows: usize) -> Range<usize> {
        let first = self.scored.start.max(position);
        first..self.scored.end.min(position + rows).max(first)
    }

    /// The most of `rows` rows from `position` on of which at most `scored` rows' logits come back.
    pub(super) fn with_scored(&self, position: usize, rows: usize, scored: usize) -> usize {
        let left_out = self.scored_in(position, rows).len().saturating_sub(scored);
        if left_out == 0 { rows } else { self.scored.start.max(position) + scored - position }
    }

    /// First position that no step computes yet.
    pub(super) fn position(&self) -> usize {
        self.computed + self.launched_rows
    }

    /// Number of rows to launch before the next token is sampled.
    pub(super) fn pending(&self) -> usize {
        self.len + self.launched_tokens - self.position()
    }

    /// Hash of all its tokens, while they are still the submitted ones; `None` if it does not use the prefix cache.
    pub(super) fn prompt(&self) -> Option<PrefixHash> {
        self.prefix.as_ref().filter(|_| self.len == self.given).map(|prefix| prefix.whole)
    }

    /// Hash of the prompt whose KV is in its blocks.
    pub(super) fn computed_prompt(&self) -> Option<PrefixHash> {
        let is_computed = self.lease.is_some() && self.computed >= self.given;
        self.prefix.as_ref().filter(|_| is_computed).map(|prefix| prefix.whole)
    }

    /// Prefill is launched: each step needs one row.
    pub(super) fn is_decode(&self) -> bool {
        self.position() >= self.prefill_end
    }

    /// Prefill is complete.
    pub(super) fn is_prefilled(&self) -> bool {
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

    /// Whether it may be preempted, once no launched step uses its blocks.
    pub(super) fn may_be_preempted(&self) -> bool {
        self.lease.is_some() && !(self.pinned && self.started)
    }

    /// Whether it may be preempted now.
    pub(super) fn is_preemptable(&self) -> bool {
        self.may_be_preempted() && self.launched_rows == 0
    }

    /// Takes blocks whose first `cached` tokens are computed, and first `known` ones but for their state.
    pub(super) fn admit(&mut self, lease: Lease, cached: usize, known: usize) {
        (self.lease, self.computed, self.cached, self.shares_until) = (Some(lease), cached, cached, None);
        (self.expected, self.known) = (0, known);
    }

    /// Number of rows of a step that had been computed before.
    pub(super) fn recomputed(&self, rows: usize) -> usize {
        (self.computed + rows).min(self.computed_before).saturating_sub(self.computed)
    }

    /// What was generated since the last state is computed again. That is planned like a part of a prompt, but is none.
    pub(super) fn go_back(&mut self) {
        if let Some(lease) = &mut self.lease {
            lease.undo();
        }
        self.prefill_end = self.len;
        self.went_back = true;
    }

    /// Whether its next rows are those of its answer.
    pub(super) fn is_generating(&self) -> bool {
        self.is_decode() || self.went_back
    }

    /// Returns to the queue without blocks.
    pub(super) fn preempt(&mut self) {
        self.computed_before = self.computed_before.max(self.computed);
        self.lease = None;
        self.computed = 0;
        self.prefill_end = self.len;
        self.went_back = false;
        self.stage = Stage::Waiting;
    }
}

/// Sums over sequences, for [`crate::Load`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Sequences that wait for admission.
    pub waiting: usize,
    /// Prefill tokens still to compute, waiting and running, without those that were cached when a waiting sequence came.
    pub waiting_tokens: usize,
    /// Sequences in the running batch.
    pub running: usize,
    /// Sum of their lengths.
    pub running_tokens: usize,
    /// Blocks that sequences hold of the group that limits how many tokens fit; a shared block counts once per holder.
    pub blocks: usize,
    /// Tokens in those: computed ones, and those of prompts in progress.
    pub held_tokens: usize,
}

impl Totals {
    /// Blocks are those of `group`, of `block_tokens` tokens each.
    pub(super) fn of<'a>(entries: impl Iterator<Item = &'a Entry>, group: usize, block_tokens: usize) -> Self {
        entries.fold(Self::default(), |mut sum, entry| {
            match entry.stage {
                Stage::Waiting => sum.waiting += 1,
                Stage::Running => {
                    sum.running += 1;
                    sum.running_tokens += entry.len;
                }
            }
            if let Some(lease) = &entry.lease {
                let table = &lease.tables().0[group];
                let tokens = if entry.is_prefilled() { entry.computed } else { entry.len };
                sum.blocks += table.blocks.len();
                sum.held_tokens += tokens.min(table.end() * block_tokens).saturating_sub(table.first * block_tokens);
            }
            sum.waiting_tokens += if entry.is_generating() { 0 } else { entry.pending() - entry.expected };
            sum
        })
    }
}
