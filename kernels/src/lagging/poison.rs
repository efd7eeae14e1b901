//! Poison for KV whose stores are enqueued but not done.

use crate::kv::KvBinding;
use crate::step::StepSegment;
use baton_types::BlockId;
use std::collections::HashMap;
use std::ops::Range;

/// NaN in f32, f16 and bf16 alike when repeated.
const NAN_BYTE: u8 = 0xff;

/// An enqueued step that may still read its blocks.
pub(super) struct PendingRead {
    pub(super) job: u64,
    pub(super) segments: Vec<StepSegment>,
}

/// Fills with NaN, in all layers, the rows that will be stored.
pub(super) fn poison(pool: &KvBinding, stores: &[StepSegment]) {
    for segment in stores {
        for run in pool.runs(&segment.blocks, segment.position..segment.end()) {
            for layer in 0..pool.layers() {
                for plane in pool.planes() {
                    let bytes = vec![NAN_BYTE; run.tokens * pool.token_stride(plane)];
                    pool.memory.copy_in(pool.offset(layer, plane, run.block, run.token), &bytes);
                }
            }
        }
    }
}

/// Whether a pending read covers a token that will be stored: its block was freed and reallocated.
pub(super) fn still_read(pool: &KvBinding, stores: &[StepSegment], reads: &[PendingRead]) -> bool {
    let mut stored: HashMap<BlockId, Range<usize>> = HashMap::new();
    for s in stores {
        for run in pool.runs(&s.blocks, s.position..s.end()) {
            stored.insert(run.block, run.token..run.token + run.tokens);
        }
    }
    reads.iter().flat_map(|read| &read.segments).any(|s| {
        let first = pool.kind().live(s.position..s.end(), pool.block_tokens()).start * pool.block_tokens();
        let mut read = pool.runs(&s.blocks, first..s.end());
        read.any(|run| stored.get(&run.block).is_some_and(|t| t.start < run.tokens))
    })
}
