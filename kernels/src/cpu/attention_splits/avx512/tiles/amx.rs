//! The registers of AMX: 0 to 3 the totals of two panels, 4 queries or weights, 5 to 7 keys or values.

use super::super::PANEL_GROUP;
use super::{PANEL, Products, Tile};
use crate::cpu::amx::Config;
use std::arch::asm;

/// The registers during a task. They are configured for some queries, which takes longer than to multiply, and released at the end, so that the
/// system need not save them.
#[derive(Default)]
pub(in super::super) struct Registers {
    /// Queries that they are configured for; 0 if they are not.
    queries: usize,
}

impl Drop for Registers {
    fn drop(&mut self) {
        if self.queries > 0 {
            // SAFETY: the processor has the instruction, since they were configured.
            unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
        }
    }
}

/// For processors with [`crate::cpu::SimdLevel::Amx`], where nothing else on this thread uses the registers before these are dropped.
impl Products for Registers {
    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            self.configure(queries);
            each_pair(tile, pair_from_zero, one_from_zero);
        }
    }

    #[inline(always)]
    unsafe fn add_sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            self.configure(queries);
            each_pair(tile, pair_added, one_added);
        }
    }
}

impl Registers {
    /// # Safety
    /// As [`Products::sums`].
    unsafe fn configure(&mut self, queries: usize) {
        if self.queries != queries {
            let config = Config::new([queries as u8; 5].into_iter().chain([16; 3]));
            // SAFETY: a valid configuration. The compiler uses no tile registers.
            unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, preserves_flags)) };
            self.queries = queries;
        }
    }
}

/// # Safety
/// As [`Products::sums`], and the registers are configured.
#[inline(always)]
unsafe fn each_pair(tile: Tile, pair: unsafe fn(Tile), one: unsafe fn(Tile)) {
    for first in (0..tile.count).step_by(2) {
        let panels = tile.panels.wrapping_add(first * tile.groups * PANEL_GROUP);
        let tile = Tile { panels, out: tile.out.wrapping_add(first * PANEL), ..tile };
        // SAFETY: the caller's promise, for the panels from here on.
        unsafe { if first + 1 < tile.count { pair(tile) } else { one(tile) } }
    }
}

/// `$start`, `$multiply` and `$store` of a group of one or two panels.
macro_rules! panels {
    ($name:ident, [$($start:literal)*], [$($multiply:literal)*], [$($store:literal)*]) => {
        /// # Safety
        /// As [`each_pair`], for one or two panels.
        unsafe fn $name(tile: Tile) {
            // SAFETY: reads queries and panels to the end of the last group, reads and writes the output. The compiler uses no tile registers.
            unsafe {
                asm!(
                    $($start,)*
                    ".p2align 5",
                    "2:",
                    "tileloadd tmm4, [{x} + {stride}]",
                    "tileloadd tmm5, [{w} + {line}]",
                    "tdpbf16ps tmm0, tmm4, tmm5",
                    "tileloadd tmm6, [{w} + {line} + 64]",
                    "tdpbf16ps tmm1, tmm4, tmm6",
                    $($multiply,)*
                    "add {x}, 64",
                    "add {w}, 2048",
                    "add {second}, 2048",
                    "dec {groups}",
                    "jnz 2b",
                    "tilestored [{out} + {out_stride}], tmm0",
                    "tilestored [{out} + {out_stride} + 64], tmm1",
                    $($store,)*
                    // Bytes of a row of a panel.
                    line = in(reg) 128usize,
                    x = inout(reg) tile.queries => _,
                    stride = in(reg) tile.query_stride,
                    w = inout(reg) tile.panels => _,
                    second = inout(reg) tile.panels.wrapping_add(tile.groups * PANEL_GROUP) => _,
                    groups = inout(reg) tile.groups => _,
                    out = in(reg) tile.out,
                    out_stride = in(reg) tile.out_stride,
                    options(nostack),
                );
            }
        }
    };
}

panels!(one_from_zero, ["tilezero tmm0" "tilezero tmm1"], [], []);
panels!(
    one_added,
    ["tileloadd tmm0, [{out} + {out_stride}]" "tileloadd tmm1, [{out} + {out_stride} + 64]"],
    [],
    []
);
panels!(
    pair_from_zero,
    ["tilezero tmm0" "tilezero tmm1" "tilezero tmm2" "tilezero tmm3"],
    ["tileloadd tmm7, [{second} + {line}]" "tdpbf16ps tmm2, tmm4, tmm7" "tileloadd tmm5, [{second} + {line} + 64]" "tdpbf16ps tmm3, tmm4, tmm5"],
    ["tilestored [{out} + {out_stride} + 128], tmm2" "tilestored [{out} + {out_stride} + 192], tmm3"]
);
panels!(
    pair_added,
    ["tileloadd tmm0, [{out} + {out_stride}]" "tileloadd tmm1, [{out} + {out_stride} + 64]" "tileloadd tmm2, [{out} + {out_stride} + 128]" "tileloadd tmm3, [{out} + {out_stride} + 192]"],
    ["tileloadd tmm7, [{second} + {line}]" "tdpbf16ps tmm2, tmm4, tmm7" "tileloadd tmm5, [{second} + {line} + 64]" "tdpbf16ps tmm3, tmm4, tmm5"],
    ["tilestored [{out} + {out_stride} + 128], tmm2" "tilestored [{out} + {out_stride} + 192], tmm3"]
);

#[cfg(test)]
mod tests {
    use crate::cpu::amx::tiles_in_use;
    use crate::cpu::{SimdLevel, attention_splits};
    use baton_skips::{Need, skipped};

    #[test]
    fn attention_leaves_no_tiles_to_save() {
        if !SimdLevel::Amx.available() {
            return skipped(Need::Amx, "tiles after attention", "the processor has no AMX");
        }
        assert_eq!(attention_splits::known_answers(SimdLevel::Amx), Ok(true));
        assert!(!tiles_in_use());
    }
}
