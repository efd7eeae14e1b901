//! Bounds of one engine, checked before anything is allocated.

use crate::error::EngineError;
use crate::model::ModelConfig;
use crate::speculation::SpeculationConfig;
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::device::STEPS_MAX;
use baton_kv_cache::{CacheConfig, PoolShape};
use baton_types::{Dtype, KvLayout, KvPoolMap, PoolDemand, TokenId, WATERMARK_BLOCKS};
use std::time::Duration;

/// Formats and bounds of one engine. Build it with `EngineConfig { .., ..EngineConfig::default() }.try_new()`.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineConfig {
    /// Element type of KV.
    pub kv: Dtype,
    /// Memory for KV blocks.
    pub kv_cache_bytes: u64,
    /// Longest sequence, prompt and output together.
    pub model_len_max: usize,
    /// Rows of a step that contains prefill: decode rows first, prefill gets the rest (at least one row).
    pub chunk_tokens_max: usize,
    /// Rows of prefill in a step that has decode rows too. Bounds how long a prefill delays the next token of the running batch.
    pub mixed_chunk_tokens_max: usize,
    /// Most sequences in the running batch.
    pub running_max: usize,
    /// Most waiting sequences. Adopted ones do not count: they are bounded by the blocks that they hold already.
    pub waiting_max: usize,
    /// Blocks of each group kept free at admission, so that running sequences can grow.
    pub watermark_blocks: u32,
    /// How long a sequence may stay paused because its sink has no room.
    pub stall: Duration,
    /// A longer step counts as hung: the engine is reported as unhealthy, and its worker ends the calls that wait for it.
    pub step_max: Duration,
    /// End tokens of the model.
    pub end_tokens: Vec<TokenId>,
    /// The prefix cache; `None` disables it.
    pub prefix_cache: Option<PrefixCacheConfig>,
    /// Proposals of tokens.
    pub speculation: SpeculationConfig,
    /// Bounds of the adapters that may be loaded.
    pub adapters: AdapterBounds,
}

/// Bounds of the prefix cache. It has no memory of its own: idle blocks of the pool stay cached until the pool needs them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefixCacheConfig {
    /// Time after which unused blocks are evicted, unless their sequence set another.
    pub ttl: Duration,
    /// Most of the pool that all pins together may hold, in percent.
    pub pinned_percent_max: u32,
    /// Most of the pool that the pins of one owner may hold, in percent.
    pub pinned_percent_of_one_max: u32,
}

impl Default for PrefixCacheConfig {
    fn default() -> Self {
        Self { ttl: Duration::from_secs(300), pinned_percent_max: 25, pinned_percent_of_one_max: 10 }
    }
}

impl PrefixCacheConfig {
    /// Changes kept per block of the pool. A follower that is further behind must start again from a snapshot.
    const CHANGES_PER_BLOCK: usize = 4;

    /// The bounds in blocks.
    pub(crate) fn of_pool(&self, map: &KvPoolMap) -> CacheConfig {
        let shape = PoolShape::from(map);
        let blocks = shape.limiting().blocks as usize;
        let percent = |percent: u32| blocks * percent as usize / 100;
        CacheConfig {
            pinned_max: percent(self.pinned_percent_max),
            pinned_of_one_max: percent(self.pinned_percent_of_one_max),
            changes_max: map.total_blocks() / shape.groups.len() * Self::CHANGES_PER_BLOCK,
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            kv: Dtype::Bf16,
            kv_cache_bytes: 1 << 30,
            model_len_max: 4096,
            chunk_tokens_max: 256,
            mixed_chunk_tokens_max: 32,
            running_max: 64,
            waiting_max: 256,
            watermark_blocks: WATERMARK_BLOCKS,
            stall: Duration::from_secs(30),
            step_max: Duration::from_secs(60),
            end_tokens: Vec::new(),
            prefix_cache: Some(PrefixCacheConfig::default()),
            speculation: SpeculationConfig::default(),
            adapters: AdapterBounds::default(),
        }
    }
}

impl EngineConfig {
    /// Most rows of one step, far above what any device needs to be saturated; bounds the activations.
    pub const ROWS_MAX: usize = 1 << 16;

    /// Most rows of one step whose logits come back, for the log-probabilities of prompts. It bounds their memory, `[rows, vocab]` in f32, on
    /// the device and on the host, and what they delay the step by.
    const SCORED_ROWS_MAX: usize = 64;

    /// Checks every field and returns the configuration, or the first field out of range.
    pub fn try_new(self) -> Result<Self, EngineError> {
        let check = |name, expected: &str, got: usize, ok: bool| {
            if ok { Ok(()) } else { Err(EngineError::Config { name, expected: expected.into(), got: got.to_string() }) }
        };
        let rows = 1..=Self::ROWS_MAX;
        check("model_len_max", "at least 2", self.model_len_max, self.model_len_max >= 2)?;
        check("chunk_tokens_max", "1 to 65536", self.chunk_tokens_max, rows.contains(&self.chunk_tokens_max))?;
        let mixed = self.mixed_chunk_tokens_max;
        check("mixed_chunk_tokens_max", "1 to 65536", mixed, rows.contains(&mixed))?;
        check("running_max", "1 to 65536", self.running_max, rows.contains(&self.running_max))?;
        check("waiting_max", "at least 1", self.waiting_max, self.waiting_max > 0)?;
        if let Some(cache) = &self.prefix_cache {
            let (all, one) = (cache.pinned_percent_max as usize, cache.pinned_percent_of_one_max as usize);
            check("pinned_percent_max", "0 to 90", all, all <= 90)?;
            check("pinned_percent_of_one_max", "at most pinned_percent_max", one, one <= all)?;
        }
        let drafts = 1..=SpeculationConfig::TOKENS_MAX;
        let tokens_max = self.speculation.tokens_max;
        check("speculation.tokens_max", "1 to 16", tokens_max, drafts.contains(&tokens_max))?;
        for (name, wait) in [("stall", self.stall), ("step_max", self.step_max)] {
            if wait.is_zero() {
                return Err(EngineError::Config { name, expected: "over 0".into(), got: format!("{wait:?}") });
            }
        }
        Ok(self)
    }

    /// Most rows of one step. A step with prefill has at most `chunk_tokens_max` rows, or one row for each running sequence.
    pub fn step_rows_max(&self) -> usize {
        self.chunk_tokens_max.max(self.logit_rows_max())
    }

    /// Most rows of one step that sample: one for each running sequence, or those of one sequence with its proposals.
    pub fn logit_rows_max(&self) -> usize {
        self.running_max.max(1 + self.speculation.drafts_max())
    }

    /// Most rows of one step whose logits come back for the log-probabilities of prompts, besides those that sample.
    pub fn scored_rows_max(&self) -> usize {
        Self::SCORED_ROWS_MAX.min(self.chunk_tokens_max)
    }

    /// The configuration for loading the model.
    pub fn model_config(&self) -> ModelConfig {
        ModelConfig {
            kv: self.kv,
            rows_max: self.step_rows_max(),
            logit_rows_max: self.logit_rows_max() + self.scored_rows_max(),
            slots_max: self.running_max,
            model_len_max: self.model_len_max,
            adapters: self.adapters,
        }
    }

    /// The configuration for loading a draft model whose context is so many tokens.
    pub fn draft_model_config(&self, context: usize) -> ModelConfig {
        ModelConfig {
            logit_rows_max: self.running_max,
            model_len_max: self.model_len_max.min(context),
            adapters: AdapterBounds::default(),
            ..self.model_config()
        }
    }

    /// Most positions of one sequence that launched steps compute at once.
    pub fn launched_tokens_max(&self) -> usize {
        STEPS_MAX * self.chunk_tokens_max
    }

    /// What decides how `kv_cache_bytes` divides over the groups of a layout.
    pub fn pool_demand(&self) -> PoolDemand {
        PoolDemand {
            sequences: self.running_max,
            tokens_max: self.model_len_max,
            chunk_max: self.launched_tokens_max(),
            watermark: self.watermark_blocks as usize,
        }
    }

    /// The pool that fits `kv_cache_bytes`: as many blocks as fit, of each group at least one sequence's smallest and the watermark.
    pub fn pool_map(&self, layout: KvLayout) -> Result<KvPoolMap, EngineError> {
        let block_bytes = layout.bytes_per_block() as u64;
        let divided = layout.divide(self.kv_cache_bytes, &self.pool_demand());
        let blocks = divided.iter().copied().min().map_or(0, u64::from);
        let blocks_min = u64::from(self.watermark_blocks) + 1;
        if blocks < blocks_min {
            let needed = blocks_min * block_bytes;
            return Err(EngineError::PoolTooSmall {
                got: self.kv_cache_bytes,
                blocks,
                block_bytes,
                blocks_min,
                needed,
            });
        }
        Ok(KvPoolMap::with_blocks(layout, divided)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn out_of_range_is_refused_by_name() {
        let check = |name: &str, change: fn(&mut EngineConfig)| {
            let mut config = EngineConfig::default();
            change(&mut config);
            let error = config.try_new().unwrap_err().to_string();
            assert!(error.starts_with(name), "{error}");
        };
        check("model_len_max", |c| c.model_len_max = 1);
        check("chunk_tokens_max", |c| c.chunk_tokens_max = 0);
        check("mixed_chunk_tokens_max", |c| c.mixed_chunk_tokens_max = 0);
        check("running_max", |c| c.running_max = EngineConfig::ROWS_MAX + 1);
        check("waiting_max", |c| c.waiting_max = 0);
        check("speculation.tokens_max", |c| c.speculation.tokens_max = 17);
        check("stall", |c| c.stall = Duration::ZERO);
        check("step_max", |c| c.step_max = Duration::ZERO);
        EngineConfig::default().try_new().unwrap();
    }

    #[test]
    fn the_pool_is_as_large_as_the_memory_holds() {
        let layout = || KvLayout::llama(16, 2, 1, 8, Dtype::Bf16).unwrap();
        let block = layout().bytes_per_block() as u64;
        let config = |blocks: u64, spare: u64| EngineConfig {
            kv_cache_bytes: blocks * block + spare,
            ..EngineConfig::default()
        };
        assert_eq!(config(9, block - 1).pool_map(layout()).unwrap().group_blocks(), [9]);
        let error = config(4, 1).pool_map(layout()).unwrap_err();
        assert!(matches!(error, EngineError::PoolTooSmall { blocks: 4, blocks_min: 5, .. }), "{error}");
    }
}
