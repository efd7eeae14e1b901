//! Sums of products by tiles of 16 queries, 16 lanes and a group. TDPBF16PS adds to the totals what a group yields in one chain of even and one of odd
//! elements, as the class demands; it neither reads nor writes MXCSR.
//!
//! It knows nothing of the ends of chains: see [`settle`].

mod amx;
mod amx_scalar;

use super::pack::{self, Place};
use super::{PANEL, PANEL_GROUP, Sums, Tile};
use crate::cpu::amx_scalar::tdpbf16ps;
use crate::cpu::flush::MXCSR_FLUSHED;
use crate::cpu::lines::Lines;
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;
use std::ops::Range;

/// Words of one query in one group: its elements in pairs of neighbours.
const QUERY_GROUP: usize = GROUP / 2;

/// Most queries of a tile: the rows of a register.
const QUERIES: usize = 16;

/// Most queries that take keys where they are: a quarter of a vector for each token.
const FEW: usize = 4;

/// By AMX.
pub(super) type Amx = ByTiles<amx::Registers>;

/// By scalar arithmetic, so that packing and shapes are tested where there is no AMX.
pub(super) type AmxScalar = ByTiles<amx_scalar::Scalar>;

/// What multiplies tiles.
#[allow(clippy::missing_safety_doc, reason = "as of `Sums`, for 1 to `QUERIES` queries")]
pub(super) trait Products: Default {
    /// `out = sums`.
    unsafe fn sums(&mut self, queries: usize, tile: Tile);
    /// The same with keys where they are, for up to [`FEW`] queries: the panels are [`Place`]s. Prefetches as the tile says.
    unsafe fn few_sums(&mut self, queries: usize, tile: Tile);
    /// `out = out + sums`.
    unsafe fn add_sums(&mut self, queries: usize, tile: Tile);
}

#[derive(Default)]
pub(super) struct ByTiles<P>(P);

impl<P: Products> Sums for ByTiles<P> {
    const TILES: bool = true;
    const QUERY_GROUP: usize = QUERY_GROUP;
    const QUERIES: usize = QUERIES;
    const FEW: usize = FEW;

    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            if tile.in_place {
                self.0.few_sums(queries, tile);
            } else {
                fetch(tile, 0..tile.next_rows);
                self.0.sums(queries, tile);
            }
        }
    }

    #[inline(always)]
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe {
            fetch(tile, 0..tile.next_rows);
            scale(tile, factors);
            let ends = seen.iter().any(|seen| seen.end < ATTENTION_BLOCK);
            let before = ends.then(|| Before::keep(seen.len(), tile));
            self.0.add_sums(seen.len(), tile);
            if let Some(before) = before {
                settle(seen, tile, before);
            }
        }
    }
}

/// Prefetches some rows of those that the tile has of the next block.
///
/// # Safety
/// `next` of the tile has the addresses of these rows.
#[inline(always)]
unsafe fn fetch(tile: Tile, rows: Range<usize>) {
    for row in rows {
        // SAFETY: the caller's promise.
        unsafe { pack::fetch(*tile.next.add(row), tile.lines * 64) };
    }
}

/// `out = out * factor` for each query, subnormals zero.
///
/// # Safety
/// The processor has AVX-512; `out` is valid for as many queries as `factors` has, at least one, and the panels of `tile`.
#[target_feature(enable = "avx512f")]
unsafe fn scale(tile: Tile, factors: &[f32]) {
    // Nothing in the output is subnormal, so that a product with 1 changes nothing; changing MXCSR takes 100 cycles.
    if factors.iter().all(|factor| *factor == 1.0) {
        return;
    }
    let mut mxcsr = [0, MXCSR_FLUSHED];
    // SAFETY: reads and writes the rows of the output; restores MXCSR.
    unsafe {
        asm!(
            "stmxcsr [{mxcsr}]",
            "ldmxcsr [{mxcsr} + 4]",
            "2:",
            "vbroadcastss {factor}, dword ptr [{factors}]",
            "mov {at}, {out}",
            "mov {left}, {vectors}",
            "3:",
            "vmulps {x}, {factor}, [{at}]",
            "vmovaps [{at}], {x}",
            "add {at}, 64",
            "dec {left}",
            "jnz 3b",
            "add {out}, {stride}",
            "add {factors}, 4",
            "dec {queries}",
            "jnz 2b",
            "ldmxcsr [{mxcsr}]",
            mxcsr = in(reg) mxcsr.as_mut_ptr(),
            factors = inout(reg) factors.as_ptr() => _,
            out = inout(reg) tile.out => _,
            stride = in(reg) tile.out_stride,
            vectors = in(reg) tile.count * (PANEL / 16),
            queries = inout(reg) factors.len() => _,
            at = out(reg) _,
            left = out(reg) _,
            factor = out(zmm_reg) _,
            x = out(zmm_reg) _,
            options(nostack),
        );
    }
}

thread_local! {
    static BEFORE: Cell<Lines> = const { Cell::new(Lines::new()) };
}

/// The output before sums are added to it, `[query][lanes]`.
struct Before(Lines);

impl Before {
    /// # Safety
    /// `out` of the tile is valid for so many queries and its panels.
    unsafe fn keep(queries: usize, tile: Tile) -> Self {
        let (mut lines, lanes) = (BEFORE.take(), tile.count * PANEL);
        let to = lines.room::<f32>(queries * lanes);
        for query in 0..queries {
            // SAFETY: the caller's promise, and room for all queries.
            unsafe {
                to.add(query * lanes).copy_from_nonoverlapping(tile.out.byte_add(query * tile.out_stride), lanes)
            };
        }
        Self(lines)
    }
}

impl Drop for Before {
    fn drop(&mut self) {
        BEFORE.set(std::mem::take(&mut self.0));
    }
}

/// Mends the sign of zeros of queries that do not attend to the last tokens of the block.
///
/// Behind its last token a chain has `+0` added (see [`crate::cpu::attention_splits::work::chain_ends`]). Tiles add a weight of `+0` times a value
/// that other queries attend to, which may be `-0` and leaves a chain of `-0` as it is. That changes a total only if it was `-0` before, and is then
/// `-0` still. Such totals, which hardly ever occur, are summed again with values of `+0`.
///
/// # Safety
/// The processor has AVX-512; the pointers are valid for as many queries as `seen` has; `before` was kept of this tile.
#[target_feature(enable = "avx512f,avx512dq")]
unsafe fn settle(seen: &[Range<usize>], tile: Tile, mut before: Before) {
    let lanes = tile.count * PANEL;
    let before = before.0.room::<f32>(seen.len() * lanes).cast_const();
    let minus_zero = _mm512_set1_epi32(i32::MIN);
    for (query, seen) in seen.iter().enumerate().filter(|(_, seen)| seen.end < ATTENTION_BLOCK) {
        // SAFETY: the caller's promise.
        let (out, x) =
            unsafe { (tile.out.byte_add(query * tile.out_stride), tile.queries.byte_add(query * tile.query_stride)) };
        for first in (0..lanes).step_by(16) {
            // SAFETY: as above.
            let mut zeros = unsafe { _mm512_cmpeq_epi32_mask(_mm512_loadu_si512(out.add(first).cast()), minus_zero) };
            while zeros != 0 {
                let lane = first + zeros.trailing_zeros() as usize;
                // SAFETY: as above.
                unsafe { *out.add(lane) = total(*before.add(query * lanes + lane), x, tile, lane, seen.end) };
                zeros &= zeros - 1;
            }
        }
    }
}

/// A lane's total of a block, with values of `+0` from token `end` on.
///
/// # Safety
/// `x` are the words of the query; panels and groups of the tile are readable.
unsafe fn total(before: f32, x: *const u32, tile: Tile, lane: usize, end: usize) -> f32 {
    let panel = tile.panels.wrapping_add(lane / PANEL * tile.groups * PANEL_GROUP + lane % PANEL);
    (0..tile.groups).fold(before, |total, group| {
        // SAFETY: the caller's promise.
        let x = unsafe { std::slice::from_raw_parts(x.add(group * QUERY_GROUP), QUERY_GROUP) };
        let words = (0..QUERY_GROUP).map(|pair| {
            // SAFETY: as above.
            let word = unsafe { *panel.add(group * PANEL_GROUP + pair * PANEL) };
            match end.saturating_sub(group * GROUP + 2 * pair) {
                0 => 0,
                1 => word & 0xffff,
                _ => word,
            }
        });
        tdpbf16ps(total, x, words)
    })
}
