//! Tiles in plain Rust, through [`crate::numerics::flushed`].

use super::Tile;
use crate::cpu::bf16x32::pack::{PAIRS, PANEL};
use crate::numerics::flushed::{add, fma};
use half::bf16;

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn tile(rows: usize, tile: Tile) {
    // SAFETY: the caller's promise about shapes; a wide pair of x is two f32.
    let (x, w, sums) = unsafe {
        (
            std::slice::from_raw_parts(tile.x.cast::<[f32; 2]>(), tile.groups * PAIRS * rows),
            std::slice::from_raw_parts(tile.w.cast::<[u32; PANEL]>(), tile.groups * PAIRS),
            std::slice::from_raw_parts_mut(tile.sums, rows),
        )
    };
    let weight = |word: u32| [bf16::from_bits((word >> 16) as u16), bf16::from_bits(word as u16)];
    for (x, w) in x.chunks_exact(PAIRS * rows).zip(w.chunks_exact(PAIRS)) {
        for (row, sums) in sums.iter_mut().enumerate() {
            for (feature, sum) in sums.iter_mut().enumerate() {
                let mut chains = [0.0; 2];
                for (pair, w) in w.iter().enumerate() {
                    let [first, second] = x[pair * rows + row].map(bf16::from_f32); // Exact: rounded before.
                    let [w0, w1] = weight(w[feature]);
                    let chain = &mut chains[pair % 2];
                    *chain = fma(second, w1, fma(first, w0, *chain));
                }
                *sum = add(*sum, add(chains[0], chains[1]));
            }
        }
    }
}
