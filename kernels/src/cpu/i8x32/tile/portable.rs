//! Tiles in scalar code.

use super::{Sums, Tile, TileSums};
use crate::cpu::i8x32::{BLOCK, PANEL};
use crate::cpu::stored::{Format, Kind, unpack};

/// As [`super::run`].
pub(super) fn tile(format: Format, rows: usize, tile: &Tile<'_>, sums: &mut TileSums) {
    sums[..rows].fill(Sums([0.0; PANEL]));
    for block in tile.blocks.clone() {
        let x = &tile.x[block * rows..(block + 1) * rows];
        for f in 0..PANEL {
            let w = unpack(format, tile.w, block, f);
            for (x, sums) in x.iter().zip(sums.iter_mut()) {
                let dot = |from: usize| -> i32 {
                    x.q[from..from + 16]
                        .iter()
                        .zip(&w.ints[from..from + 16])
                        .map(|(x, w)| i32::from(*x) * i32::from(*w))
                        .sum()
                };
                let correct = |half: usize| x.minus_8[half] * (format.offset() / 8);
                let [first, second] = [dot(0) + correct(0), dot(BLOCK / 2) + correct(1)];
                let all = (first + second) as f32;
                let term = match format.kind() {
                    Kind::One => w.scales[0] * all,
                    Kind::Min => w.scales[0].mul_add(all, w.min * x.sum),
                    Kind::Two => w.scales[1].mul_add(second as f32, w.scales[0] * first as f32),
                };
                sums.0[f] = x.d.mul_add(term, sums.0[f]);
            }
        }
    }
}
