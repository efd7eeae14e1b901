//! What depends on the instruction set.

use crate::cpu::SimdLevel;

/// Most rows of one tile: as many as the registers hold, see [`super::tile`].
pub(super) const fn tile_rows(level: SimdLevel) -> usize {
    match level {
        SimdLevel::Amx | SimdLevel::AmxScalar => 32,
        SimdLevel::Avx512Bf16 => 5,
        SimdLevel::Avx512 | SimdLevel::Avx512Vnni => 12,
        SimdLevel::Avx2Fma => 5,
        SimdLevel::Portable => 4,
    }
}

/// 32-bit words of one packed pair of activations: two bf16, or two f32 for instructions that multiply f32.
pub(super) const fn pair_words(level: SimdLevel) -> usize {
    if matches!(level, SimdLevel::Avx512Bf16) || has_tiles(level) { 1 } else { 2 }
}

/// Whether operands are packed for TDPBF16PS: see [`super::pack`].
pub(super) const fn has_tiles(level: SimdLevel) -> bool {
    matches!(level, SimdLevel::Amx | SimdLevel::AmxScalar)
}
