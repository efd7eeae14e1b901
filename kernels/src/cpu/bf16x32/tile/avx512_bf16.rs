//! Tiles of VDPBF16PS: `d += a.high * b.high`, then `d += a.low * b.low`, one rounding each, subnormals zero whatever MXCSR says. Only the
//! additions need MXCSR.
//!
//! Five rows of two vectors fill the registers: 5 x 2 x (even, odd, total) = 30, and two for weights; activations are broadcast by the
//! multiply instructions themselves. (Seven rows with totals in memory reach 88 % of the peak, fourteen with one chain at a time 84 %,
//! these 95 %.)

use super::{Mxcsr, Tile};
use std::arch::asm;

/// Registers of a row: even and odd chains (`$e0 $e1`, `$o0 $o1`) and totals (`$t0 $t1`) of both vectors.
macro_rules! tile {
    ($name:ident, $height:literal; $($r:literal $e0:literal $e1:literal $o0:literal $o1:literal $t0:literal $t1:literal)*) => {
        /// # Safety
        /// As [`super::run`].
        #[target_feature(enable = "avx512f,avx512bf16")]
        unsafe fn $name(tile: Tile) {
            let mut mxcsr = Mxcsr::new();
            // SAFETY: reads x and w to the end of the last group, reads and writes the totals; restores MXCSR.
            unsafe {
                asm!(
                    "stmxcsr [{mxcsr}]",
                    "ldmxcsr [{mxcsr} + 4]",
                    // Blocks of rows.
                    "3:",
                    concat!($(
                        "vmovaps zmm", $t0, ", [{sums} + 128*", $r, "]\n",
                        "vmovaps zmm", $t1, ", [{sums} + 128*", $r, " + 64]\n",
                    )*),
                    "mov {at}, {w}",
                    "mov {group}, {groups}",
                    ".p2align 5",
                    // Groups of K.
                    "2:",
                    concat!($(
                        "vpxord zmm", $e0, ", zmm", $e0, ", zmm", $e0, "\n", "vpxord zmm", $e1, ", zmm", $e1, ", zmm", $e1, "\n",
                        "vpxord zmm", $o0, ", zmm", $o0, ", zmm", $o0, "\n", "vpxord zmm", $o1, ", zmm", $o1, ", zmm", $o1, "\n",
                    )*),
                    // A pair of each chain.
                    concat!(
                        ".rept 8\n",
                        "vmovaps zmm30, [{at}]\n",
                        "vmovaps zmm31, [{at} + 64]\n",
                        "prefetcht1 [{ahead}]\n",
                        "add {ahead}, {stride}\n",
                        "prefetcht1 [{ahead}]\n",
                        "add {ahead}, {stride}\n",
                        "prefetcht1 [{ahead}]\n",
                        "add {ahead}, {stride}\n",
                        "prefetcht1 [{ahead}]\n",
                        "add {ahead}, {stride}\n",
                        $("vdpbf16ps zmm", $e0, ", zmm30, dword ptr [{x} + 4*", $r, "]{{1to16}}\n",
                        "vdpbf16ps zmm", $e1, ", zmm31, dword ptr [{x} + 4*", $r, "]{{1to16}}\n",)*
                        "vmovaps zmm30, [{at} + 128]\n",
                        "vmovaps zmm31, [{at} + 192]\n",
                        $("vdpbf16ps zmm", $o0, ", zmm30, dword ptr [{x} + 4*", $height, " + 4*", $r, "]{{1to16}}\n",
                        "vdpbf16ps zmm", $o1, ", zmm31, dword ptr [{x} + 4*", $height, " + 4*", $r, "]{{1to16}}\n",)*
                        "add {at}, 256\n",
                        "add {x}, 8*", $height, "\n",
                        ".endr\n",
                    ),
                    concat!($(
                        "vaddps zmm", $e0, ", zmm", $e0, ", zmm", $o0, "\n",
                        "vaddps zmm", $e1, ", zmm", $e1, ", zmm", $o1, "\n",
                        "vaddps zmm", $t0, ", zmm", $t0, ", zmm", $e0, "\n",
                        "vaddps zmm", $t1, ", zmm", $t1, ", zmm", $e1, "\n",
                    )*),
                    "dec {group}",
                    "jnz 2b",
                    concat!($(
                        "vmovaps [{sums} + 128*", $r, "], zmm", $t0, "\n",
                        "vmovaps [{sums} + 128*", $r, " + 64], zmm", $t1, "\n",
                    )*),
                    concat!("add {sums}, 128*", $height),
                    "add {x}, {skip}",
                    "dec {blocks}",
                    "jnz 3b",
                    "ldmxcsr [{mxcsr}]",
                    x = inout(reg) tile.x => _,
                    w = in(reg) tile.w,
                    at = out(reg) _,
                    groups = in(reg) tile.groups,
                    group = out(reg) _,
                    blocks = inout(reg) tile.blocks => _,
                    skip = in(reg) tile.skip,
                    sums = inout(reg) tile.sums => _,
                    mxcsr = in(reg) &raw mut mxcsr,
                    ahead = inout(reg) tile.ahead => _,
                    stride = in(reg) tile.ahead_stride,
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

tile!(tile1, 1; 0 0 1 2 3 4 5);
tile!(tile2, 2; 0 0 1 2 3 4 5 1 6 7 8 9 10 11);
tile!(tile3, 3; 0 0 1 2 3 4 5 1 6 7 8 9 10 11 2 12 13 14 15 16 17);
tile!(tile4, 4; 0 0 1 2 3 4 5 1 6 7 8 9 10 11 2 12 13 14 15 16 17 3 18 19 20 21 22 23);
tile!(tile5, 5; 0 0 1 2 3 4 5 1 6 7 8 9 10 11 2 12 13 14 15 16 17 3 18 19 20 21 22 23 4 24 25 26 27 28 29);

/// Tiles of 1 to 5 rows.
pub(super) static TILES: [unsafe fn(Tile); 5] = [tile1, tile2, tile3, tile4, tile5];
