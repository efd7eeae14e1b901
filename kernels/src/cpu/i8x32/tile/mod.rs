//! The arithmetic of one tile: some rows times one panel, over some blocks of K.

#[cfg(target_arch = "x86_64")]
pub(super) mod amx;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use super::PANEL;
use super::level::Level;
use super::quantize::{ROWS_MAX, Record};
use crate::cpu::stored::{Format, Layout};
use std::ops::Range;

/// Sums of one row and the features of a panel.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sums(pub(crate) [f32; PANEL]);

/// Sums of a tile.
pub(crate) type TileSums = [Sums; ROWS_MAX];

/// Operands of one tile.
#[derive(Debug)]
pub(crate) struct Tile<'a> {
    /// `[k / 32, rows]` records.
    pub(crate) x: &'a [Record],
    /// A panel's bytes.
    pub(crate) w: &'a [u8],
    /// Blocks of K to sum.
    pub(crate) blocks: Range<usize>,
    /// Bytes after each weight to prefetch; 0 for nothing.
    pub(crate) ahead: usize,
}

/// Where a block of a panel is.
#[cfg(target_arch = "x86_64")]
struct Place {
    group: *const u8,
    /// Its number in the group.
    sub: usize,
    block: *const u8,
}

#[cfg(target_arch = "x86_64")]
impl Tile<'_> {
    /// # Safety
    /// `w` holds the block, stored in the format `F`.
    #[inline(always)]
    unsafe fn place<F: Stored>(&self, block: usize) -> Place {
        let layout = const { Layout::of(F::FORMAT) };
        let sub = block % layout.blocks;
        // SAFETY: the caller's promise.
        unsafe {
            let group = self.w.as_ptr().add(block / layout.blocks * layout.group());
            Place { group, sub, block: group.add(layout.header + sub * layout.block) }
        }
    }

    /// Prefetches later weights: lines without a gap, one block's share of its group after the other. Gaps would mislead the hardware.
    #[inline(always)]
    fn prefetch<F: Stored>(&self, place: &Place) {
        use std::arch::x86_64::{_MM_HINT_T1, _mm_prefetch};
        if self.ahead == 0 {
            return;
        }
        let lines = const { Layout::of(F::FORMAT).lines() };
        for line in place.sub * lines..(place.sub + 1) * lines {
            // SAFETY: prefetching any address is harmless.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(place.group.wrapping_add(self.ahead + line * 64).cast()) };
        }
    }
}

/// A stored format as a type.
trait Stored {
    const FORMAT: Format;
}

macro_rules! stored {
    ($($name:ident)*) => {$(
        struct $name;
        impl Stored for $name {
            const FORMAT: Format = Format::$name;
        }
    )*};
}

stored!(Q4_0 Q4_1 Q8_0 Q4K Q5K Q6K);

/// One tile for some number of rows.
type Run = unsafe fn(&Tile<'_>, &mut TileSums);

/// Sets the first `rows` sums to the sum over the tile's blocks, from +0.
///
/// # Panics
/// If the level is not available, `rows` is not 1 to 16, or x or w do not hold the blocks.
pub(crate) fn run(level: Level, format: Format, rows: usize, tile: &Tile<'_>, sums: &mut TileSums) {
    let layout = Layout::of(format);
    assert!((1..=ROWS_MAX).contains(&rows) && tile.x.len() >= tile.blocks.end * rows);
    assert!(tile.w.len() >= tile.blocks.end.div_ceil(layout.blocks) * layout.group());
    match level {
        #[cfg(target_arch = "x86_64")]
        Level::Avx512Vnni | Level::Amx | Level::AmxScalar => {
            // SAFETY: x and w hold the blocks, as checked; nothing makes this level where it is not available.
            unsafe { avx512::TILES[format as usize][rows - 1](tile, sums) }
        }
        #[cfg(target_arch = "x86_64")]
        Level::Avx2 => {
            // SAFETY: as above.
            unsafe { avx2::TILES[format as usize](tile, rows, sums) }
        }
        _ => portable::tile(format, rows, tile, sums),
    }
}
