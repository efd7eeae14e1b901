//! Placement's view of one worker.

use super::Standing;
use baton_types::{InstanceRecord, Party, Role};
use std::sync::Arc;
use std::time::Duration;

/// The last measured load, plus what this router placed since.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Measured {
    pub waiting: u32,
    /// Prompt tokens not computed and not cached yet; they may be weighted by their compute time at their position.
    pub waiting_tokens: u64,
    /// Sequences in the running batch.
    pub running: u32,
    /// Tokens of KV that could be allocated now.
    pub free_tokens: u64,
    /// No sequence refers to any block, so the worker keeps no watermark. Blocks that are not free are quarantined,
    /// perhaps for long.
    pub waives_margin: bool,
    /// Prefill tokens per second; 0 while unmeasured.
    pub prefill_tokens_per_s: f64,
    /// Decode steps per second, each one token per running sequence; 0 while unmeasured.
    pub decode_steps_per_s: f64,
    /// The best of these two in recent reports: closer to what it does when nothing else runs.
    pub best: WorkerRates,
    /// The worker has computed nothing since the rates were measured a while ago, and has no waiting work.
    pub rates_are_old: bool,
}

/// What a worker computes in a second; 0 while unmeasured.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct WorkerRates {
    /// Prefill tokens per second.
    pub prefill_tokens_per_s: f64,
    /// Decode steps per second, each one token per running sequence.
    pub decode_steps_per_s: f64,
}

impl WorkerRates {
    /// Half of a rate is forgotten in this time.
    const HALF_LIFE: Duration = Duration::from_secs(60);

    /// The greater of each.
    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            prefill_tokens_per_s: self.prefill_tokens_per_s.max(other.prefill_tokens_per_s),
            decode_steps_per_s: self.decode_steps_per_s.max(other.decode_steps_per_s),
        }
    }

    /// What counts of them after `passed`.
    pub(crate) fn after(self, passed: Duration) -> Self {
        let kept = 0.5_f64.powf(passed.div_duration_f64(Self::HALF_LIFE));
        Self {
            prefill_tokens_per_s: self.prefill_tokens_per_s * kept,
            decode_steps_per_s: self.decode_steps_per_s * kept,
        }
    }
}

impl Measured {
    /// The present rates.
    pub(crate) fn rates(&self) -> WorkerRates {
        WorkerRates { prefill_tokens_per_s: self.prefill_tokens_per_s, decode_steps_per_s: self.decode_steps_per_s }
    }

    /// The best of the present and recent rates.
    pub(super) fn best_rates(&self) -> WorkerRates {
        self.best.max(self.rates())
    }

    /// Sequences that wait or run.
    pub(super) fn sequences(&self) -> u32 {
        self.waiting.saturating_add(self.running)
    }
}

/// What the tenant of a request has on a worker through this router.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Own {
    pub sequences: u32,
    /// Those without a first token yet.
    pub waiting: u32,
    /// Prompt tokens that these compute there, weighted as in [`Measured::waiting_tokens`].
    pub waiting_tokens: u64,
}

/// Longest sequence that a worker accepts, prompt and answer together, in tokens: a longer one would end early.
pub(crate) fn tokens_max(record: &InstanceRecord) -> u64 {
    let context_max = u64::from(record.card.context_max);
    if tokens_held(record, context_max) <= record.capacity_tokens {
        context_max
    } else {
        context_max.min(record.capacity_tokens)
    }
}

/// Tokens of the blocks that a sequence of `tokens` tokens holds at once on a worker: if all layers have a window, no more than that.
pub(super) fn tokens_held(record: &InstanceRecord, tokens: u64) -> u64 {
    let block_tokens = record.layout.block_tokens();
    let blocks = record.layout.groups().iter().map(|group| group.blocks_for(tokens, block_tokens)).max();
    blocks.unwrap_or(0).saturating_mul(u64::from(block_tokens))
}

/// One worker. Draining, unhealthy and stale workers are not in a view.
#[derive(Clone, Debug)]
pub(crate) struct Worker {
    pub record: Arc<InstanceRecord>,
    /// Workers with the same number have the same compatibility; `None` equals no other.
    pub group: Option<u32>,
    pub load: Measured,
    /// The part of the request's tenant in the load; nothing where no other tenant is.
    pub own: Own,
    /// Decode workers that it must not be paired with.
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

    /// Whether the worker's queue would take another sequence of a tenant. It takes twice as many while tenants are
    /// within their share of it.
    pub(super) fn queue_has_room(&self, standing: Standing) -> bool {
        let max = self.record.waiting_max.max(1);
        let own = self.own.waiting;
        let is_within = own == 0 || f64::from(own + 1) <= f64::from(max) * standing.share;
        self.load.waiting < if standing.is_below && is_within { max.saturating_mul(2) } else { max }
    }

    /// How full the batch is, waiting sequences included; over 1 means that sequences wait.
    pub(super) fn fullness(&self) -> f64 {
        f64::from(self.load.sequences()) / f64::from(self.record.running_max.max(1))
    }
}
