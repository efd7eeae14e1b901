//! The products of tiles in scalar arithmetic.

use crate::numerics::flushed::{add, fma};
use half::bf16;

/// TDPBF16PS for one row and one lane, whose words are those of `a` and of `b`: Intel's manual, volume 2.
pub(super) fn tdpbf16ps(c: f32, a: &[u32], b: impl Iterator<Item = u32>) -> f32 {
    let [low, high] = [|word: u32| bf16::from_bits(word as u16), |word: u32| bf16::from_bits((word >> 16) as u16)];
    let (mut even, mut odd) = (0.0, 0.0);
    for (&a, b) in a.iter().zip(b) {
        even = fma(low(a), low(b), even);
        odd = fma(high(a), high(b), odd);
    }
    add(c, add(even, odd))
}

/// TDPBSSD for one row and one lane: Intel's manual, volume 2.
pub(super) fn tdpbssd(c: i32, a: &[i8], b: impl Iterator<Item = i8>) -> i32 {
    a.iter().zip(b).fold(c, |sum, (a, b)| sum.wrapping_add(i32::from(*a) * i32::from(b)))
}
