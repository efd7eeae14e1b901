//! The tiles of [`super::amx`] over a scalar TDPBF16PS, so that their packing and shapes are tested on any processor.

use super::Tile;
use crate::cpu::bf16x32::pack::{PAIRS, PANEL};
use crate::numerics::flushed::{add, fma};
use half::bf16;

/// TDPBF16PS for one row and one feature, whose words are [`PAIRS`] of `a` and of `b`: Intel's manual, volume 2.
fn tdpbf16ps(c: f32, a: &[u32], b: impl Iterator<Item = u32>) -> f32 {
    let [low, high] = [|word: u32| bf16::from_bits(word as u16), |word: u32| bf16::from_bits((word >> 16) as u16)];
    let (mut even, mut odd) = (0.0, 0.0);
    for (&a, b) in a.iter().zip(b) {
        even = fma(low(a), low(b), even);
        odd = fma(high(a), high(b), odd);
    }
    add(c, add(even, odd))
}

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn tile(rows: usize, tile: Tile) {
    // SAFETY: the caller's promise about shapes.
    let (x, w, sums) = unsafe {
        (
            std::slice::from_raw_parts(tile.x, tile.groups * rows * PAIRS),
            std::slice::from_raw_parts(tile.w, tile.groups * PAIRS * PANEL),
            std::slice::from_raw_parts_mut(tile.sums, rows),
        )
    };
    for (x, w) in x.chunks_exact(rows * PAIRS).zip(w.chunks_exact(PAIRS * PANEL)) {
        for (x, sums) in x.chunks_exact(PAIRS).zip(sums.iter_mut()) {
            for (feature, sum) in sums.iter_mut().enumerate() {
                *sum = tdpbf16ps(*sum, x, w[feature..].iter().step_by(PANEL).copied());
            }
        }
    }
}
