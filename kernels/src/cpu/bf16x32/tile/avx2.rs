//! Tiles of FMA on widened bf16 in 256-bit vectors. A tile takes each half of a panel by itself, for all blocks of rows: 5 rows x 2 vectors are 10 chains, which
//! hide the latency of FMA, and leave 4 of 16 registers for weights and 2 for broadcasts. One or two rows have too few chains for that, so
//! these tiles compute even and odd chains side by side, and a row alone all four vectors of the panel: 8 chains.
//!
//! The two kinds of tiles do not share their assembly block: over one block, one and two rows took 1.02 to 1.07 of the time (medians of pairs in
//! turns within one process, on a busy machine).

use super::{Even, Mxcsr, Tile};
use crate::cpu::SimdLevel;
use std::arch::asm;

/// The high half of each word.
#[repr(C, align(32))]
struct HighHalves([u32; 8]);
static HIGH_HALVES: HighHalves = HighHalves([0xffff_0000; 8]);

/// All blocks of rows for one half of a panel, then for the next: that half stays in the first-level cache.
fn in_turn(halves: &[usize], blocks: usize) -> impl Iterator<Item = (usize, usize)> {
    halves.iter().flat_map(move |half| (0..blocks).map(move |block| (*half, block)))
}

/// Eight pairs of one chain: the high halves of two vectors of weights are widened to ymm10 and ymm11, the low halves to ymm12 and ymm13.
macro_rules! chain {
    ($height:literal; $($r:literal $low:literal $high:literal)*) => {
        concat!(
            $("vpxor ymm", $low, ", ymm", $low, ", ymm", $low, "\n", "vpxor ymm", $high, ", ymm", $high, ", ymm", $high, "\n",)*
            ".rept 8\n",
            "vmovaps ymm12, [{w}]\n",
            "vmovaps ymm13, [{w} + 32]\n",
            "prefetcht0 [{ahead}]\n",
            "add {ahead}, {stride}\n",
            "add {w}, 256\n",
            "vpand ymm10, ymm12, [{mask}]\n",
            "vpand ymm11, ymm13, [{mask}]\n",
            "vpslld ymm12, ymm12, 16\n",
            "vpslld ymm13, ymm13, 16\n",
            $("vbroadcastss ymm14, dword ptr [{x} + 8*", $r, "]\n",
            "vfmadd231ps ymm", $low, ", ymm10, ymm14\n",
            "vfmadd231ps ymm", $high, ", ymm11, ymm14\n",
            "vbroadcastss ymm15, dword ptr [{x} + 8*", $r, " + 4]\n",
            "vfmadd231ps ymm", $low, ", ymm12, ymm15\n",
            "vfmadd231ps ymm", $high, ", ymm13, ymm15\n",)*
            "add {x}, 16*", $height, "\n",
            ".endr\n",
        )
    };
}

macro_rules! tile {
    ($name:ident, $height:literal; $($r:literal $low:literal $high:literal)*) => {
        /// # Safety
        /// As [`super::run`].
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(tile: Tile) {
            let (mut mxcsr, mut even) = (Mxcsr::new(), Even::new());
            let mut ahead = tile.ahead;
            for (half, block) in in_turn(&[0, 64], tile.blocks) {
                let tile = tile.block(SimdLevel::Avx2Fma, $height, block);
                // SAFETY: reads x and half of w to the end of the last group, reads and writes half of `rows` totals and even sums; restores
                // MXCSR.
                unsafe {
                    asm!(
                        "stmxcsr [{mxcsr}]",
                        "ldmxcsr [{mxcsr} + 4]",
                        ".p2align 5",
                        "2:",
                        chain!($height; $($r $low $high)*),
                        // Back to the odd chain's words, which lie between.
                        "sub {w}, 2048 - 128",
                        concat!("sub {x}, 128*", $height, " - 8*", $height),
                        concat!($(
                            "vmovaps [{even} + 128*", $r, "], ymm", $low, "\n",
                            "vmovaps [{even} + 128*", $r, " + 32], ymm", $high, "\n",
                        )*),
                        chain!($height; $($r $low $high)*),
                        "sub {w}, 128",
                        concat!("sub {x}, 8*", $height),
                        concat!($(
                            "vaddps ymm", $low, ", ymm", $low, ", [{even} + 128*", $r, "]\n",
                            "vaddps ymm", $high, ", ymm", $high, ", [{even} + 128*", $r, " + 32]\n",
                            "vaddps ymm", $low, ", ymm", $low, ", [{sums} + 128*", $r, "]\n",
                            "vaddps ymm", $high, ", ymm", $high, ", [{sums} + 128*", $r, " + 32]\n",
                            "vmovaps [{sums} + 128*", $r, "], ymm", $low, "\n",
                            "vmovaps [{sums} + 128*", $r, " + 32], ymm", $high, "\n",
                        )*),
                        "dec {groups}",
                        "jnz 2b",
                        "ldmxcsr [{mxcsr}]",
                        x = inout(reg) tile.x => _,
                        w = inout(reg) tile.w.wrapping_byte_add(half) => _,
                        groups = inout(reg) tile.groups => _,
                        sums = in(reg) tile.sums.wrapping_byte_add(half),
                        even = in(reg) &raw mut even,
                        mxcsr = in(reg) &raw mut mxcsr,
                        ahead = inout(reg) ahead,
                        stride = in(reg) tile.ahead_stride,
                        mask = in(reg) &raw const HIGH_HALVES,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

/// Two vectors of weights, or one: the high halves are widened to the first registers, the low halves to the second.
macro_rules! widen {
    ($($at:literal $high:literal $low:literal)*) => {
        concat!($(
            "vmovaps ymm", $low, ", [{w} + ", $at, "]\n",
            "vpand ymm", $high, ", ymm", $low, ", ymm13\n",
            "vpslld ymm", $low, ", ymm", $low, ", 16\n",
        )*)
    };
}

/// One pair of a row, to ymm14 and ymm15.
macro_rules! broadcast {
    ($at:literal) => {
        concat!(
            "vbroadcastss ymm14, dword ptr [{x} + ",
            $at,
            "]\n",
            "vbroadcastss ymm15, dword ptr [{x} + ",
            $at,
            " + 4]\n"
        )
    };
}

/// The next link of some chains.
macro_rules! link {
    ($($sum:literal $high:literal $low:literal)*) => {
        concat!(
            $("vfmadd231ps ymm", $sum, ", ymm", $high, ", ymm14\n",)*
            $("vfmadd231ps ymm", $sum, ", ymm", $low, ", ymm15\n",)*
        )
    };
}

macro_rules! few_rows {
    ($name:ident, $height:literal, halves: $halves:expr, prefetches: $prefetches:literal, pair: $pair:expr, sums: $($odd:literal $even:literal $at:literal)*) => {
        /// # Safety
        /// As [`super::run`].
        #[target_feature(enable = "avx2,fma")]
        unsafe fn $name(tile: Tile) {
            let mut mxcsr = Mxcsr::new();
            let mut ahead = tile.ahead;
            for (half, block) in in_turn(&$halves, tile.blocks) {
                let tile = tile.block(SimdLevel::Avx2Fma, $height, block);
                // SAFETY: reads x and what it takes of w to the end of the last group, reads and writes these features of the totals; restores
                // MXCSR.
                unsafe {
                    asm!(
                        "stmxcsr [{mxcsr}]",
                        "ldmxcsr [{mxcsr} + 4]",
                        "vmovaps ymm13, [{mask}]",
                        ".p2align 5",
                        "2:",
                        concat!($("vpxor ymm", $odd, ", ymm", $odd, ", ymm", $odd, "\n", "vpxor ymm", $even, ", ymm", $even, ", ymm", $even, "\n",)*),
                        ".rept 8",
                        $pair,
                        concat!(".rept ", $prefetches),
                        "prefetcht0 [{ahead}]",
                        "add {ahead}, {stride}",
                        ".endr",
                        "add {w}, 256",
                        concat!("add {x}, 16*", $height),
                        ".endr",
                        concat!($(
                            "vaddps ymm", $odd, ", ymm", $odd, ", ymm", $even, "\n",
                            "vaddps ymm", $odd, ", ymm", $odd, ", [{sums} + ", $at, "]\n",
                            "vmovaps [{sums} + ", $at, "], ymm", $odd, "\n",
                        )*),
                        "dec {groups}",
                        "jnz 2b",
                        "ldmxcsr [{mxcsr}]",
                        x = inout(reg) tile.x => _,
                        w = inout(reg) tile.w.wrapping_byte_add(half) => _,
                        groups = inout(reg) tile.groups => _,
                        sums = in(reg) tile.sums.wrapping_byte_add(half),
                        mxcsr = in(reg) &raw mut mxcsr,
                        ahead = inout(reg) ahead,
                        stride = in(reg) tile.ahead_stride,
                        mask = in(reg) &raw const HIGH_HALVES,
                        out("ymm0") _, out("ymm1") _, out("ymm2") _, out("ymm3") _, out("ymm4") _, out("ymm5") _, out("ymm6") _, out("ymm7") _,
                        out("ymm8") _, out("ymm9") _, out("ymm10") _, out("ymm11") _, out("ymm12") _, out("ymm13") _, out("ymm14") _, out("ymm15") _,
                        options(nostack),
                    );
                }
            }
        }
    };
}

few_rows!(
    tile1, 1, halves: [0], prefetches: 4,
    pair: concat!(
        broadcast!("0"),
        widen!("0" 9 8 "32" 11 10), link!(0 9 8 1 11 10),
        widen!("64" 9 8 "96" 11 10), link!(2 9 8 3 11 10),
        broadcast!("8"),
        widen!("128" 9 8 "160" 11 10), link!(4 9 8 5 11 10),
        widen!("192" 9 8 "224" 11 10), link!(6 9 8 7 11 10),
    ),
    sums: 4 0 "0" 5 1 "32" 6 2 "64" 7 3 "96"
);
few_rows!(
    tile2, 2, halves: [0, 64], prefetches: 2,
    pair: concat!(
        widen!("0" 9 8 "32" 11 10),
        broadcast!("0"), link!(0 9 8 1 11 10),
        broadcast!("8"), link!(2 9 8 3 11 10),
        widen!("128" 9 8 "160" 11 10),
        broadcast!("16"), link!(4 9 8 5 11 10),
        broadcast!("24"), link!(6 9 8 7 11 10),
    ),
    sums: 4 0 "0" 5 1 "32" 6 2 "128" 7 3 "160"
);
tile!(tile3, 3; 0 0 5 1 1 6 2 2 7);
tile!(tile4, 4; 0 0 5 1 1 6 2 2 7 3 3 8);
tile!(tile5, 5; 0 0 5 1 1 6 2 2 7 3 3 8 4 4 9);

/// Tiles of 1 to 5 rows.
pub(super) static TILES: [unsafe fn(Tile); 5] = [tile1, tile2, tile3, tile4, tile5];
