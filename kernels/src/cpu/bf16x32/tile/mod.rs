//! The arithmetic of one tile: some rows times one panel, over some groups of K.
//!
//! TDPBF16PS takes a group of 16 rows and 16 features by one instruction. VDPBF16PS tiles keep both chains and the totals of 5 rows x 2 vectors in 30 registers. The others go through each group twice, first for
//! the even chains and then for the odd ones, so that only one chain of every output lives in registers; even sums and totals wait in the
//! first-level cache.

#[cfg(target_arch = "x86_64")]
mod amx;
mod amx_scalar;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
#[cfg(target_arch = "x86_64")]
mod avx512_bf16;
mod portable;

use super::level::{has_tiles, pair_words, tile_rows};
use super::pack::{GROUP_WORDS, PAIRS, PANEL};
use crate::cpu::SimdLevel;
#[cfg(target_arch = "x86_64")]
use crate::cpu::flush::MXCSR_FLUSHED;

/// Most rows of a tile that keeps even sums in memory.
const ROWS_MAX: usize = 12;

/// Running totals of some rows of one panel.
pub(crate) type Sums = [f32; PANEL];

/// Operands of one tile.
#[derive(Clone, Copy)]
pub(crate) struct Tile {
    /// `blocks` times `[groups, 16, rows]` pairs, or `[groups, rows, 16]` for TDPBF16PS, see [`super::pack::Rows`].
    pub(crate) x: *const u32,
    /// At least one.
    pub(crate) blocks: usize,
    /// Bytes of x between the end of one block's groups and the next block's.
    pub(crate) skip: usize,
    /// `[groups, 16, PANEL]` pair words, aligned to 64 bytes.
    pub(crate) w: *const u32,
    /// At least one.
    pub(crate) groups: usize,
    /// `[blocks, rows]` totals that the groups are added to, aligned to 64 bytes but for AMX.
    pub(crate) sums: *mut Sums,
    /// Bytes from one row of totals to the next. Only AMX and its scalar form take others than those of [`Sums`].
    pub(crate) sums_stride: usize,
    /// Whether they start at zero, whatever they are.
    pub(crate) from_zero: bool,
    /// Where to prefetch later weights; any address.
    pub(crate) ahead: *const u32,
    /// Bytes from one prefetch to the next; there is one for each 64 bytes of w in each block.
    pub(crate) ahead_stride: usize,
}

impl Tile {
    /// One of the blocks, of `rows` rows.
    fn block(&self, level: SimdLevel, rows: usize, block: usize) -> Self {
        let block_bytes = self.groups * PAIRS * rows * pair_words(level) * size_of::<u32>() + self.skip;
        Self {
            x: self.x.wrapping_byte_add(block * block_bytes),
            sums: self.sums.wrapping_byte_add(block * rows * self.sums_stride),
            ahead: self.ahead.wrapping_byte_add(block * self.groups * (GROUP_WORDS / 16) * self.ahead_stride),
            blocks: 1,
            ..*self
        }
    }
}

/// Adds `tile.groups` groups to the totals of `tile.blocks` blocks of `rows` rows.
///
/// # Safety
/// The processor has the instructions of `level`; `rows` is 1 to [`tile_rows`]; the pointers of `tile` are valid for their shapes, x is
/// packed for `level`, and nothing else uses the totals.
pub(crate) unsafe fn run(level: SimdLevel, rows: usize, tile: Tile) {
    debug_assert!((1..=tile_rows(level)).contains(&rows) && tile.groups > 0 && tile.blocks > 0);
    #[cfg(target_arch = "x86_64")]
    if level == SimdLevel::Amx {
        // SAFETY: the caller's promise.
        return unsafe { amx::tile(rows, tile) };
    }
    debug_assert!(has_tiles(level) || tile.sums_stride == size_of::<Sums>());
    if tile.from_zero {
        for row in 0..tile.blocks * rows {
            // SAFETY: the caller's promise.
            unsafe { tile.sums.byte_add(row * tile.sums_stride).cast::<u8>().write_bytes(0, size_of::<Sums>()) };
        }
    }
    #[cfg(target_arch = "x86_64")]
    match level {
        // SAFETY: as above.
        SimdLevel::Avx512Bf16 => return unsafe { avx512_bf16::TILES[rows - 1](tile) },
        // SAFETY: as above.
        SimdLevel::Avx2Fma => return unsafe { avx2::TILES[rows - 1](tile) },
        _ => {}
    }
    for block in 0..tile.blocks {
        let tile = tile.block(level, rows, block);
        // SAFETY: the caller's promise, for one of the blocks.
        unsafe {
            match level {
                #[cfg(target_arch = "x86_64")]
                SimdLevel::Avx512 | SimdLevel::Avx512Vnni => avx512::TILES[rows - 1](tile),
                SimdLevel::AmxScalar => amx_scalar::tile(rows, tile),
                _ => portable::tile(rows, tile),
            }
        }
    }
}

/// [`MXCSR_FLUSHED`], and room for the caller's value.
#[cfg(target_arch = "x86_64")]
#[repr(C)]
struct Mxcsr {
    old: u32,
    class: u32,
}

#[cfg(target_arch = "x86_64")]
impl Mxcsr {
    const fn new() -> Self {
        Self { old: 0, class: MXCSR_FLUSHED }
    }
}

/// Sums of the even chains, while the odd chains are computed.
#[cfg(target_arch = "x86_64")]
#[repr(C, align(64))]
struct Even([std::mem::MaybeUninit<Sums>; ROWS_MAX]);

#[cfg(target_arch = "x86_64")]
impl Even {
    const fn new() -> Self {
        Self([std::mem::MaybeUninit::uninit(); ROWS_MAX])
    }
}
