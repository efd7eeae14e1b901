//! Keys and values of one block of tokens.

use super::super::step::LANES;
use super::Task;
use crate::host::KvStep;
use crate::numerics::{ATTENTION_BLOCK, TensorCore};
use std::ops::Range;

/// One KV head of a block, as panels.
pub(super) struct Block {
    dim: usize,
    value_dim: usize,
    /// Elements of a key, padded to whole groups.
    depth: usize,
    /// `[panel of tokens][element][token]`
    keys: Vec<[u16; LANES]>,
    /// `[panel of elements][token][element]`
    values: Vec<[u16; LANES]>,
    bytes: Vec<u8>,
}

impl Block {
    /// Of heads with keys and values of so many elements.
    pub(super) fn new(dim: usize, value_dim: usize, cores: TensorCore) -> Self {
        let depth = dim.next_multiple_of(cores.group());
        let keys = vec![[0; LANES]; ATTENTION_BLOCK / LANES * depth];
        let values = vec![[0; LANES]; value_dim.div_ceil(LANES) * ATTENTION_BLOCK];
        Self { dim, value_dim, depth, keys, values, bytes: vec![0; dim * 2] }
    }

    /// Reads the tokens of a block that are `known` too. All others are zeros, whatever memory has.
    pub(super) fn load(&mut self, step: KvStep<'_>, task: &Task<'_>, block: Range<usize>, known: Range<usize>) {
        let pool = step.kv;
        let [k, v] = pool.planes();
        if known.start > block.start || known.end < block.end {
            self.keys.fill([0; LANES]);
            self.values.fill([0; LANES]);
        }
        let tokens = known.start.max(block.start)..known.end.min(block.end);
        let mut place = tokens.start - block.start;
        for run in pool.runs(&task.segment.table, tokens) {
            for token in run.token..run.token + run.tokens {
                let at = |plane| pool.offset(step.layer, plane, run.block, token) + task.head * self.dim * 2;
                pool.memory.copy_out(at(k), &mut self.bytes);
                let panel = &mut self.keys[place / LANES * self.depth..][..self.dim];
                for (lanes, element) in panel.iter_mut().zip(self.bytes.as_chunks().0) {
                    lanes[place % LANES] = u16::from_le_bytes(*element);
                }
                pool.memory.copy_out(at(v), &mut self.bytes);
                for (index, bytes) in self.bytes[..self.value_dim * 2].chunks(LANES * 2).enumerate() {
                    let lanes = &mut self.values[index * ATTENTION_BLOCK + place];
                    for (lane, element) in lanes.iter_mut().zip(bytes.as_chunks().0) {
                        *lane = u16::from_le_bytes(*element);
                    }
                }
                place += 1;
            }
        }
    }

    /// Panels of sixteen tokens.
    pub(super) fn keys(&self) -> impl Iterator<Item = &[[u16; LANES]]> {
        self.keys.chunks_exact(self.depth)
    }

    /// Panels of sixteen elements.
    pub(super) fn values(&self) -> impl Iterator<Item = &[[u16; LANES]]> {
        self.values.chunks_exact(ATTENTION_BLOCK)
    }
}
