//! The explicit layout of KV memory, so that a peer computes any (layer, block, plane, token, head) address.
//!
//! Memory order, outermost first: group, layer of the group, block, plane, token, head, element. A layer's run of
//! neighbouring blocks is therefore one contiguous range, and so is a run of tokens within one plane of one block,
//! whatever the block size: pools with different block sizes exchange runs of tokens.

use crate::{Attention, Dtype, LayerKv};
use serde::{Deserialize, Serialize};
use std::fmt;

/// Which part of the past a group of layers stores.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum GroupKind {
    /// All positions of the past.
    Full,
    /// The last `n` positions.
    Window(u32),
    /// One compressed latent per position (MLA).
    Latent,
    /// A recurrent state: a fixed number of bytes for each sequence, and as many for each checkpoint of it.
    State,
}

/// Blocks of each group that a worker keeps free at admission, so that running sequences can grow. A sequence that finds the whole pool
/// unused may take all of it. Routers use the same number when they look for room.
pub const WATERMARK_BLOCKS: u32 = 4;

/// One tensor of a block: `[block_tokens, heads, dim]` of `dtype`, dense.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvPlane {
    name: String,
    heads: u32,
    dim: u32,
    dtype: Dtype,
    token_stride: u32,
    head_stride: u32,
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl KvPlane {
    /// A dense plane of shape `[block_tokens, heads, dim]`.
    pub fn try_new(name: impl Into<String>, heads: u32, dim: u32, dtype: Dtype) -> Result<Self, LayoutError> {
        let name = name.into();
        if heads == 0 || dim == 0 || heads > LayoutError::HEADS_MAX || dim > LayoutError::DIM_MAX {
            return Err(LayoutError::Plane { name, heads, dim });
        }
        let head_stride = dim * dtype.bytes() as u32;
        Ok(Self { name, heads, dim, dtype, token_stride: heads * head_stride, head_stride })
    }

    /// Name, e.g. `k` or `v`.
    pub fn name(&self) -> &str {
        &self.name
    }
    pub fn heads(&self) -> u32 {
        self.heads
    }
    /// Elements of each head.
    pub fn dim(&self) -> u32 {
        self.dim
    }
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }
    /// Bytes from one token to the next.
    pub fn token_stride(&self) -> usize {
        self.token_stride as usize
    }
    /// Bytes from one head to the next.
    pub fn head_stride(&self) -> usize {
        self.head_stride as usize
    }
}

/// Layers that share a block table.
///
/// A block holds the KV of `block_tokens` positions. In a group of kind [`GroupKind::State`] it holds one state, whose planes are
/// `[heads, dim]`: the running state of a sequence, or a checkpoint.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct KvGroup {
    /// What the group keeps.
    pub kind: GroupKind,
    /// Indices of the model's layers, ascending.
    pub layers: Vec<u32>,
    /// Planes in memory order.
    pub planes: Vec<KvPlane>,
}

impl KvGroup {
    /// Bytes of one token in one layer, all planes; of one state in a group of that kind.
    pub fn token_bytes(&self) -> usize {
        self.planes.iter().map(KvPlane::token_stride).sum()
    }

    /// Rows of each plane of a block: `block_tokens`, or 1 in a group of states.
    pub fn block_rows(&self, block_tokens: u32) -> u32 {
        if self.kind == GroupKind::State { 1 } else { block_tokens }
    }

    /// Rows of each plane that so many neighbouring positions have: one each; of states one, that behind the last of them.
    pub fn rows(&self, positions: usize) -> usize {
        if self.kind == GroupKind::State { positions.min(1) } else { positions }
    }

    /// Bytes of one block in one layer, all planes.
    pub fn layer_block_bytes(&self, block_tokens: u32) -> usize {
        self.token_bytes() * self.block_rows(block_tokens) as usize
    }

    /// Bytes of one block in all layers.
    pub fn block_bytes(&self, block_tokens: u32) -> usize {
        self.layers.len() * self.layer_block_bytes(block_tokens)
    }
}

/// Shape of the KV of one model on one instance: block size and groups.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(try_from = "RawLayout", into = "RawLayout")]
pub struct KvLayout {
    block_tokens: u32,
    groups: Vec<KvGroup>,
}

#[derive(Clone, Serialize, Deserialize)]
struct RawLayout {
    block_tokens: u32,
    groups: Vec<KvGroup>,
}

impl TryFrom<RawLayout> for KvLayout {
    type Error = LayoutError;
    fn try_from(raw: RawLayout) -> Result<Self, LayoutError> {
        Self::try_new(raw.block_tokens, raw.groups)
    }
}

impl From<KvLayout> for RawLayout {
    fn from(layout: KvLayout) -> Self {
        Self { block_tokens: layout.block_tokens, groups: layout.groups }
    }
}

/// A layout that cannot exist.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum LayoutError {
    /// Block size outside 16..=128, or not a multiple of 16.
    #[error("block_tokens must be a multiple of 16 between 16 and 128, got {0}")]
    BlockTokens(u32),
    /// A plane without elements, or absurdly large.
    #[error("KV plane {name:?} cannot have {heads} heads of {dim}")]
    Plane {
        /// Name of the plane.
        name: String,
        heads: u32,
        /// Elements of each head.
        dim: u32,
    },
    /// No groups or too many, or a group without layers or planes or with repeated layers.
    #[error("KV groups need ascending layers, planes with distinct names, and 1 to 8 groups: {0}")]
    Groups(String),
    /// The pool would not fit in an address space, or has not one number of blocks, at least 1, for each group.
    #[error("a pool of {blocks:?} blocks is impossible, or overflows")]
    PoolSize {
        /// Blocks of each group.
        blocks: Vec<u32>,
    },
    /// A window of no tokens.
    #[error("group {group} has a window of 0 tokens; a token attends to itself at least")]
    Window {
        /// Index of the group.
        group: usize,
    },
}

impl LayoutError {
    /// Most heads of one plane; far above any published model.
    pub const HEADS_MAX: u32 = 1024;
    /// Largest head dimension; MLA latents are 576.
    pub const DIM_MAX: u32 = 16_384;
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl KvLayout {
    /// Granularity of checksums, prefix hashes and quantization groups: every block size is a multiple of it.
    pub const GRANULE_TOKENS: u32 = 16;
    /// Most groups.
    pub const GROUPS_MAX: usize = 8;
    /// Largest block size in tokens.
    pub const BLOCK_TOKENS_MAX: u32 = 128;

    /// Checks and builds a layout.
    pub fn try_new(block_tokens: u32, groups: Vec<KvGroup>) -> Result<Self, LayoutError> {
        if block_tokens == 0
            || block_tokens > Self::BLOCK_TOKENS_MAX
            || !block_tokens.is_multiple_of(Self::GRANULE_TOKENS)
        {
            return Err(LayoutError::BlockTokens(block_tokens));
        }
        if groups.is_empty() || groups.len() > Self::GROUPS_MAX {
            return Err(LayoutError::Groups(format!("{} groups", groups.len())));
        }
        let mut seen = std::collections::BTreeSet::new();
        for (g, group) in groups.iter().enumerate() {
            if group.layers.is_empty() || group.planes.is_empty() || group.planes.len() > 8 {
                return Err(LayoutError::Groups(format!("group {g} has no layers, or not 1 to 8 planes")));
            }
            if group.kind == GroupKind::Window(0) {
                return Err(LayoutError::Window { group: g });
            }
            if !group.layers.is_sorted() || group.layers.iter().any(|&l| l > 4096 || !seen.insert(l)) {
                return Err(LayoutError::Groups(format!("group {g} repeats a layer or is not sorted")));
            }
            for (i, plane) in group.planes.iter().enumerate() {
                let dense = KvPlane::try_new(plane.name.clone(), plane.heads, plane.dim, plane.dtype)?;
                if dense != *plane || group.planes[..i].iter().any(|p| p.name == plane.name) {
                    return Err(LayoutError::Groups(format!(
                        "plane {:?} of group {g} is not dense or repeats",
                        plane.name
                    )));
                }
            }
        }
        Ok(Self { block_tokens, groups })
    }

    /// The layout of a Llama-family decoder: one `full` group with planes `k` and `v`.
    pub fn llama(
        block_tokens: u32,
        layers: u32,
        kv_heads: u32,
        head_dim: u32,
        dtype: Dtype,
    ) -> Result<Self, LayoutError> {
        Attention::alike(layers, LayerKv::Heads { kv_heads, head_dim }, None).layout(block_tokens, dtype)
    }

    pub fn block_tokens(&self) -> u32 {
        self.block_tokens
    }

    pub fn groups(&self) -> &[KvGroup] {
        &self.groups
    }

    /// Bytes of one token over all layers that store one: `2 * layers * kv_heads * head_dim * bytes` for Llama. States are not counted.
    pub fn bytes_per_token(&self) -> usize {
        let by_position = self.groups.iter().filter(|g| g.kind != GroupKind::State);
        by_position.map(|g| g.layers.len() * g.token_bytes()).sum()
    }

    /// Bytes of one block of every group, all layers.
    pub fn bytes_per_block(&self) -> usize {
        self.groups.iter().map(|g| g.block_bytes(self.block_tokens)).sum()
    }

    /// Blocks of a full group that `tokens` positions need.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_tokens as usize)
    }
}

impl fmt::Display for KvLayout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} tokens/block", self.block_tokens)?;
        for group in &self.groups {
            write!(f, "; {:?} x {} layers", group.kind, group.layers.len())?;
            for p in &group.planes {
                write!(f, " {}[{}x{} {}]", p.name, p.heads, p.dim, p.dtype)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn llama_3_8b_has_128_kib_per_token() {
        let layout = KvLayout::llama(16, 32, 8, 128, Dtype::Bf16).unwrap();
        assert_eq!(layout.bytes_per_token(), 128 << 10);
    }

    #[test]
    fn impossible_layouts_are_refused() {
        for tokens in [0, 8, 24, 144] {
            assert_eq!(KvLayout::llama(tokens, 1, 1, 64, Dtype::Bf16), Err(LayoutError::BlockTokens(tokens)));
        }
        assert!(KvLayout::llama(16, 0, 1, 64, Dtype::Bf16).is_err());
        assert!(KvLayout::llama(16, 1, 0, 64, Dtype::Bf16).is_err());
        assert!(serde_json_like_roundtrip_refuses());
    }

    fn serde_json_like_roundtrip_refuses() -> bool {
        KvLayout::try_from(RawLayout { block_tokens: 7, groups: vec![] }).is_err()
    }
}
