//! Tiles of TDPBF16PS: for 16 rows and 16 features, `c += even + odd` over a group, subnormals zero; it neither reads nor writes MXCSR
//! (Intel's manual, volume 2). 32 rows and a panel take four accumulators, which share the loads of both operands.
//!
//! Registers: 0 and 1 the totals of the first 16 rows, 2 and 3 of the others; 4 and 5 activations; 6 and 7 weights. Tiles are released at
//! the end, so that the system need not save them.

use super::{GROUP_WORDS, Tile};
use crate::cpu::amx::Config;
use std::arch::asm;

/// Rows of one register.
const ROWS: usize = 16;

/// What the code keeps in memory, for lack of registers.
#[repr(C)]
struct Control {
    config: Config,
    groups: usize,
    skip: usize,
    /// Lines that each group of each block prefetches.
    lines: usize,
    /// Whether totals start at zero, else at what they are.
    from_zero: usize,
    /// Bytes of the totals of a block.
    sums_block: usize,
}

/// The loops over blocks and groups; `$second` are instructions of the rows behind the first 16: to start at zero, to load, to multiply and to store.
macro_rules! tile {
    ($name:ident, [$($zero:literal)*], [$($load:literal)*], [$($multiply:literal)*], [$($store:literal)*]) => {
        /// # Safety
        /// As [`super::run`], for `rows` rows, which the configuration has too.
        #[inline]
        unsafe fn $name(rows: usize, control: &Control, tile: Tile) {
            // SAFETY: reads x and w to the end of the last group, reads and writes the totals. The compiler uses no tile registers.
            unsafe {
                asm!(
                    "ldtilecfg [{control}]",
                    // Blocks of rows.
                    "2:",
                    "cmp qword ptr [{control} + 88], 0",
                    "je 3f",
                    "tilezero tmm0",
                    "tilezero tmm1",
                    $($zero,)*
                    "jmp 4f",
                    "3:",
                    "tileloadd tmm0, [{sums} + {line}]",
                    "tileloadd tmm1, [{sums} + {line} + 64]",
                    $($load,)*
                    "4:",
                    "mov {at}, {w}",
                    "mov {group}, [{control} + 64]",
                    ".p2align 5",
                    // Groups of K.
                    "5:",
                    "tileloadd tmm6, [{at} + {half} * 2]",
                    "tileloaddt1 tmm4, [{x} + {half}]",
                    "tileloadd tmm7, [{at} + {half} * 2 + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    $($multiply,)*
                    "mov {lines}, [{control} + 80]",
                    "test {lines}, {lines}",
                    "jz 7f",
                    "6:",
                    "prefetcht1 [{ahead}]",
                    "add {ahead}, 64",
                    "dec {lines}",
                    "jnz 6b",
                    "7:",
                    "add {at}, 2048",
                    "add {x}, {step}",
                    "dec {group}",
                    "jnz 5b",
                    "tilestored [{sums} + {line}], tmm0",
                    "tilestored [{sums} + {line} + 64], tmm1",
                    $($store,)*
                    "add {sums}, [{control} + 96]",
                    "add {second}, [{control} + 96]",
                    "add {x}, [{control} + 72]",
                    "dec {blocks}",
                    "jnz 2b",
                    "tilerelease",
                    control = in(reg) control,
                    // Bytes of a row of activations; a row of weights has twice as many.
                    half = in(reg) 64usize,
                    // Bytes from one row of totals to the next.
                    line = in(reg) tile.sums_stride,
                    x = inout(reg) tile.x => _,
                    w = in(reg) tile.w,
                    at = out(reg) _,
                    group = out(reg) _,
                    lines = out(reg) _,
                    blocks = inout(reg) tile.blocks => _,
                    step = in(reg) 64 * rows,
                    sums = inout(reg) tile.sums => _,
                    second = inout(reg) tile.sums.wrapping_byte_add(ROWS * tile.sums_stride) => _,
                    ahead = inout(reg) tile.ahead => _,
                    options(nostack),
                );
            }
        }
    };
}

tile!(up_to_16, [], [], [], []);
tile!(
    up_to_32,
    ["tilezero tmm2" "tilezero tmm3"],
    ["tileloadd tmm2, [{second} + {line}]" "tileloadd tmm3, [{second} + {line} + 64]"],
    ["tileloaddt1 tmm5, [{x} + {half} + 1024]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
    ["tilestored [{second} + {line}], tmm2" "tilestored [{second} + {line} + 64], tmm3"]
);

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn tile(rows: usize, tile: Tile) {
    let (first, second) = (rows.min(ROWS) as u8, rows.saturating_sub(ROWS) as u8);
    let control = Control {
        config: Config::new([first, first, second, second, first, second, 16, 16]),
        groups: tile.groups,
        skip: tile.skip,
        // About as many bytes as the other kernels, which prefetch once for each line of weights; none among very many blocks.
        lines: tile.ahead_stride * (GROUP_WORDS / 16) / 64,
        from_zero: usize::from(tile.from_zero),
        sums_block: rows * tile.sums_stride,
    };
    // SAFETY: the caller's promise.
    unsafe { if second == 0 { up_to_16(rows, &control, tile) } else { up_to_32(rows, &control, tile) } }
}

#[cfg(test)]
mod tests {
    use crate::cpu::amx::tiles_in_use;
    use crate::cpu::{SimdLevel, bf16x32};
    use baton_skips::{Need, skipped};

    #[test]
    fn products_leave_no_tiles_to_save() {
        if !SimdLevel::Amx.available() {
            return skipped(Need::Amx, "tiles after products", "the processor has no AMX");
        }
        assert_eq!(bf16x32::known_answers(SimdLevel::Amx), Ok(true));
        assert!(!tiles_in_use());
    }
}
