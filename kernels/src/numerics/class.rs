//! The arithmetics that backends compute.

use baton_types::Dtype;

/// A written order of arithmetic. It decides bits; the instruction set, the vector width and the number of threads do not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Numerics {
    /// f32 activations, products summed by FMA in ascending order; see the [crate].
    F32Fma {
        /// Format to which matrices are rounded at load.
        weights: Dtype,
    },
}

impl Default for Numerics {
    fn default() -> Self {
        Self::F32Fma { weights: Dtype::Bf16 }
    }
}

impl Numerics {
    /// Name of the order, see [`baton_types::NumericsClass`].
    pub fn name(self) -> &'static str {
        match self {
            Self::F32Fma { .. } => "cpu-f32fma",
        }
    }

    /// Format in which weights enter the GEMMs.
    pub fn weights(self) -> Dtype {
        match self {
            Self::F32Fma { weights } => weights,
        }
    }
}
