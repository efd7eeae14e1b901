//! Poison for KV whose stores are enqueued but not done.

use crate::kv::{GroupLayout, PoolBinding};
use crate::step::StepSegment;
use baton_types::BlockId;
use std::collections::HashMap;
use std::ops::Range;

/// NaN in f32, f16 and bf16 alike when repeated.
const NAN_BYTE: u8 = 0xff;

/// An enqueued step that may still read its blocks.
pub(super) struct PendingRead {
    pub(super) job: u64,
    /// By group.
    pub(super) segments: Vec<Vec<StepSegment>>,
}

/// Fills with NaN, in all layers, the rows that will be stored, and the states that will be written to another block than they are read from; they
/// come by group.
pub(super) fn poison(pool: &PoolBinding, stores: &[Vec<StepSegment>]) {
    for (kv, segment) in pool.bindings().iter().zip(stores).flat_map(|(kv, of)| of.iter().map(move |s| (kv, s))) {
        for run in kv.overwrites(segment) {
            for layer in 0..kv.layers() {
                for plane in kv.distinct_planes() {
                    let bytes = vec![NAN_BYTE; run.tokens * kv.token_stride(plane)];
                    kv.memory.copy_in(kv.offset(layer, plane, run.block, run.token), &bytes);
                }
            }
        }
    }
}

/// Whether a pending read covers a token that will be stored: its block was freed and reallocated.
pub(super) fn still_read(pool: &PoolBinding, stores: &[Vec<StepSegment>], reads: &[PendingRead]) -> bool {
    let mut groups = pool.groups().iter().zip(stores).enumerate();
    groups.any(|(group, (kv, stores))| {
        let reads = reads.iter().filter_map(|read| read.segments.get(group)).flatten();
        is_read_of_group(kv, stores, reads)
    })
}

fn is_read_of_group<'a>(
    kv: &GroupLayout,
    stores: &[StepSegment],
    mut reads: impl Iterator<Item = &'a StepSegment>,
) -> bool {
    let mut stored: HashMap<BlockId, Range<usize>> = HashMap::new();
    for s in stores {
        for run in kv.overwrites(s) {
            stored.insert(run.block, run.token..run.token + run.tokens);
        }
    }
    reads.any(|s| kv.reads(s).iter().any(|run| stored.get(&run.block).is_some_and(|t| t.start < run.tokens)))
}
