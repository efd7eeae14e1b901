//! Low-rank adapters: changes of a model's linears that some rows of a step use and others do not.
//!
//! Where a linear computes `y = W x`, a row with an adapter gets `y + scale * B (A x)`, in the order of `docs/numerics.md`. Rows without one
//! have the bits that they have on a device without adapters.

mod packed;

pub(crate) use packed::LowRank;
pub use packed::PackedAdapter;

use crate::device::DeviceError;
use crate::program::{Op, Program};
use baton_types::Digest;

/// A linear of a layer.
#[allow(missing_docs, reason = "the names of variants say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Linear {
    Query,
    Key,
    Value,
    /// Output of attention.
    Out,
    Gate,
    Up,
    Down,
}

impl Linear {
    /// Every linear of a layer.
    pub const ALL: [Self; 7] = [Self::Query, Self::Key, Self::Value, Self::Out, Self::Gate, Self::Up, Self::Down];
}

/// The change of one linear.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterLinear {
    /// Layer of the program.
    pub layer: u32,
    /// The linear that it changes.
    pub linear: Linear,
    /// `[rank, k]`
    pub a: Vec<f32>,
    /// `[n, rank]`
    pub b: Vec<f32>,
    /// Factor of the change.
    pub scale: f32,
}

/// An adapter: each linear of each layer is changed at most once.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Adapter {
    /// Rows of every `a`.
    pub rank: usize,
    /// The changes, in any order.
    pub linears: Vec<AdapterLinear>,
}

/// Bounds of a program's adapters, which a device may reserve memory for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdapterBounds {
    /// Slots: most adapters that are loaded at once; 0 for none.
    pub slots_max: usize,
    /// Largest rank, at most [`AdapterBounds::RANK_MAX`].
    pub rank_max: usize,
}

impl AdapterBounds {
    /// Largest rank of any adapter; published ones have at most this.
    pub const RANK_MAX: usize = 256;

    /// Checks the bounds.
    pub(crate) fn check(self) -> Result<(), DeviceError> {
        let Self { slots_max, rank_max } = self;
        if slots_max == 0 || (1..=Self::RANK_MAX).contains(&rank_max) {
            return Ok(());
        }
        let message = format!("adapters of rank {rank_max}; 1 to {} are possible", Self::RANK_MAX);
        Err(DeviceError::Shape { op: "compile", message })
    }
}

impl Program {
    /// Shape `[n, k]` of a linear.
    fn linear(&self, layer: u32, linear: Linear) -> Option<[usize; 2]> {
        let of_layer = self.ops.iter().skip_while(|op| op.stores() != Some(layer));
        of_layer.take_while(|op| op.stores().is_none_or(|other| other == layer)).find_map(|op| match (op, linear) {
            (Op::Qkv(op), Linear::Query) => Some([op.heads * op.head_dim, op.weight.k]),
            (Op::Qkv(op), Linear::Key | Linear::Value) => Some([op.kv_heads * op.head_dim, op.weight.k]),
            (Op::Out(op), Linear::Out) | (Op::Down(op), Linear::Down) => Some([op.weight.n, op.weight.k]),
            (Op::GateUp(op), Linear::Gate | Linear::Up) => Some([op.weight.n / 2, op.weight.k]),
            _ => None,
        })
    }
}

impl Adapter {
    /// The adapter in the kernels' order.
    ///
    /// # Errors
    /// If the rank is 0 or over [`AdapterBounds::RANK_MAX`], the elements are of another rank or not finite, or a linear is changed twice.
    pub fn pack(&self) -> Result<PackedAdapter, DeviceError> {
        PackedAdapter::try_new(self)
    }

    /// Names everything that decides what it computes: KV that was computed with it is of use only to rows with an adapter of the same digest.
    pub fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"baton.adapter.v1\0").update(&(self.rank as u64).to_le_bytes());
        for AdapterLinear { layer, linear, a, b, scale } in &self.linears {
            hasher.update(&layer.to_le_bytes()).update(&[*linear as u8]).update(&scale.to_le_bytes());
            for matrix in [a, b] {
                hasher.update(&(matrix.len() as u64).to_le_bytes());
                matrix.iter().for_each(|x| _ = hasher.update(&x.to_le_bytes()));
            }
        }
        Digest(*hasher.finalize().as_bytes())
    }
}
