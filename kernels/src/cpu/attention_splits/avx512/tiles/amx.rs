//! The registers of AMX: 0 to 3 the totals of two panels, 4 queries or weights, 5 to 7 keys or values. For few queries: 0 and 1 the totals of a
//! panel, 2 and 3 the scores of 16 tokens each, 4 weights, 5 and 6 keys or values, 7 queries.

use super::super::PANEL_GROUP;
use super::super::pack::{quarters_as_rows, words_as_rows};
use super::{FEW, PANEL, Place, Products, QUERY_GROUP, Tile, fetch};
use crate::cpu::amx::{Config, Configured};
use crate::cpu::fused::share;
use crate::cpu::lines::Lines;
use std::arch::asm;
use std::arch::x86_64::*;
use std::cell::Cell;

/// Words of few queries in one group, `[16 pairs][FEW]`.
const FEW_GROUP: usize = QUERY_GROUP * FEW;

thread_local! {
    static QUERIES: Cell<Lines> = const { Cell::new(Lines::new()) };
}

/// The registers during a task. They are configured for some queries, which takes longer than to multiply.
#[derive(Default)]
pub(in super::super) struct Registers {
    configured: Option<Configured>,
    /// Queries that they are configured for; 0 if they are not.
    queries: usize,
}

/// For processors with [`crate::cpu::SimdLevel::Amx`], where nothing else on this thread uses the registers before these are dropped.
impl Products for Registers {
    #[inline(always)]
    unsafe fn sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            self.configure(queries);
            if queries > FEW { each_pair(tile, pair_from_zero, one_from_zero) } else { each_one(tile, one_from_zero) }
        }
    }

    #[inline(always)]
    unsafe fn few_sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            self.configure(queries);
            few_sums(queries, tile);
        }
    }

    #[inline(always)]
    unsafe fn add_sums(&mut self, queries: usize, tile: Tile) {
        // SAFETY: the caller's promise.
        unsafe {
            self.configure(queries);
            if queries > FEW { each_pair(tile, pair_added, one_added) } else { each_one(tile, one_added) }
        }
    }
}

impl Registers {
    /// # Safety
    /// As [`Products::sums`].
    unsafe fn configure(&mut self, queries: usize) {
        if self.queries != queries {
            let rows = queries as u8;
            let config = if queries > FEW {
                Config::new([rows; 5].into_iter().chain([16; 3]))
            } else {
                let few = 4 * FEW as u16;
                Config::of([(rows, 64), (rows, 64), (16, few), (16, few), (rows, 64), (16, 64), (16, 64), (16, few)])
            };
            match &mut self.configured {
                Some(configured) => configured.change(&config),
                // SAFETY: the caller's promise: the level has tiles, which nothing else on this thread uses during a task.
                None => self.configured = Some(unsafe { Configured::new(&config) }),
            }
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

/// # Safety
/// As [`each_pair`].
#[inline(always)]
unsafe fn each_one(tile: Tile, one: unsafe fn(Tile)) {
    for panel in 0..tile.count {
        let panels = tile.panels.wrapping_add(panel * tile.groups * PANEL_GROUP);
        // SAFETY: the caller's promise.
        unsafe { one(Tile { panels, out: tile.out.wrapping_add(panel * PANEL), ..tile }) };
    }
}

/// # Safety
/// As [`Products::few_sums`], and the registers are configured.
#[target_feature(enable = "avx512f")]
unsafe fn few_sums(queries: usize, tile: Tile) {
    let mut lines = QUERIES.take();
    let packed = lines.room::<u32>(tile.groups * FEW_GROUP);
    // SAFETY: the caller's promise; room for all groups.
    unsafe {
        let at = |query: usize| tile.queries.byte_add(query * tile.query_stride);
        for group in 0..tile.groups {
            let mut words = [_mm512_setzero_si512(); FEW];
            for (query, words) in words.iter_mut().take(queries).enumerate() {
                *words = _mm512_loadu_si512(at(query).add(group * QUERY_GROUP).cast());
            }
            for (i, words) in quarters_as_rows(words_as_rows(words)).into_iter().enumerate() {
                _mm512_store_si512(packed.add(group * FEW_GROUP + i * 16).cast(), words);
            }
        }
        for panel in 0..tile.count {
            fetch(tile, share(tile.next_rows, panel, tile.count));
            let places = *tile.panels.cast::<[Place; 2]>().add(panel);
            let scores = panel_scores(packed, places, tile.groups);
            for (half, scores) in scores.0.iter().enumerate() {
                let rows = words_as_rows(quarters_as_rows(scores.map(|row| _mm512_loadu_si512(row.as_ptr().cast()))));
                for (query, row) in rows.into_iter().take(queries).enumerate() {
                    let out = tile.out.byte_add(query * tile.out_stride).add(panel * PANEL + half * 16);
                    _mm512_store_si512(out.cast(), row);
                }
            }
        }
    }
    QUERIES.set(lines);
}

/// Scores of twice 16 tokens, `[tokens][FEW]`, in lines of four tokens.
#[repr(C, align(64))]
struct PanelScores([[[f32; 16]; 4]; 2]);

/// # Safety
/// The registers are configured for few queries; `queries` and the keys are readable for all groups.
#[inline(always)]
unsafe fn panel_scores(queries: *const u32, [first, second]: [Place; 2], groups: usize) -> PanelScores {
    let mut scores = std::mem::MaybeUninit::<PanelScores>::uninit();
    // SAFETY: reads queries and twice 16 keys to the end of the last group, writes the scores. The compiler uses no tile registers.
    unsafe {
        asm!(
            "tilezero tmm2",
            "tilezero tmm3",
            "2:",
            "tileloadd tmm7, [{x} + {few}]",
            "tileloadd tmm5, [{first} + {first_stride}]",
            "tdpbf16ps tmm2, tmm5, tmm7",
            "tileloadd tmm6, [{second} + {second_stride}]",
            "tdpbf16ps tmm3, tmm6, tmm7",
            "add {x}, 256",
            "add {first}, 64",
            "add {second}, 64",
            "dec {groups}",
            "jnz 2b",
            "tilestored [{out} + {few}], tmm2",
            "tilestored [{out} + {few} + 256], tmm3",
            few = in(reg) 4 * FEW,
            x = inout(reg) queries => _,
            first = inout(reg) first.first => _,
            first_stride = in(reg) first.stride,
            second = inout(reg) second.first => _,
            second_stride = in(reg) second.stride,
            groups = inout(reg) groups => _,
            out = in(reg) scores.as_mut_ptr(),
            options(nostack),
        );
        scores.assume_init()
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
