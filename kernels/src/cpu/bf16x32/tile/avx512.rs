//! Tiles of FMA on widened bf16 in 512-bit vectors, for processors with AVX-512F and without VDPBF16PS.

use super::{Even, Mxcsr, Tile};
use std::arch::asm;

/// Eight pairs of one chain: the high halves of two vectors of weights are widened to zmm26 and zmm27, the low halves to zmm24 and zmm25.
macro_rules! chain {
    ($height:literal; $($r:literal $low:literal $high:literal)*) => {
        concat!(
            $("vpxord zmm", $low, ", zmm", $low, ", zmm", $low, "\n", "vpxord zmm", $high, ", zmm", $high, ", zmm", $high, "\n",)*
            ".rept 8\n",
            "vmovaps zmm24, [{w}]\n",
            "vmovaps zmm25, [{w} + 64]\n",
            "prefetcht0 [{ahead}]\n",
            "add {ahead}, {stride}\n",
            "prefetcht0 [{ahead}]\n",
            "add {ahead}, {stride}\n",
            "add {w}, 256\n",
            "vpandd zmm26, zmm24, zmm28\n",
            "vpandd zmm27, zmm25, zmm28\n",
            "vpslld zmm24, zmm24, 16\n",
            "vpslld zmm25, zmm25, 16\n",
            $("vbroadcastss zmm29, dword ptr [{x} + 8*", $r, "]\n",
            "vfmadd231ps zmm", $low, ", zmm26, zmm29\n",
            "vfmadd231ps zmm", $high, ", zmm27, zmm29\n",
            "vbroadcastss zmm30, dword ptr [{x} + 8*", $r, " + 4]\n",
            "vfmadd231ps zmm", $low, ", zmm24, zmm30\n",
            "vfmadd231ps zmm", $high, ", zmm25, zmm30\n",)*
            "add {x}, 16*", $height, "\n",
            ".endr\n",
        )
    };
}

macro_rules! tile {
    ($name:ident, $height:literal; $($r:literal $low:literal $high:literal)*) => {
        /// # Safety
        /// As [`super::run`].
        #[target_feature(enable = "avx512f")]
        unsafe fn $name(tile: Tile) {
            let (mut mxcsr, mut even) = (Mxcsr::new(), Even::new());
            // SAFETY: reads x and w to the end of the last group, reads and writes `rows` totals and as many even sums; restores MXCSR.
            unsafe {
                asm!(
                    "stmxcsr [{mxcsr}]",
                    "ldmxcsr [{mxcsr} + 4]",
                    "vpternlogd zmm28, zmm28, zmm28, 255",
                    "vpslld zmm28, zmm28, 16",
                    ".p2align 5",
                    "2:",
                    chain!($height; $($r $low $high)*),
                    // Back to the odd chain's words, which lie between.
                    "sub {w}, 2048 - 128",
                    concat!("sub {x}, 128*", $height, " - 8*", $height),
                    concat!($(
                        "vmovaps [{even} + 128*", $r, "], zmm", $low, "\n",
                        "vmovaps [{even} + 128*", $r, " + 64], zmm", $high, "\n",
                    )*),
                    chain!($height; $($r $low $high)*),
                    "sub {w}, 128",
                    concat!("sub {x}, 8*", $height),
                    concat!($(
                        "vaddps zmm", $low, ", zmm", $low, ", [{even} + 128*", $r, "]\n",
                        "vaddps zmm", $high, ", zmm", $high, ", [{even} + 128*", $r, " + 64]\n",
                        "vaddps zmm", $low, ", zmm", $low, ", [{sums} + 128*", $r, "]\n",
                        "vaddps zmm", $high, ", zmm", $high, ", [{sums} + 128*", $r, " + 64]\n",
                        "vmovaps [{sums} + 128*", $r, "], zmm", $low, "\n",
                        "vmovaps [{sums} + 128*", $r, " + 64], zmm", $high, "\n",
                    )*),
                    "dec {groups}",
                    "jnz 2b",
                    "ldmxcsr [{mxcsr}]",
                    x = inout(reg) tile.x => _,
                    w = inout(reg) tile.w => _,
                    groups = inout(reg) tile.groups => _,
                    sums = in(reg) tile.sums,
                    even = in(reg) &raw mut even,
                    mxcsr = in(reg) &raw mut mxcsr,
                    ahead = inout(reg) tile.ahead => _,
                    stride = in(reg) tile.ahead_stride,
                    out("zmm0") _, out("zmm1") _, out("zmm2") _, out("zmm3") _, out("zmm4") _, out("zmm5") _, out("zmm6") _, out("zmm7") _,
                    out("zmm8") _, out("zmm9") _, out("zmm10") _, out("zmm11") _, out("zmm12") _, out("zmm13") _, out("zmm14") _, out("zmm15") _,
                    out("zmm16") _, out("zmm17") _, out("zmm18") _, out("zmm19") _, out("zmm20") _, out("zmm21") _, out("zmm22") _, out("zmm23") _,
                    out("zmm24") _, out("zmm25") _, out("zmm26") _, out("zmm27") _, out("zmm28") _, out("zmm29") _, out("zmm30") _,
                    options(nostack),
                );
            }
        }
    };
}

tile!(tile1, 1; 0 0 12);
tile!(tile2, 2; 0 0 12 1 1 13);
tile!(tile3, 3; 0 0 12 1 1 13 2 2 14);
tile!(tile4, 4; 0 0 12 1 1 13 2 2 14 3 3 15);
tile!(tile5, 5; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16);
tile!(tile6, 6; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17);
tile!(tile7, 7; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18);
tile!(tile8, 8; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18 7 7 19);
tile!(tile9, 9; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18 7 7 19 8 8 20);
tile!(tile10, 10; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18 7 7 19 8 8 20 9 9 21);
tile!(tile11, 11; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18 7 7 19 8 8 20 9 9 21 10 10 22);
tile!(tile12, 12; 0 0 12 1 1 13 2 2 14 3 3 15 4 4 16 5 5 17 6 6 18 7 7 19 8 8 20 9 9 21 10 10 22 11 11 23);

/// Tiles of 1 to 12 rows.
pub(super) static TILES: [unsafe fn(Tile); 12] =
    [tile1, tile2, tile3, tile4, tile5, tile6, tile7, tile8, tile9, tile10, tile11, tile12];
