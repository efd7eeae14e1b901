//! Tiles of TDPBSSD: 16 rows times a panel, all 32 k of a block at once, into i32.
//!
//! The sums of each block go through memory to vectors, which scale them. The loop is one over all blocks of all rows, so that the tile of one
//! block and the vectors of the block before it overlap at the ends of rows too.

mod scalar;
mod tdpbssd;

use super::avx512::{scales, words};
use super::{PANEL, Q4_0, Q4_1, Q4K, Q5K, Q6K, Q8_0, Stored, Sums, Tile, TileSums};
use crate::cpu::i8x32::gemm::Epilogue;
use crate::cpu::i8x32::level::Level;
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};
use crate::cpu::stored::{Format, Kind};
use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::{MaybeUninit, offset_of};

/// A block of a panel: signed integers in lines of 4 k of each feature, and the two scales of the features.
#[repr(C, align(64))]
pub(crate) struct Unpacked {
    words: [[i8; 64]; 8],
    scales: [Sums; 2],
}

/// Dots of one block: 16 rows of 16 features, of all its k, or of its first and of its second 16.
#[repr(C, align(64))]
struct Dots([[[i32; 16]; ROWS_MAX]; 2]);

/// What multiplies. It holds the sums of two blocks, in slots 0 and 1.
trait Product {
    /// Sets the sums of `SLOT` to the dots of 16 records with a block, of its halves if they are apart.
    ///
    /// # Safety
    /// `x` has 16 records, `w` a block. Halves are apart if this was made for that.
    unsafe fn multiply<const SLOT: usize, const HALVES: bool>(&mut self, x: *const Record, w: *const Unpacked);

    /// Stores the sums of `SLOT`.
    ///
    /// # Safety
    /// `to` is valid for writes. Halves are apart if this was made for that.
    unsafe fn store<const SLOT: usize, const HALVES: bool>(&mut self, to: *mut Dots);
}

/// Products of a kind of formats by tiles of this thread, which are released when this is dropped.
pub(crate) struct Tiles {
    kind: Kind,
    registers: Registers,
}

enum Registers {
    Amx(tdpbssd::Registers),
    Scalar(Box<scalar::Registers>),
}

impl Tiles {
    /// `None` if the level has no tiles.
    ///
    /// # Safety
    /// Nothing else on this thread uses tiles while this exists.
    pub(crate) unsafe fn new(level: Level, kind: Kind) -> Option<Self> {
        let registers = match level {
            // SAFETY: nothing makes this level where the processor does not have it; the caller's promise.
            Level::Amx => Registers::Amx(unsafe { tdpbssd::Registers::new(matches!(kind, Kind::Two)) }),
            Level::AmxScalar => Registers::Scalar(Box::default()),
            _ => return None,
        };
        Some(Self { kind, registers })
    }

    /// Products of blocks of 16 rows, whose records `[blocks, k / 32, 16]` follow one another, with a panel of this kind; `epilogue` takes
    /// the sums from a row and feature on.
    ///
    /// # Panics
    /// If the records are not whole blocks.
    pub(crate) fn run(&mut self, x: &[Record], w: &[Unpacked], at: (usize, usize), epilogue: &mut impl Epilogue) {
        assert!(!w.is_empty() && x.len().is_multiple_of(w.len() * ROWS_MAX));
        // SAFETY: as asserted; levels with tiles have AVX-512; the registers were made for this kind.
        unsafe {
            match &mut self.registers {
                Registers::Amx(registers) => run(registers, self.kind, x, w, at, epilogue),
                Registers::Scalar(registers) => run(&mut **registers, self.kind, x, w, at, epilogue),
            }
        }
    }
}

/// Unpacks a panel, block by block, to `to`.
///
/// # Safety
/// The processor has AVX-512; `tile` holds its blocks in this format, and `to` has room for them.
pub(crate) unsafe fn unpack(format: Format, tile: &Tile<'_>, to: *mut Unpacked) {
    // SAFETY: the caller's promise.
    unsafe {
        match format {
            Format::Q4_0 => unpack_as::<Q4_0>(tile, to),
            Format::Q4_1 => unpack_as::<Q4_1>(tile, to),
            Format::Q8_0 => unpack_as::<Q8_0>(tile, to),
            Format::Q4K => unpack_as::<Q4K>(tile, to),
            Format::Q5K => unpack_as::<Q5K>(tile, to),
            Format::Q6K => unpack_as::<Q6K>(tile, to),
        }
    }
}

/// # Safety
/// As [`unpack`].
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn unpack_as<F: Stored>(tile: &Tile<'_>, to: *mut Unpacked) {
    // What the format stores too much.
    let offset = match F::FORMAT {
        Format::Q4_0 => 8,
        Format::Q6K => 32,
        Format::Q8_0 => -128,
        Format::Q4_1 | Format::Q4K | Format::Q5K => 0,
    };
    for block in tile.blocks.clone() {
        // SAFETY: the caller's promise.
        unsafe {
            let (place, to) = (tile.place::<F>(block), to.add(block - tile.blocks.start));
            tile.prefetch::<F>(&place);
            for (v, words) in words::<F>(place.block).into_iter().enumerate() {
                let words = if offset == 0 { words } else { _mm512_sub_epi8(words, _mm512_set1_epi8(offset)) };
                _mm512_store_si512((&raw mut (*to).words[v]).cast(), words);
            }
            for (i, scale) in scales::<F>(place.group, place.sub).into_iter().enumerate() {
                _mm512_store_ps((&raw mut (*to).scales[i]).cast(), scale);
            }
        }
    }
}

const _: () = assert!(offset_of!(Record, d) == 32 && offset_of!(Record, sum) == 36 && size_of::<Record>() == 64);

/// Adds the dots of row `$r` of a block to its sums, as [`super::avx512`] does. In `asm!` for the same reason.
macro_rules! row {
    ($kind:expr, $r:literal, $x:expr, $dots:expr, $s:expr, $acc:expr) => {{
        // Scratch registers; their types make them zmm.
        let _a: __m512;
        let _t: __m512;
        match $kind {
            Kind::Min => asm!(
                "vcvtdq2ps {a}, [{dots} + 64 * {r}]",
                "vmulps {t}, {s1}, dword ptr [{x} + 64 * {r} + 36]{{1to16}}",
                "vfmadd213ps {a}, {s0}, {t}",
                "vfmadd231ps {acc}, {a}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, t = out(zmm_reg) _t, x = in(reg) $x, dots = in(reg) $dots, r = const $r,
                s0 = in(zmm_reg) $s[0], s1 = in(zmm_reg) $s[1], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
            Kind::One => asm!(
                "vcvtdq2ps {a}, [{dots} + 64 * {r}]",
                "vmulps {a}, {a}, {s0}",
                "vfmadd231ps {acc}, {a}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, x = in(reg) $x, dots = in(reg) $dots, r = const $r,
                s0 = in(zmm_reg) $s[0], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
            Kind::Two => asm!(
                "vcvtdq2ps {a}, [{dots} + 64 * {r}]",
                "vcvtdq2ps {t}, [{dots} + 64 * {r} + 1024]",
                "vmulps {a}, {a}, {s0}",
                "vfmadd213ps {t}, {s1}, {a}",
                "vfmadd231ps {acc}, {t}, dword ptr [{x} + 64 * {r} + 32]{{1to16}}",
                a = out(zmm_reg) _a, t = out(zmm_reg) _t, x = in(reg) $x, dots = in(reg) $dots, r = const $r,
                s0 = in(zmm_reg) $s[0], s1 = in(zmm_reg) $s[1], acc = inout(zmm_reg) $acc,
                options(pure, readonly, nostack, preserves_flags),
            ),
        }
    }};
}

/// Adds the dots of a block to the sums of rows `$r`.
macro_rules! rows {
    ($kind:expr, $x:expr, $dots:expr, $s:expr, $acc:expr, $($r:literal)*) => {
        $(row!($kind, $r, $x, $dots, $s, $acc[$r]);)*
    };
}

/// # Safety
/// As [`run_kind`].
unsafe fn run(
    product: &mut impl Product,
    kind: Kind,
    x: &[Record],
    w: &[Unpacked],
    at: (usize, usize),
    epilogue: &mut impl Epilogue,
) {
    // SAFETY: the caller's promise.
    unsafe {
        match kind {
            Kind::Min => run_kind::<Q4_1, false>(product, x, w, at, epilogue),
            Kind::One => run_kind::<Q8_0, false>(product, x, w, at, epilogue),
            Kind::Two => run_kind::<Q6K, true>(product, x, w, at, epilogue),
        }
    }
}

/// [`Tiles::run`] for all formats of the kind of `F`.
///
/// # Safety
/// The processor has AVX-512; x holds whole blocks of rows; the product was made for a kind with halves or without.
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
unsafe fn run_kind<F: Stored, const HALVES: bool>(
    product: &mut impl Product,
    x: &[Record],
    w: &[Unpacked],
    (first_row, feature): (usize, usize),
    epilogue: &mut impl Epilogue,
) {
    let kind = const { F::FORMAT.kind() };
    let total = x.len() / ROWS_MAX;
    let end_row = first_row + total / w.len() * ROWS_MAX;
    let mut dots = [const { MaybeUninit::<Dots>::uninit() }; 2];
    let dots = dots.each_mut().map(MaybeUninit::as_mut_ptr);
    let mut acc = [_mm512_setzero_ps(); ROWS_MAX];
    let mut sums: TileSums = [Sums([0.0; PANEL]); ROWS_MAX];
    // Blocks of the panel that are multiplied and scaled next, and the first row of the latter.
    let (mut to_multiply, mut to_scale, mut row) = (0, 0, first_row);
    // In turn t the tile of block t is multiplied, that of t - 1 stored, and the dots of t - 2 are scaled.
    macro_rules! turn {
        ($turn:expr, $slot:literal, $before:literal) => {
            let turn = $turn;
            if 1 <= turn && turn <= total {
                product.store::<$before, HALVES>(dots[$before]);
            }
            if turn < total {
                product.multiply::<$slot, HALVES>(x.as_ptr().add(turn * ROWS_MAX), w.as_ptr().add(to_multiply));
                to_multiply = if to_multiply + 1 == w.len() { 0 } else { to_multiply + 1 };
            }
            if 2 <= turn && turn < total + 2 {
                let [first, second] = &w.get_unchecked(to_scale).scales;
                let s = [_mm512_load_ps(first.0.as_ptr()), _mm512_load_ps(second.0.as_ptr())];
                let x = x.as_ptr().add((turn - 2) * ROWS_MAX);
                rows!(kind, x, dots[$slot], s, acc, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15);
                to_scale += 1;
                if to_scale == w.len() {
                    for (sums, acc) in sums.iter_mut().zip(&mut acc) {
                        _mm512_store_ps(sums.0.as_mut_ptr(), *acc);
                        *acc = _mm512_setzero_ps();
                    }
                    for (i, sums) in sums.iter().enumerate() {
                        epilogue.put(row + i, feature, &sums.0);
                        if row + ROWS_MAX < end_row {
                            epilogue.expect(row + ROWS_MAX + i, feature);
                        }
                    }
                    (to_scale, row) = (0, row + ROWS_MAX);
                }
            }
        };
    }
    for turn in (0..total + 2).step_by(2) {
        // SAFETY: every block before `total` has 16 records and a block of the panel; its dots are stored a turn after it was multiplied and
        // read a turn after that, before those of the block after the next take their place.
        unsafe {
            turn!(turn, 0, 1);
            turn!(turn + 1, 1, 0);
        }
    }
}
