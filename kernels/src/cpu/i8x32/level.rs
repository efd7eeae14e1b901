//! The instruction sets that compute the class.

use crate::cpu::SimdLevel;

/// Instructions of a kernel. The bits do not depend on them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Level {
    /// Plain Rust.
    Portable,
    /// AVX2, FMA and F16C.
    Avx2,
    /// VPDPBUSD on 512-bit vectors.
    Avx512Vnni,
    /// The same, and TDPBSSD where there are rows enough.
    Amx,
    /// The same over a scalar TDPBSSD.
    AmxScalar,
}

impl Level {
    /// The fastest that a level has.
    pub(crate) fn of(level: SimdLevel) -> Self {
        match level {
            SimdLevel::AmxScalar if SimdLevel::Avx512Vnni.available() => Self::AmxScalar,
            SimdLevel::AmxScalar | SimdLevel::Portable => Self::Portable,
            SimdLevel::Avx2Fma | SimdLevel::Avx512 => Self::Avx2,
            SimdLevel::Avx512Vnni | SimdLevel::Avx512Bf16 => Self::Avx512Vnni,
            SimdLevel::Amx => Self::Amx,
        }
    }

    /// Whether this processor has the instructions.
    pub(crate) fn available(self) -> bool {
        match self {
            Self::Portable => true,
            Self::Avx2 => SimdLevel::Avx2Fma.available(),
            Self::Avx512Vnni | Self::AmxScalar => SimdLevel::Avx512Vnni.available(),
            Self::Amx => SimdLevel::Amx.available(),
        }
    }
    /// Whether many rows are taken by tiles.
    pub(super) fn has_tiles(self) -> bool {
        matches!(self, Self::Amx | Self::AmxScalar)
    }
}
