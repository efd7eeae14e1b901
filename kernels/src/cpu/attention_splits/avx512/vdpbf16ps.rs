//! Sums of products for 1 to 7 queries and panels of 32 lanes: scores with tokens in the lanes, weighted values with elements in the lanes.
//!
//! VDPBF16PS takes the high halves of a lane first, then the low ones, each with one rounding and subnormals as zero, whatever MXCSR says.
//! The other operations of the class need MXCSR, which Rust lets change only within an `asm!` block: the block holds them all.

use super::Sums;
use crate::cpu::attention_splits::work::Tile;
use crate::cpu::flush::MXCSR_FLUSHED;
use std::arch::asm;
use std::ops::Range;

/// Words of one query in one group: 8 pairs of even elements, 8 of odd ones, and the ends of both chains.
const QUERY_GROUP: usize = 18;

/// Most queries of a tile: even and odd chains of two vectors each take 28 of the 32 registers.
const QUERIES: usize = 7;

#[derive(Default)]
pub(super) struct Vdpbf16ps;

impl Sums for Vdpbf16ps {
    const TILES: bool = false;
    const QUERY_GROUP: usize = QUERY_GROUP;
    const QUERIES: usize = QUERIES;
    const FEW: usize = 0;

    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe { sums(queries, tile) }
    }

    #[inline(always)]
    unsafe fn scaled_sums(&mut self, seen: &[Range<usize>], tile: Tile, factors: &[f32]) {
        // SAFETY: the caller's promise.
        unsafe { scaled_sums(seen.len(), tile, factors.as_ptr()) }
    }
}

/// `out = sums`.
///
/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx512Bf16`]; the pointers are valid for the shapes of `tile`, whose counts are not zero;
/// `queries` is 1 to [`QUERIES`].
unsafe fn sums(queries: usize, tile: Tile) {
    let tiles = if tile.next.is_null() { &SUMS } else { &SUMS_AHEAD };
    // SAFETY: the caller's promise; the factors are not read.
    unsafe { tiles[queries - 1](tile, std::ptr::null()) }
}

/// `out = out * factor + sums`, with a factor for each query.
///
/// # Safety
/// As [`sums`], and `factors` are as many as `queries`.
unsafe fn scaled_sums(queries: usize, tile: Tile, factors: *const f32) {
    let tiles = if tile.next.is_null() { &SCALED_SUMS } else { &SCALED_SUMS_AHEAD };
    // SAFETY: the caller's promise.
    unsafe { tiles[queries - 1](tile, factors) }
}

/// What the code keeps in memory, for lack of registers.
#[repr(C)]
struct Control {
    mxcsr: u32,
    mxcsr_flushed: u32,
    queries: *const u32,
    groups: u32,
    panels: u32,
}

/// A row of the output starts at zero.
macro_rules! from_zero {
    ($factor:literal) => {
        "vmovaps [{t}], zmm31\nvmovaps [{t} + 64], zmm31\n/* no {factors} */\n"
    };
}

/// A row of the output starts at what it was, times the factor of its query.
macro_rules! from_scaled {
    ($factor:literal) => {
        concat!(
            "vbroadcastss zmm30, dword ptr [{factors} + ",
            $factor,
            "]\n",
            "vmulps zmm28, zmm30, [{t}]\n",
            "vmulps zmm29, zmm30, [{t} + 64]\n",
            "vmovaps [{t}], zmm28\n",
            "vmovaps [{t} + 64], zmm29\n",
        )
    };
}

/// Nothing is prefetched.
macro_rules! alone {
    (step) => {
        ""
    };
    (group) => {
        ""
    };
    (panel) => {
        "/* not {next} {line} */\n"
    };
}

/// Four lines of rows of the next block.
macro_rules! four_lines {
    () => {
        concat!(
            "mov {t}, [{next}]\nprefetcht1 byte ptr [{t} + {line}]\n",
            "mov {t}, [{next} + 8]\nprefetcht1 byte ptr [{t} + {line}]\n",
            "mov {t}, [{next} + 16]\nprefetcht1 byte ptr [{t} + {line}]\n",
            "mov {t}, [{next} + 24]\nprefetcht1 byte ptr [{t} + {line}]\n",
            "add {next}, 32\n",
        )
    };
}

/// Each step prefetches lines of the next block's keys: of 32 tokens in a group, and all groups before the next 32 tokens.
macro_rules! keys_ahead {
    (step) => {
        four_lines!()
    };
    (group) => {
        "add {next}, -256\nadd {line}, 64\n"
    };
    (panel) => {
        "add {next}, 256\nxor {line:e}, {line:e}\n"
    };
}

/// Each step prefetches lines of the next block's values: a panel is a line of all tokens.
macro_rules! values_ahead {
    (step) => {
        four_lines!()
    };
    (group) => {
        ""
    };
    (panel) => {
        "add {next}, -512\nadd {line}, 64\n"
    };
}

/// A tile of the queries `$at`: address of the words, offset of the factor, registers of the even chains and of the odd ones.
macro_rules! tile {
    ($name:ident, $ahead:ident, $start:ident; $($at:literal $factor:literal $e0:literal $e1:literal $o0:literal $o1:literal;)*) => {
        /// # Safety
        /// As [`scaled_sums`].
        #[target_feature(enable = "avx512f,avx512bf16")]
        unsafe fn $name(tile: Tile, factors: *const f32) {
            let mut control = Control {
                mxcsr: 0,
                mxcsr_flushed: MXCSR_FLUSHED,
                queries: tile.queries,
                groups: tile.groups as u32,
                panels: tile.count as u32,
            };
            // SAFETY: reads queries and panels to the end of the last group, reads and writes the output; restores MXCSR.
            unsafe {
                asm!(
                    "stmxcsr [{control}]",
                    "ldmxcsr [{control} + 4]",
                    "lea {s3}, [{s} + 2*{s}]",
                    "lea {s5}, [{s} + 4*{s}]",
                    "2:",
                    "vpxord zmm31, zmm31, zmm31",
                    "mov {t}, {out}",
                    concat!($($start!($factor), "add {t}, {out_stride}\n",)*),
                    "mov {x}, [{control} + 8]",
                    "mov {groups:e}, [{control} + 16]",
                    ".p2align 5",
                    "3:",
                    concat!($(
                        "vpxord zmm", $e0, ", zmm", $e0, ", zmm", $e0, "\n",
                        "vpxord zmm", $e1, ", zmm", $e1, ", zmm", $e1, "\n",
                        "vpxord zmm", $o0, ", zmm", $o0, ", zmm", $o0, "\n",
                        "vpxord zmm", $o1, ", zmm", $o1, ", zmm", $o1, "\n",
                    )*),
                    ".rept 8",
                    "vmovaps zmm28, [{w}]",
                    "vmovaps zmm29, [{w} + 64]",
                    "vmovaps zmm30, [{w} + 1024]",
                    "vmovaps zmm31, [{w} + 1088]",
                    "sub {w}, -128",
                    concat!($(
                        "vdpbf16ps zmm", $e0, ", zmm28, dword ptr [{x}", $at, "]{{1to16}}\n",
                        "vdpbf16ps zmm", $e1, ", zmm29, dword ptr [{x}", $at, "]{{1to16}}\n",
                        "vdpbf16ps zmm", $o0, ", zmm30, dword ptr [{x} + 32", $at, "]{{1to16}}\n",
                        "vdpbf16ps zmm", $o1, ", zmm31, dword ptr [{x} + 32", $at, "]{{1to16}}\n",
                    )*),
                    "add {x}, 4",
                    $ahead!(step),
                    ".endr",
                    "add {w}, 1024",
                    "mov {t}, {out}",
                    concat!($(
                        "vaddps zmm", $e0, ", zmm", $e0, ", dword ptr [{x} + 32", $at, "]{{1to16}}\n",
                        "vaddps zmm", $e1, ", zmm", $e1, ", dword ptr [{x} + 32", $at, "]{{1to16}}\n",
                        "vaddps zmm", $o0, ", zmm", $o0, ", dword ptr [{x} + 36", $at, "]{{1to16}}\n",
                        "vaddps zmm", $o1, ", zmm", $o1, ", dword ptr [{x} + 36", $at, "]{{1to16}}\n",
                        "vaddps zmm", $e0, ", zmm", $e0, ", zmm", $o0, "\n",
                        "vaddps zmm", $e1, ", zmm", $e1, ", zmm", $o1, "\n",
                        "vaddps zmm", $e0, ", zmm", $e0, ", [{t}]\n",
                        "vaddps zmm", $e1, ", zmm", $e1, ", [{t} + 64]\n",
                        "vmovaps [{t}], zmm", $e0, "\n",
                        "vmovaps [{t} + 64], zmm", $e1, "\n",
                        "add {t}, {out_stride}\n",
                    )*),
                    "add {x}, 40",
                    $ahead!(group),
                    "dec {groups:e}",
                    "jnz 3b",
                    $ahead!(panel),
                    "sub {out}, -128",
                    "dec dword ptr [{control} + 20]",
                    "jnz 2b",
                    "ldmxcsr [{control}]",
                    control = in(reg) &raw mut control,
                    factors = in(reg) factors,
                    s = in(reg) tile.query_stride,
                    w = inout(reg) tile.panels => _,
                    out = inout(reg) tile.out => _,
                    out_stride = in(reg) tile.out_stride,
                    next = inout(reg) tile.next => _,
                    line = inout(reg) 0usize => _,
                    x = out(reg) _,
                    s3 = out(reg) _,
                    s5 = out(reg) _,
                    t = out(reg) _,
                    groups = out(reg) _,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                    out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _, out("zmm31") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Tiles of 1 to 7 queries whose output starts as `$start` says.
macro_rules! tiles {
    ($table:ident, $ahead:ident, $start:ident, $module:ident) => {
        mod $module {
            use super::{Control, MXCSR_FLUSHED, Tile, asm};
            tile!(tile1, $ahead, $start; "" "0" "0" "1" "2" "3";);
            tile!(tile2, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7";);
            tile!(tile3, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7"; " + 2*{s}" "8" "8" "9" "10" "11";);
            tile!(tile4, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7"; " + 2*{s}" "8" "8" "9" "10" "11";
                " + {s3}" "12" "12" "13" "14" "15";);
            tile!(tile5, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7"; " + 2*{s}" "8" "8" "9" "10" "11";
                " + {s3}" "12" "12" "13" "14" "15"; " + 4*{s}" "16" "16" "17" "18" "19";);
            tile!(tile6, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7"; " + 2*{s}" "8" "8" "9" "10" "11";
                " + {s3}" "12" "12" "13" "14" "15"; " + 4*{s}" "16" "16" "17" "18" "19"; " + {s5}" "20" "20" "21" "22" "23";);
            tile!(tile7, $ahead, $start; "" "0" "0" "1" "2" "3"; " + {s}" "4" "4" "5" "6" "7"; " + 2*{s}" "8" "8" "9" "10" "11";
                " + {s3}" "12" "12" "13" "14" "15"; " + 4*{s}" "16" "16" "17" "18" "19"; " + {s5}" "20" "20" "21" "22" "23";
                " + 2*{s3}" "24" "24" "25" "26" "27";);

            pub(super) static TILES: [unsafe fn(Tile, *const f32); super::QUERIES] =
                [tile1, tile2, tile3, tile4, tile5, tile6, tile7];
        }
        use $module::TILES as $table;
    };
}

tiles!(SUMS, alone, from_zero, zero);
tiles!(SUMS_AHEAD, keys_ahead, from_zero, zero_ahead);
tiles!(SCALED_SUMS, alone, from_scaled, scaled);
tiles!(SCALED_SUMS_AHEAD, values_ahead, from_scaled, scaled_ahead);
