//! Sums of products for 1 to 3 queries and panels of 16 lanes, by FMA on widened bf16 with subnormals off in MXCSR.

use crate::cpu::attention_splits::flush::MXCSR_FLUSHED;
use crate::cpu::attention_splits::work::Tile;
use std::arch::asm;

/// Most queries of a tile: even and odd chains of two vectors each take 12 of the 16 registers.
pub(super) const QUERIES: usize = 3;

/// `out = sums`.
///
/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`]; the pointers are valid for the shapes of `tile`, whose counts are not zero;
/// `queries` is 1 to [`QUERIES`].
pub(super) unsafe fn sums(queries: usize, tile: Tile) {
    // SAFETY: the caller's promise; the factors are not read.
    unsafe { SUMS[queries - 1](tile, std::ptr::null()) }
}

/// `out = out * factor + sums`, with a factor for each query.
///
/// # Safety
/// As [`sums`], and `factors` are as many as `queries`.
pub(super) unsafe fn scaled_sums(queries: usize, tile: Tile, factors: *const f32) {
    // SAFETY: the caller's promise.
    unsafe { SCALED_SUMS[queries - 1](tile, factors) }
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
        "vmovaps [{t}], ymm15\nvmovaps [{t} + 32], ymm15\n/* no {factors} */\n"
    };
}

/// A row of the output starts at what it was, times the factor of its query.
macro_rules! from_scaled {
    ($factor:literal) => {
        concat!(
            "vbroadcastss ymm14, dword ptr [{factors} + ",
            $factor,
            "]\n",
            "vmulps ymm12, ymm14, [{t}]\n",
            "vmulps ymm13, ymm14, [{t} + 32]\n",
            "vmovaps [{t}], ymm12\n",
            "vmovaps [{t} + 32], ymm13\n",
        )
    };
}

/// A tile of the queries `$at`: address of the words, offset of the factor, registers of the even chains and of the odd ones.
macro_rules! tile {
    ($name:ident, $start:ident; $($at:literal $factor:literal $e0:literal $e1:literal $o0:literal $o1:literal;)*) => {
        /// # Safety
        /// As [`super::scaled_sums`].
        #[target_feature(enable = "avx2,fma")]
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
                    "2:",
                    "vxorps ymm15, ymm15, ymm15",
                    "mov {t}, {out}",
                    concat!($($start!($factor), "add {t}, {out_stride}\n",)*),
                    "mov {x}, [{control} + 8]",
                    "mov {groups:e}, [{control} + 16]",
                    ".p2align 5",
                    "3:",
                    concat!($(
                        "vxorps ymm", $e0, ", ymm", $e0, ", ymm", $e0, "\n",
                        "vxorps ymm", $e1, ", ymm", $e1, ", ymm", $e1, "\n",
                        "vxorps ymm", $o0, ", ymm", $o0, ", ymm", $o0, "\n",
                        "vxorps ymm", $o1, ", ymm", $o1, ", ymm", $o1, "\n",
                    )*),
                    ".rept 16",
                    "vmovaps ymm12, [{w}]",
                    "vmovaps ymm13, [{w} + 32]",
                    concat!($(
                        "vbroadcastss ymm14, dword ptr [{x}", $at, "]\n",
                        "vfmadd231ps ymm", $e0, ", ymm12, ymm14\n",
                        "vfmadd231ps ymm", $e1, ", ymm13, ymm14\n",
                    )*),
                    "vmovaps ymm12, [{w} + 64]",
                    "vmovaps ymm13, [{w} + 96]",
                    concat!($(
                        "vbroadcastss ymm15, dword ptr [{x} + 4", $at, "]\n",
                        "vfmadd231ps ymm", $o0, ", ymm12, ymm15\n",
                        "vfmadd231ps ymm", $o1, ", ymm13, ymm15\n",
                    )*),
                    "sub {w}, -128",
                    "add {x}, 8",
                    ".endr",
                    "mov {t}, {out}",
                    concat!($(
                        "vbroadcastss ymm14, dword ptr [{x}", $at, "]\n",
                        "vbroadcastss ymm15, dword ptr [{x} + 4", $at, "]\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", ymm14\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", ymm14\n",
                        "vaddps ymm", $o0, ", ymm", $o0, ", ymm15\n",
                        "vaddps ymm", $o1, ", ymm", $o1, ", ymm15\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", ymm", $o0, "\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", ymm", $o1, "\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", [{t}]\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", [{t} + 32]\n",
                        "vmovaps [{t}], ymm", $e0, "\n",
                        "vmovaps [{t} + 32], ymm", $e1, "\n",
                        "add {t}, {out_stride}\n",
                    )*),
                    "add {x}, 8",
                    "dec {groups:e}",
                    "jnz 3b",
                    "add {out}, 64",
                    "dec dword ptr [{control} + 20]",
                    "jnz 2b",
                    "ldmxcsr [{control}]",
                    "/* {s} */",
                    control = in(reg) &raw mut control,
                    factors = in(reg) factors,
                    s = in(reg) tile.query_stride,
                    w = inout(reg) tile.panels => _,
                    out = inout(reg) tile.out => _,
                    out_stride = in(reg) tile.out_stride,
                    x = out(reg) _,
                    t = out(reg) _,
                    groups = out(reg) _,
                    out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                    out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _,
                    out("ymm15") _,
                    options(nostack),
                );
            }
        }
    };
}

/// Tiles of 1 to 3 queries whose output starts as `$start` says.
macro_rules! tiles {
    ($table:ident, $start:ident, $module:ident) => {
        mod $module {
            use super::{Control, MXCSR_FLUSHED, Tile, asm};
            tile!(tile1, $start; "" "0" "0" "1" "6" "7";);
            tile!(tile2, $start; "" "0" "0" "1" "6" "7"; " + {s}" "4" "2" "3" "8" "9";);
            tile!(tile3, $start; "" "0" "0" "1" "6" "7"; " + {s}" "4" "2" "3" "8" "9"; " + 2*{s}" "8" "4" "5" "10" "11";);

            pub(super) static TILES: [unsafe fn(Tile, *const f32); super::QUERIES] = [tile1, tile2, tile3];
        }
        use $module::TILES as $table;
    };
}

tiles!(SUMS, from_zero, zero);
tiles!(SCALED_SUMS, from_scaled, scaled);
