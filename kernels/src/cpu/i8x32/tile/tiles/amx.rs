//! TDPBSSD.

use super::{Dots, Product, Unpacked};
use crate::cpu::amx::Config;
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};
use std::arch::asm;

/// Configured tiles, which are released when dropped, so that the system need not save them.
///
/// Registers: 0 and 1 the sums of slot 0 (the second for second halves), 2 and 3 those of slot 1; 4 activations, 5 weights.
pub(crate) struct Tiles(());

impl Tiles {
    /// # Safety
    /// The processor has tiles, which this thread does not use.
    pub(super) unsafe fn new(halves: bool) -> Self {
        let rows = ROWS_MAX as u8;
        // 16 or 32 k of each row, in lines of 4.
        let (x, w) = if halves { ((rows, 16), (4, 64)) } else { ((rows, 32), (8, 64)) };
        let config = Config::of([(rows, 64), (rows, 64), (rows, 64), (rows, 64), x, w]);
        // SAFETY: a valid configuration; the compiler uses no tile registers.
        unsafe { asm!("ldtilecfg [{}]", in(reg) &config, options(nostack, readonly, preserves_flags)) };
        Self(())
    }
}

impl Drop for Tiles {
    fn drop(&mut self) {
        // SAFETY: this thread has configured tiles.
        unsafe { asm!("tilerelease", options(nomem, nostack, preserves_flags)) };
    }
}

impl Product for Tiles {
    #[inline(always)]
    unsafe fn multiply<const SLOT: usize>(&mut self, halves: bool, x: *const Record, w: *const Unpacked) {
        // SAFETY: reads 16 records and a block; the compiler uses no tile registers.
        unsafe {
            asm!(
                "tilezero tmm{sums}",
                "tileloadd tmm5, [{w} + {line}]",
                "tileloadd tmm4, [{x} + {line}]",
                "tdpbssd tmm{sums}, tmm4, tmm5",
                sums = const 2 * SLOT, x = in(reg) x, w = in(reg) w, line = in(reg) 64usize,
                options(nostack, readonly, preserves_flags),
            );
            if halves {
                asm!(
                    "tilezero tmm{sums}",
                    "tileloadd tmm5, [{w} + {line} + 256]",
                    "tileloadd tmm4, [{x} + {line} + 16]",
                    "tdpbssd tmm{sums}, tmm4, tmm5",
                    sums = const 2 * SLOT + 1, x = in(reg) x, w = in(reg) w, line = in(reg) 64usize,
                    options(nostack, readonly, preserves_flags),
                );
            }
        }
    }

    #[inline(always)]
    unsafe fn store<const SLOT: usize>(&mut self, halves: bool, to: *mut Dots) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilestored [{to} + {line}], tmm{sums}",
                sums = const 2 * SLOT, to = in(reg) to, line = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
            if halves {
                asm!(
                    "tilestored [{to} + {line} + 1024], tmm{sums}",
                    sums = const 2 * SLOT + 1, to = in(reg) to, line = in(reg) 64usize,
                    options(nostack, preserves_flags),
                );
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::cpu::amx::tiles_in_use;
    use crate::cpu::{SimdLevel, i8x32};
    use baton_skips::{Need, skipped};

    #[test]
    fn products_leave_no_tiles_to_save() {
        if !SimdLevel::Amx.available() {
            return skipped(Need::Amx, "tiles after products of i8x32", "the processor has no AMX");
        }
        assert_eq!(i8x32::known_answers(SimdLevel::Amx), Ok(true));
        assert!(!tiles_in_use());
    }
}
