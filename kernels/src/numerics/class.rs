//! The arithmetics that backends compute, see `docs/numerics.md`.

use super::{Half, TensorCore};
use baton_types::{Dtype, WeightFormat};
use std::fmt;

/// A written order of arithmetic. It decides bits; the instruction set, the vector width and the number of threads do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// f32 activations, products summed by FMA in ascending order.
    F32Fma {
        /// Element type to which matrices are rounded at load.
        weights: Dtype,
    },
    /// bf16 activations and weights, even and odd chains over groups of 32.
    Bf16x32,
    /// int8 activations with a scale for each 32, weights as they are stored.
    I8x32,
    /// The dot product of tensor cores.
    TensorCore {
        /// Whose arithmetic.
        cores: TensorCore,
        /// Format of matrices, of their inputs and of KV.
        half: Half,
    },
}

impl Default for Numerics {
    fn default() -> Self {
        Self::F32Fma { weights: Dtype::Bf16 }
    }
}

impl Numerics {
    /// Name of the order, see [`baton_types::NumericsClass`].
    pub const fn name(self) -> &'static str {
        match self {
            Self::F32Fma { .. } => "f32fma",
            Self::Bf16x32 => "bf16x32",
            Self::I8x32 => "i8x32",
            Self::TensorCore { cores, .. } => cores.name(),
        }
    }

    /// Format in which weights enter the GEMMs.
    pub const fn weights(self) -> WeightFormat {
        match self {
            Self::F32Fma { weights } => WeightFormat::Elements(weights),
            Self::Bf16x32 => WeightFormat::Elements(Dtype::Bf16),
            Self::I8x32 => WeightFormat::Stored,
            Self::TensorCore { half, .. } => WeightFormat::Elements(half.dtype()),
        }
    }

    /// The element type of KV that it attends to; `None`: any.
    pub const fn kv(self) -> Option<Dtype> {
        match self {
            Self::F32Fma { .. } => None,
            Self::Bf16x32 | Self::I8x32 => Some(Dtype::Bf16),
            Self::TensorCore { half, .. } => Some(half.dtype()),
        }
    }

    /// Rounds outputs of a product that are not added to the residual stream, bias included. Logits stay as they are.
    pub fn round_products(self, outputs: &mut [f32]) {
        if let Self::TensorCore { half, .. } = self {
            outputs.iter_mut().for_each(|x| *x = half.round(*x));
        }
    }
}

impl fmt::Display for Numerics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
