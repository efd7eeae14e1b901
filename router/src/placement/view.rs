//! What placement sees of one worker.

use baton_types::{InstanceRecord, Party, Role};
use std::sync::Arc;

/// Load as last measured, joined with what this router placed since.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub waiting: u32,
    /// Prompt tokens not yet computed and not cached; those far into a prompt may count by the time that they take.
    pub waiting_tokens: u64,
    /// Sequences in the running batch.
    pub running: u32,
    /// Tokens of KV that could be taken now.
    pub free_tokens: u64,
    /// No sequence refers to any block, so that the worker keeps no margin: what is not free is quarantined, perhaps for long.
    pub waives_margin: bool,
    /// Prefill tokens per second; 0 while unmeasured.
    pub prefill_tokens_per_s: f64,
    /// Decode steps per second, each a token of every running sequence; 0 while unmeasured.
    pub decode_steps_per_s: f64,
    /// Nothing was computed since these were measured, a while ago, and nothing waits to be.
    pub rates_are_old: bool,
}

impl Measured {
    /// Sequences that wait or run.
    pub(super) fn sequences(&self) -> u32 {
        self.waiting.saturating_add(self.running)
    }
}

/// Tokens of the longest sequence that a worker takes, prompt and answer together: a longer one it would end early.
pub(crate) fn tokens_max(record: &InstanceRecord) -> u64 {
    u64::from(record.card.context_max).min(record.capacity_tokens)
}

/// One worker. Draining, unhealthy and stale workers are not in a view.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    /// What it says of itself.
    pub record: Arc<InstanceRecord>,
    /// Workers with the same number pair with the same workers; `None` is like no other.
    pub group: Option<u32>,
    pub load: Measured,
    /// Decode workers that it is not to be paired with.
    pub not_with: Vec<Party>,
    /// Tokens from the start of this prompt whose KV it has, or will have before it could begin with this prompt.
    pub cached_tokens: u64,
}

impl Worker {
    pub(super) fn has_role(&self, role: Role) -> bool {
        self.record.role == role
    }

    pub(super) fn tokens_max(&self) -> u64 {
        tokens_max(&self.record)
    }

    pub(super) fn queue_has_room(&self) -> bool {
        self.load.waiting < self.record.waiting_max.max(1)
    }

    /// How full the batch is, waiting sequences included; over 1 means that sequences wait.
    pub(super) fn fullness(&self) -> f64 {
        f64::from(self.load.sequences()) / f64::from(self.record.running_max.max(1))
    }
}
