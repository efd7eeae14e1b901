//! GEMV: up to four rows times panels, as one sequential stream of weights at the rate of memory.

use super::gemm::{Ahead, Epilogue, Total};
use super::pack::{PANEL, Rows, Weights};
use super::tile::{self, Tile};
use super::words::{at_once, parts, with_words};
use std::ops::Range;

/// Most rows of [`gemv`].
pub(super) const GEMV_ROWS_MAX: usize = 4;

/// [`super::gemm::gemm`] for up to [`GEMV_ROWS_MAX`] rows, with the same bits.
///
/// # Panics
/// As [`super::gemm::gemm`], and with more rows.
pub(super) fn gemv(x: &Rows, w: &Weights, panels: Range<usize>, epilogue: &mut impl Epilogue) {
    assert!(x.k() == w.k() && panels.end <= w.panels() && x.level().available() && w.suit(x.level()));
    assert!(x.m() <= GEMV_ROWS_MAX && x.height() >= x.m(), "{} rows", x.m());
    if x.m() == 0 || w.groups() == 0 {
        return;
    }
    let mut totals = [Total([0.0; PANEL]); GEMV_ROWS_MAX];
    for panel in panels {
        (0..x.m()).for_each(|row| epilogue.expect(row, panel));
        for groups in parts(w.groups(), at_once(w, w.groups())) {
            with_words(x.level(), w, panel, groups.clone(), |words| {
                let ahead = Ahead::of_stream(w, words, x.m());
                let tile = Tile {
                    x: x.block(0, groups.start).as_ptr(),
                    w: words.as_ptr(),
                    blocks: 1,
                    skip: 0,
                    groups: groups.len(),
                    sums: totals.as_mut_ptr().cast(),
                    sums_stride: size_of::<Total>(),
                    from_zero: groups.start == 0,
                    ahead: ahead.at,
                    ahead_stride: ahead.stride,
                };
                // SAFETY: the operands hold these groups and rows by their slices; the instructions were checked.
                unsafe { tile::run(x.level(), x.m(), tile) };
            });
        }
        for (row, total) in totals.iter().enumerate().take(x.m()) {
            epilogue.put(row, panel, &total.0);
        }
    }
}
