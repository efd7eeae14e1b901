//! A scalar TDPBSSD, so that packing and loops are tested on processors without it.

use super::{Dots, Product, Unpacked};
use crate::cpu::amx_scalar::tdpbssd;
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};

/// Sums of the two slots.
#[derive(Default)]
pub(super) struct Registers([[[[i32; 16]; ROWS_MAX]; 2]; 2]);

impl Product for Registers {
    unsafe fn multiply<const SLOT: usize, const HALVES: bool>(&mut self, x: *const Record, w: *const Unpacked) {
        // SAFETY: the caller's promise.
        let (x, w) = unsafe { (std::slice::from_raw_parts(x, ROWS_MAX), &*w) };
        let (halves, lines) = if HALVES { (2, 4) } else { (1, 8) };
        for (half, sums) in self.0[SLOT].iter_mut().enumerate().take(halves) {
            let at = half * lines;
            for (sums, x) in sums.iter_mut().zip(x) {
                for (feature, sum) in sums.iter_mut().enumerate() {
                    let words = w.words[at..at + lines].iter().flat_map(|line| &line[feature * 4..feature * 4 + 4]);
                    *sum = tdpbssd(0, &x.q[at * 4..(at + lines) * 4], words.copied());
                }
            }
        }
    }

    unsafe fn store<const SLOT: usize, const HALVES: bool>(&mut self, to: *mut Dots) {
        for half in 0..if HALVES { 2 } else { 1 } {
            // SAFETY: the caller's promise.
            unsafe { (&raw mut (*to).0[half]).write(self.0[SLOT][half]) };
        }
    }
}
