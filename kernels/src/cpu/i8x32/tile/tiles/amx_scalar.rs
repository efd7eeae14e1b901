//! The tiles of [`super::amx`] over a scalar TDPBSSD, so that packing and loops are tested on processors without it.

use super::{Dots, Product, Unpacked};
use crate::cpu::amx_scalar::tdpbssd;
use crate::cpu::i8x32::quantize::{ROWS_MAX, Record};

/// Sums of the two slots.
#[derive(Default)]
pub(crate) struct Tiles([[[[i32; 16]; ROWS_MAX]; 2]; 2]);

impl Product for Tiles {
    unsafe fn multiply<const SLOT: usize>(&mut self, halves: bool, x: *const Record, w: *const Unpacked) {
        // SAFETY: the caller's promise.
        let (x, w) = unsafe { (std::slice::from_raw_parts(x, ROWS_MAX), &*w) };
        let lines = if halves { 4 } else { 8 };
        for (half, sums) in self.0[SLOT].iter_mut().enumerate().take(if halves { 2 } else { 1 }) {
            let at = half * lines;
            for (sums, x) in sums.iter_mut().zip(x) {
                for (feature, sum) in sums.iter_mut().enumerate() {
                    let words = w.words[at..at + lines].iter().flat_map(|line| &line[feature * 4..feature * 4 + 4]);
                    *sum = tdpbssd(0, &x.q[at * 4..(at + lines) * 4], words.copied());
                }
            }
        }
    }

    unsafe fn store<const SLOT: usize>(&mut self, halves: bool, to: *mut Dots) {
        for half in 0..if halves { 2 } else { 1 } {
            // SAFETY: the caller's promise.
            unsafe { (&raw mut (*to).0[half]).write(self.0[SLOT][half]) };
        }
    }
}
