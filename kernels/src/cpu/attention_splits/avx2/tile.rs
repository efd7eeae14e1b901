//! Sums of products for 1 to 3 queries and panels of 16 lanes, by FMA with subnormals off in MXCSR. Keys and values stay bf16 in memory: a
//! vector of 32-bit words is widened to its low halves by a shift and to its high halves by a mask.

#[cfg(doc)]
use crate::cpu::attention_splits::work::BlockRows;
use crate::cpu::attention_splits::work::Tile;
use crate::cpu::flush::MXCSR_FLUSHED;
use std::arch::asm;

/// Most queries of a tile: even and odd chains of two vectors each take 12 of the 16 registers.
pub(super) const QUERIES: usize = 3;

/// `out = sums`, of keys as [`super::pack::keys`] packs them.
///
/// # Safety
/// The processor has [`crate::cpu::SimdLevel::Avx2Fma`]; the pointers are valid for the shapes of `tile`, whose counts are not zero;
/// `queries` is 1 to [`QUERIES`].
pub(super) unsafe fn sums(queries: usize, tile: Tile) {
    let tiles = if tile.next.is_null() { &SUMS } else { &SUMS_AHEAD };
    // SAFETY: the caller's promise; the factors are not read.
    unsafe { tiles[queries - 1](tile, std::ptr::null()) }
}

/// `out = out * factor + sums`, with a factor for each query; the panels are [addresses of rows](BlockRows), of which each panel takes the
/// next 16 elements. Lanes 0 to 7 are the even elements, lanes 8 to 15 the odd ones.
///
/// # Safety
/// As [`sums`], and `factors` are as many as `queries`.
pub(super) unsafe fn scaled_sums(queries: usize, tile: Tile, factors: *const f32) {
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
    rows: *const u32,
    high_halves: u32,
}

/// A row of the output starts at zero.
macro_rules! from_zero {
    ($factor:literal) => {
        concat!(
            "vxorps ymm14, ymm14, ymm14\n",
            "vmovaps [{t}], ymm14\n",
            "vmovaps [{t} + 32], ymm14\n",
            "/* no {factors} */\n",
        )
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

/// Words of two elements of 16 tokens each.
macro_rules! keys {
    (even) => {
        concat!(
            "vmovaps ymm12, [{w}]\n",
            "vmovaps ymm13, [{w} + 32]\n",
            "vpslld ymm12, ymm12, 16\n",
            "vpslld ymm13, ymm13, 16\n",
        )
    };
    (odd) => {
        "vandps ymm12, ymm15, [{w}]\nvandps ymm13, ymm15, [{w} + 32]\nsub {w}, -64\n"
    };
    (group) => {
        ""
    };
    (next) => {
        "/* panels follow one another; not {at} {next} {line} */\n"
    };
}

/// As `keys`, and each step prefetches a line of the next block's: of 16 tokens in a group, and all groups before the next 16 tokens.
macro_rules! keys_ahead {
    (even) => {
        concat!(keys!(even), "mov {t}, [{next}]\nadd {next}, 8\nprefetcht1 byte ptr [{t} + {line}]\n")
    };
    (odd) => {
        keys!(odd)
    };
    (group) => {
        "add {next}, -128\nadd {line}, 64\n"
    };
    (next) => {
        "add {next}, 128\nxor {line:e}, {line:e}\n/* {at} */\n"
    };
}

/// 16 elements of the rows of two tokens.
macro_rules! values {
    (even) => {
        concat!(
            "mov {t}, [{w}]\n",
            "vmovups ymm13, [{t} + {at}]\n",
            "vpslld ymm12, ymm13, 16\n",
            "vandps ymm13, ymm13, ymm15\n",
        )
    };
    (odd) => {
        concat!(
            "mov {t}, [{w} + 8]\n",
            "vmovups ymm13, [{t} + {at}]\n",
            "vpslld ymm12, ymm13, 16\n",
            "vandps ymm13, ymm13, ymm15\n",
            "add {w}, 16\n",
        )
    };
    (group) => {
        ""
    };
    (next) => {
        "mov {w}, [{control} + 24]\nadd {at}, 32\n/* not {next} {line} */\n"
    };
}

/// As `values`, and each step prefetches a line of the next block's: two panels are a line, and have a step for each token.
macro_rules! values_ahead {
    (even) => {
        concat!(values!(even), "mov {t}, [{next}]\nadd {next}, 8\nprefetcht1 byte ptr [{t} + {line}]\n")
    };
    (odd) => {
        values!(odd)
    };
    (group) => {
        ""
    };
    (next) => {
        concat!(
            "mov {w}, [{control} + 24]\n",
            "add {at}, 32\n",
            "test {at:e}, 32\n",
            "jnz 4f\n",
            "add {next}, -512\n",
            "add {line}, 64\n",
            "4:\n",
        )
    };
}

/// A tile of the queries `$at`: address of the words, offset of the factor, registers of the even chains and of the odd ones.
macro_rules! tile {
    ($name:ident, $of:ident, $start:ident; $($at:literal $factor:literal $e0:literal $e1:literal $o0:literal $o1:literal;)*) => {
        /// # Safety
        /// As [`super::sums`] or [`super::scaled_sums`].
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(tile: Tile, factors: *const f32) {
            let mut control = Control {
                mxcsr: 0,
                mxcsr_flushed: MXCSR_FLUSHED,
                queries: tile.queries,
                groups: tile.groups as u32,
                panels: tile.count as u32,
                rows: tile.panels,
                high_halves: 0xffff_0000,
            };
            // SAFETY: reads queries and panels to the end of the last group, reads and writes the output; restores MXCSR.
            unsafe {
                asm!(
                    "stmxcsr [{control}]",
                    "ldmxcsr [{control} + 4]",
                    "vbroadcastss ymm15, dword ptr [{control} + 32]",
                    "2:",
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
                    $of!(even),
                    concat!($(
                        "vbroadcastss ymm14, dword ptr [{x}", $at, "]\n",
                        "vfmadd231ps ymm", $e0, ", ymm12, ymm14\n",
                        "vfmadd231ps ymm", $e1, ", ymm13, ymm14\n",
                    )*),
                    $of!(odd),
                    concat!($(
                        "vbroadcastss ymm14, dword ptr [{x} + 4", $at, "]\n",
                        "vfmadd231ps ymm", $o0, ", ymm12, ymm14\n",
                        "vfmadd231ps ymm", $o1, ", ymm13, ymm14\n",
                    )*),
                    "add {x}, 8",
                    ".endr",
                    "mov {t}, {out}",
                    concat!($(
                        "vbroadcastss ymm12, dword ptr [{x}", $at, "]\n",
                        "vbroadcastss ymm13, dword ptr [{x} + 4", $at, "]\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", ymm12\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", ymm12\n",
                        "vaddps ymm", $o0, ", ymm", $o0, ", ymm13\n",
                        "vaddps ymm", $o1, ", ymm", $o1, ", ymm13\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", ymm", $o0, "\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", ymm", $o1, "\n",
                        "vaddps ymm", $e0, ", ymm", $e0, ", [{t}]\n",
                        "vaddps ymm", $e1, ", ymm", $e1, ", [{t} + 32]\n",
                        "vmovaps [{t}], ymm", $e0, "\n",
                        "vmovaps [{t} + 32], ymm", $e1, "\n",
                        "add {t}, {out_stride}\n",
                    )*),
                    "add {x}, 8",
                    $of!(group),
                    "dec {groups:e}",
                    "jnz 3b",
                    $of!(next),
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
                    at = inout(reg) 0usize => _,
                    next = inout(reg) tile.next => _,
                    line = inout(reg) 0usize => _,
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
    ($table:ident, $of:ident, $start:ident, $module:ident) => {
        mod $module {
            use super::{Control, MXCSR_FLUSHED, Tile, asm};
            tile!(tile1, $of, $start; "" "0" "0" "1" "6" "7";);
            tile!(tile2, $of, $start; "" "0" "0" "1" "6" "7"; " + {s}" "4" "2" "3" "8" "9";);
            tile!(tile3, $of, $start; "" "0" "0" "1" "6" "7"; " + {s}" "4" "2" "3" "8" "9"; " + 2*{s}" "8" "4" "5" "10" "11";);

            pub(super) static TILES: [unsafe fn(Tile, *const f32); super::QUERIES] = [tile1, tile2, tile3];
        }
        use $module::TILES as $table;
    };
}

tiles!(SUMS, keys, from_zero, zero);
tiles!(SUMS_AHEAD, keys_ahead, from_zero, zero_ahead);
tiles!(SCALED_SUMS, values, from_scaled, scaled);
tiles!(SCALED_SUMS_AHEAD, values_ahead, from_scaled, scaled_ahead);
