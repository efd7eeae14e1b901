//! One sequence as the scheduler sees it: lengths and blocks, no tokens.

use crate::gate::Phase;
use baton_kv_cache::Lease;
use std::cmp::Reverse;
use std::time::Instant;

/// Names a sequence and orders all of them: whoever is smaller is served first and preempted last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceKey {
    priority: Reverse<i32>,
    arrival: u64,
}

impl SequenceKey {
    /// `arrival` counts up; a higher `priority` comes first.
    pub fn new(priority: i32, arrival: u64) -> Self {
        Self { priority: Reverse(priority), arrival }
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    Running,
}

#[derive(Debug)]
pub(super) struct Entry {
    pub(super) len: usize,
    pub(super) computed: usize,
    /// Where prefill ends: what comes after was generated since the last (re)start.
    prefill_end: usize,
    pub(super) lease: Option<Lease>,
    pub(super) pinned: bool,
    pub(super) deadline: Instant,
    pub(super) stage: Stage,
    /// Whether it ever left the queue.
    pub(super) started: bool,
    pub(super) paused_since: Option<Instant>,
}

impl Entry {
    pub(super) fn new(arrival: Arrival) -> Self {
        let Arrival { len, computed, lease, pinned, deadline } = arrival;
        // An adopted sequence has its past in its blocks and goes on with the one token behind it.
        let prefill_end = if computed > 0 && computed + 1 == len { computed } else { len };
        Self {
            len,
            computed,
            prefill_end,
            lease,
            pinned,
            deadline,
            stage: Stage::Waiting,
            started: false,
            paused_since: None,
        }
    }

    /// Tokens to compute before the next one is sampled.
    pub(super) fn pending(&self) -> usize {
        self.len - self.computed
    }

    /// Past its prefill: one row is all it needs.
    pub(super) fn is_decode(&self) -> bool {
        self.computed >= self.prefill_end
    }

    /// Phase of a sequence that left the queue.
    pub(super) fn running_phase(&self) -> Phase {
        if self.is_decode() { Phase::Decode } else { Phase::Prefill }
    }

    /// Phase for a gate.
    pub(super) fn phase(&self) -> Phase {
        if self.stage == Stage::Waiting { Phase::Queue } else { self.running_phase() }
    }

    /// Whether its blocks may be taken.
    pub(super) fn is_preemptable(&self) -> bool {
        self.lease.is_some() && !(self.pinned && self.started)
    }

    /// Back to the queue without blocks.
    pub(super) fn preempt(&mut self) {
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
            sum.waiting_tokens += if entry.is_decode() { 0 } else { entry.pending() };
            sum
        })
    }
}
