//! A KV pool of the host as addressed by kernels: planes `k` and `v` of group 0.

use crate::device::{Bounds, DeviceError};
use crate::program::Program;
use crate::step::StepLimits;
use baton_memory::{HostPool, PoolMemory};
use baton_types::{BlockId, Dtype, GroupKind, KvPoolMap};
use std::ops::Range;
use std::sync::Arc;

/// Contiguous tokens within one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) block: BlockId,
    /// First token, counted within the block.
    pub(crate) token: usize,
    pub(crate) tokens: usize,
}

/// A pool and its map, checked to match.
#[derive(Clone, Debug)]
pub struct KvBinding {
    pub(crate) memory: Arc<HostPool>,
    pub(crate) map: KvPoolMap,
    k: usize,
    v: usize,
}

impl KvBinding {
    /// Checks that `memory` is of the host, that `map` fits it, and that it has what attention needs: one group, full or with a window, whose
    /// planes `k` and `v` have equal heads and dim.
    pub fn try_new(memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<Self, DeviceError> {
        let refuse = |message: String| Err(DeviceError::Shape { op: "bind", message });
        let Some(memory) = HostPool::of(&memory) else { return Err(DeviceError::PoolOutOfReach(memory.kind())) };
        if memory.bytes() < map.bytes() {
            return refuse(format!("the pool has {} bytes, its layout needs {}", memory.bytes(), map.bytes()));
        }
        let [group] = map.layout().groups() else {
            return refuse(format!("{} groups, one is implemented", map.layout().groups().len()));
        };
        if !matches!(group.kind, GroupKind::Full | GroupKind::Window(_)) {
            return refuse(format!(
                "a group of kind {:?}: only attention over keys and values is implemented",
                group.kind
            ));
        }
        let plane = |name| group.planes.iter().position(|p| p.name() == name);
        let (Some(k), Some(v)) = (plane("k"), plane("v")) else {
            return refuse("group 0 needs planes k and v".into());
        };
        let shape = |p: usize| (group.planes[p].heads(), group.planes[p].dim());
        if shape(k) != shape(v) {
            return refuse(format!("k is {:?} [heads, dim] but v is {:?}", shape(k), shape(v)));
        }
        Ok(Self { memory, map: map.clone(), k, v })
    }

    /// Number of KV heads.
    pub fn heads(&self) -> usize {
        self.map.layout().groups()[0].planes[self.k].heads() as usize
    }

    /// Elements of one head's key or value.
    pub fn dim(&self) -> usize {
        self.map.layout().groups()[0].planes[self.k].dim() as usize
    }

    /// Which positions its blocks keep.
    pub(crate) fn kind(&self) -> GroupKind {
        self.map.layout().groups()[0].kind
    }

    /// Layers of group 0.
    pub fn layers(&self) -> usize {
        self.map.layout().groups()[0].layers.len()
    }

    /// What bounds a step of `program` on this pool.
    pub(crate) fn limits(&self, program: &Program, bounds: Bounds, vocab: usize) -> StepLimits {
        let (layers, block_tokens, blocks) = (program.layers(), self.block_tokens(), self.map.blocks(0));
        StepLimits { bounds, vocab, layers, block_tokens, blocks, kind: self.kind() }
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.map.layout().block_tokens() as usize
    }

    /// Planes k and v as [`KvBinding::offset`] takes them.
    pub(crate) fn planes(&self) -> [usize; 2] {
        [self.k, self.v]
    }

    pub(crate) fn dtype(&self, plane: usize) -> Dtype {
        self.map.layout().groups()[0].planes[plane].dtype()
    }

    /// Bytes from one token to the next within a block's plane.
    pub(crate) fn token_stride(&self, plane: usize) -> usize {
        self.map.layout().groups()[0].planes[plane].token_stride()
    }

    /// Byte offset of head 0 of a token; head `h` follows at `h * dim` elements.
    pub(crate) fn offset(&self, layer: usize, plane: usize, block: BlockId, token: usize) -> usize {
        self.map.plane_offset(0, layer, block, plane) + token * self.token_stride(plane)
    }

    /// Divides `tokens` of a sequence at block boundaries.
    pub(crate) fn runs<'a>(&self, blocks: &'a [BlockId], tokens: Range<usize>) -> impl Iterator<Item = Run> + use<'a> {
        let size = self.block_tokens();
        let mut at = tokens.start;
        std::iter::from_fn(move || {
            (at < tokens.end).then(|| {
                let run =
                    Run { block: blocks[at / size], token: at % size, tokens: (size - at % size).min(tokens.end - at) };
                at += run.tokens;
                run
            })
        })
    }

    /// Copies the first `tokens` tokens of a block to another one.
    pub(crate) fn copy(&self, from: BlockId, to: BlockId, tokens: usize) {
        for layer in 0..self.layers() {
            for plane in self.planes() {
                let mut rows = vec![0; tokens * self.token_stride(plane)];
                self.memory.copy_out(self.offset(layer, plane, from, 0), &mut rows);
                self.memory.copy_in(self.offset(layer, plane, to, 0), &rows);
            }
        }
    }
}
