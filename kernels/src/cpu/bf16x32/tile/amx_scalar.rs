//! The tiles of [`super::amx`] over a scalar TDPBF16PS, so that their packing and shapes are tested on any processor.

use super::Tile;
use crate::cpu::amx_scalar::tdpbf16ps;
use crate::cpu::bf16x32::pack::{PAIRS, PANEL};

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn tile(rows: usize, tile: Tile) {
    // SAFETY: the caller's promise about shapes.
    let (x, w) = unsafe {
        (
            std::slice::from_raw_parts(tile.x, tile.groups * rows * PAIRS),
            std::slice::from_raw_parts(tile.w, tile.groups * PAIRS * PANEL),
        )
    };
    for (x, w) in x.chunks_exact(rows * PAIRS).zip(w.chunks_exact(PAIRS * PANEL)) {
        for (row, x) in x.chunks_exact(PAIRS).enumerate() {
            for feature in 0..PANEL {
                // SAFETY: the caller's promise.
                let sum = unsafe { &mut *tile.sums.byte_add(row * tile.sums_stride).cast::<f32>().add(feature) };
                *sum = tdpbf16ps(*sum, x, w[feature..].iter().step_by(PANEL).copied());
            }
        }
    }
}
