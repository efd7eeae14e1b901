//! TDPBSSD.

use super::{Dots, Product, Unpacked};
use crate::cpu::amx::{Config, Configured};
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};
use std::arch::asm;

/// Registers: 0 and 1 the sums of slot 0 (the second for second halves), 2 and 3 those of slot 1; 4 activations, 5 weights.
pub(super) struct Registers {
    /// Whether halves of a block are apart.
    halves: bool,
    _configured: Configured,
}

impl Registers {
    /// # Safety
    /// As [`Configured::new`].
    pub(super) unsafe fn new(halves: bool) -> Self {
        let rows = ROWS_MAX as u8;
        // 16 or 32 k of each row, in lines of 4.
        let (x, w) = if halves { ((rows, 16), (4, 64)) } else { ((rows, 32), (8, 64)) };
        let config = Config::of([(rows, 64), (rows, 64), (rows, 64), (rows, 64), x, w]);
        // SAFETY: the caller's promise.
        Self { halves, _configured: unsafe { Configured::new(&config) } }
    }
}

impl Product for Registers {
    #[inline(always)]
    unsafe fn multiply<const SLOT: usize, const HALVES: bool>(&mut self, x: *const Record, w: *const Unpacked) {
        debug_assert_eq!(HALVES, self.halves);
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
            if HALVES {
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
    unsafe fn store<const SLOT: usize, const HALVES: bool>(&mut self, to: *mut Dots) {
        // SAFETY: the caller's promise.
        unsafe {
            asm!(
                "tilestored [{to} + {line}], tmm{sums}",
                sums = const 2 * SLOT, to = in(reg) to, line = in(reg) 64usize,
                options(nostack, preserves_flags),
            );
            if HALVES {
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
