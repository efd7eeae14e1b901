//! Tiles of TDPBF16PS: for 16 rows and 16 features, `c += even + odd` over a group, subnormals zero; it neither reads nor writes MXCSR
//! (Intel's manual, volume 2). 32 rows and a panel take four accumulators, which share the loads of both operands.
//!
//! Registers: 0 and 1 the totals of the first 16 rows, 2 and 3 of the others; 4 and 5 activations; 6 and 7 weights. Tiles are released at
//! the end, so that the system need not save them.

use super::Tile;
use std::arch::asm;

/// Rows of one register.
const ROWS: usize = 16;

/// Operand of LDTILECFG.
#[repr(C, align(64))]
struct Config {
    palette: u8,
    start_row: u8,
    reserved: [u8; 14],
    /// Bytes of a row of each register.
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

impl Config {
    /// For the first `first` and `second` other rows.
    fn new([first, second]: [u8; 2]) -> Self {
        let rows_of = [first, first, second, second, first, second, 16, 16];
        let mut config = Self { palette: 1, start_row: 0, reserved: [0; 14], row_bytes: [0; 16], rows: [0; 16] };
        for (register, rows) in rows_of.into_iter().enumerate().filter(|(_, rows)| *rows > 0) {
            (config.rows[register], config.row_bytes[register]) = (rows, 64);
        }
        config
    }
}

/// The loops over blocks and groups; `$second` are instructions of the rows behind the first 16.
macro_rules! tile {
    ($name:ident, [$($load:literal)*], [$($multiply:literal)*], [$($store:literal)*]) => {
        /// # Safety
        /// As [`super::run`], for `rows` rows, which `config` has too.
        #[inline]
        unsafe fn $name(rows: usize, config: &Config, tile: Tile) {
            // SAFETY: reads x and w to the end of the last group, reads and writes the totals. The compiler uses no tile registers.
            unsafe {
                asm!(
                    "ldtilecfg [{config}]",
                    // Blocks of rows.
                    "3:",
                    "tileloadd tmm0, [{sums} + {line}]",
                    "tileloadd tmm1, [{sums} + {line} + 64]",
                    $($load,)*
                    "mov {at}, {w}",
                    "mov {group}, {groups}",
                    ".p2align 5",
                    // Groups of K.
                    "2:",
                    "tileloadd tmm6, [{at} + {line}]",
                    "tileloadd tmm4, [{x} + {half}]",
                    "tileloadd tmm7, [{at} + {line} + 64]",
                    "tdpbf16ps tmm0, tmm4, tmm6",
                    "tdpbf16ps tmm1, tmm4, tmm7",
                    $($multiply,)*
                    ".rept 32",
                    "prefetcht1 [{ahead}]",
                    "add {ahead}, {stride}",
                    ".endr",
                    "add {at}, 2048",
                    "add {x}, {step}",
                    "dec {group}",
                    "jnz 2b",
                    "tilestored [{sums} + {line}], tmm0",
                    "tilestored [{sums} + {line} + 64], tmm1",
                    $($store,)*
                    "lea {sums}, [{sums} + {step} * 2]",
                    "add {x}, {skip}",
                    "dec {blocks}",
                    "jnz 3b",
                    "tilerelease",
                    config = in(reg) config,
                    // Bytes of a row of totals or of weights, and of activations.
                    line = in(reg) 128usize,
                    half = in(reg) 64usize,
                    x = inout(reg) tile.x => _,
                    w = in(reg) tile.w,
                    at = out(reg) _,
                    groups = in(reg) tile.groups,
                    group = out(reg) _,
                    blocks = inout(reg) tile.blocks => _,
                    skip = in(reg) tile.skip,
                    step = in(reg) 64 * rows,
                    sums = inout(reg) tile.sums => _,
                    ahead = inout(reg) tile.ahead => _,
                    stride = in(reg) tile.ahead_stride,
                    options(nostack),
                );
            }
        }
    };
}

tile!(up_to_16, [], [], []);
tile!(
    up_to_32,
    ["tileloadd tmm2, [{sums} + {line} + 2048]" "tileloadd tmm3, [{sums} + {line} + 2112]"],
    ["tileloadd tmm5, [{x} + {half} + 1024]" "tdpbf16ps tmm2, tmm5, tmm6" "tdpbf16ps tmm3, tmm5, tmm7"],
    ["tilestored [{sums} + {line} + 2048], tmm2" "tilestored [{sums} + {line} + 2112], tmm3"]
);

/// # Safety
/// As [`super::run`].
pub(super) unsafe fn tile(rows: usize, tile: Tile) {
    let (first, second) = (rows.min(ROWS), rows.saturating_sub(ROWS));
    let config = Config::new([first as u8, second as u8]);
    // SAFETY: the caller's promise.
    unsafe { if second == 0 { up_to_16(rows, &config, tile) } else { up_to_32(rows, &config, tile) } }
}
