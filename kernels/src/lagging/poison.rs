//! Poison for KV whose stores are enqueued but not done.

use crate::kv::KvBinding;
use crate::ops::{KvHandle, Plan};
use baton_types::BlockId;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// NaN in f32, f16 and bf16 alike when repeated.
const NAN_BYTE: u8 = 0xff;

/// An enqueued attention that may still read.
pub(super) struct PendingRead {
    pub(super) job: u64,
    pub(super) kv: KvHandle,
    pub(super) layer: usize,
    pub(super) plan: Arc<Plan>,
}

/// Fills with NaN the rows that `plan` will store.
pub(super) fn poison(pool: &KvBinding, layer: usize, plan: &Plan) {
    for segment in &plan.segments {
        for run in pool.runs(&segment.blocks, segment.position..segment.position + segment.rows) {
            for plane in pool.planes() {
                let bytes = vec![NAN_BYTE; run.tokens * pool.token_stride(plane)];
                pool.memory.write(pool.offset(layer, plane, run.block, run.token), &bytes);
            }
        }
    }
}

/// Whether a pending read of the same layer covers a token that `plan` will store: its block was freed and reallocated.
pub(super) fn still_read(pool: &KvBinding, plan: &Plan, reads: &[&PendingRead]) -> bool {
    let mut stored: HashMap<BlockId, Range<usize>> = HashMap::new();
    for s in &plan.segments {
        for run in pool.runs(&s.blocks, s.position..s.position + s.rows) {
            stored.insert(run.block, run.token..run.token + run.tokens);
        }
    }
    reads.iter().flat_map(|read| &read.plan.segments).any(|s| {
        pool.runs(&s.blocks, 0..s.position + s.rows)
            .any(|run| stored.get(&run.block).is_some_and(|t| t.start < run.tokens))
    })
}
