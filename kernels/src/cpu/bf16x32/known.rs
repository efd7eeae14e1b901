//! Known answers: inputs whose result shows where an instruction set leaves the order of the class. A process checks them at its start,
//! in some microseconds, before it says that it computes the class.

use super::gemm::{Epilogue, gemm};
use super::gemv::gemv;
use super::pack::{PANEL, Rows, Weights};
use super::{GROUP, SimdLevel};
use crate::cpu::known::{BIG, power};
use crate::cpu::source::Source;
use crate::device::DeviceError;
use half::bf16;

/// K of every case: two groups.
const K: usize = 2 * GROUP;

/// A sum with few elements that are not zero.
struct Case {
    /// Element k, x and w.
    elements: &'static [(usize, f32, f32)],
    /// Bits of the sum; any NaN equals any other.
    expected: u32,
}

const LEAST: f32 = power(-63); // LEAST * LEAST is the least normal number.
const ZERO: u32 = 0;
const MINUS_ZERO: u32 = 1 << 31;
const ONE: u32 = 0x3f80_0000;
const LEAST_SQUARED: u32 = 0x0080_0000;

const CASES: &[Case] = &[
    // Within a pair, element k comes before k + 2: (1 + big) - big.
    Case { elements: &[(0, 1.0, 1.0), (4, BIG, BIG), (6, BIG, -BIG)], expected: ZERO },
    // Pairs ascend, to the last of the group.
    Case { elements: &[(1, 1.0, 1.0), (29, -BIG, BIG), (31, BIG, BIG)], expected: ONE },
    Case { elements: &[(1, 1.0, 1.0), (29, BIG, BIG), (31, BIG, -BIG)], expected: ZERO },
    // Even and odd chains are apart: big - big, and 1.
    Case { elements: &[(0, BIG, BIG), (1, 1.0, 1.0), (2, BIG, -BIG)], expected: ONE },
    // A group's chains start from zero: 1 + (big - big).
    Case { elements: &[(0, 1.0, 1.0), (32, BIG, BIG), (34, BIG, -BIG)], expected: ONE },
    // Even and odd are added before the total: 1 + (big - big) again.
    Case { elements: &[(0, 1.0, 1.0), (32, BIG, BIG), (33, BIG, -BIG)], expected: ONE },
    // A subnormal result within a chain is zero.
    Case { elements: &[(0, power(-100), power(-30)), (2, LEAST, LEAST)], expected: LEAST_SQUARED },
    // A result is subnormal if it is so after rounding to 24 bits: 2^-126 - 2^-150, but not 2^-126 - 2^-151.
    Case { elements: &[(0, LEAST, LEAST), (2, power(-100), -power(-50))], expected: ZERO },
    Case { elements: &[(0, LEAST, LEAST), (2, power(-100), -power(-51))], expected: LEAST_SQUARED },
    // Subnormal inputs are zero, also times infinity.
    Case { elements: &[(0, power(-127), BIG), (1, BIG, power(-133))], expected: ZERO },
    Case { elements: &[(3, f32::INFINITY, power(-127))], expected: 0x7fc0_0000 },
    // Subnormal sums of even and odd, and of the total, are zero and keep their sign.
    Case { elements: &[(0, LEAST, 1.5 * LEAST), (1, LEAST, -LEAST)], expected: ZERO },
    Case { elements: &[(0, LEAST, LEAST), (32, LEAST, -1.5 * LEAST)], expected: MINUS_ZERO },
    // A chain starts from +0.
    Case { elements: &[(0, -0.0, 1.0), (1, 1.0, -0.0), (32, -0.0, 1.0)], expected: ZERO },
    // Overflow of a product.
    Case { elements: &[(5, power(127), 2.0), (40, 1.0, 1.0)], expected: 0x7f80_0000 },
];

/// Rows, and features: the cases fill the first 16 but for one, and the others repeat them, as tiles and vectors are of 16.
const REPEATED: usize = 16 + CASES.len();

/// Compares each case's sums, which stand where its rows meet its features.
struct Check {
    first_row: usize,
    right: bool,
}

impl Epilogue for Check {
    fn put(&mut self, row: usize, panel: usize, sums: &[f32; PANEL]) {
        let at = (self.first_row + row) % 16;
        let Some(case) = CASES.get(at) else { return };
        for feature in [at, at + 16].into_iter().filter(|feature| feature / PANEL == panel) {
            self.right &= same(sums[feature % PANEL], f32::from_bits(case.expected));
        }
    }
}

/// Equal bits, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Whether these instructions give the known answers on this processor. Microseconds.
///
/// # Errors
/// If there is no memory for the weights.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let mut x = vec![0.0; REPEATED * K];
    for (row, x) in x.chunks_exact_mut(K).enumerate() {
        if let Some(case) = CASES.get(row % 16) {
            case.elements.iter().for_each(|&(k, of_x, _)| x[k] = of_x);
        }
    }
    let w = Weights::pack(level, &[REPEATED], K, |_, feature, out| {
        out.fill(bf16::ZERO);
        if let Some(case) = CASES.get(feature % 16) {
            case.elements.iter().for_each(|&(k, _, w)| out[k] = bf16::from_f32(w));
        }
    })?;
    let mut check = Check { first_row: 0, right: true };
    let mut rows = Rows::default();
    rows.pack(level, REPEATED, K, &mut Source::dense(&x, K));
    gemm(&rows, &w, 0..w.panels(), &mut check);
    for x in x.chunks(K).take(CASES.len()) {
        rows.pack(level, 1, K, &mut Source::dense(x, K));
        gemv(&rows, &w, 0..w.panels(), &mut check);
        check.first_row += 1;
    }
    Ok(check.right)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::slice::HalfFloatSliceExt;

    #[test]
    fn the_reference_gives_the_known_answers() {
        for (index, case) in CASES.iter().enumerate() {
            let (mut x, mut w) = ([bf16::ZERO; K], [bf16::ZERO; K]);
            for &(k, a, b) in case.elements {
                (x[k], w[k]) = (bf16::from_f32(a), bf16::from_f32(b));
                assert_eq!((x[k].to_f32(), w[k].to_f32()), (a, b), "inputs are bf16");
            }
            let sum = crate::numerics::flushed::dot(x.reinterpret_cast(), w.reinterpret_cast());
            assert!(same(sum, f32::from_bits(case.expected)), "case {index}: {:08x}", sum.to_bits());
        }
    }

    #[test]
    fn one_wrong_sum_is_enough() {
        let right =
            std::array::from_fn(|feature| CASES.get(feature % 16).map_or(0.0, |case| f32::from_bits(case.expected)));
        for (row, feature) in [(0, 0), (0, 16), (16, 0), (16, 16)] {
            let mut check = Check { first_row: 0, right: true };
            check.put(row, 0, &right);
            assert!(check.right);
            let mut sums = right;
            sums[feature] = -0.0; // The first case is +0.
            check.put(row, 0, &sums);
            assert!(!check.right, "row {row}, feature {feature}");
            check.put(1, 0, &right);
            assert!(!check.right, "right ones behind it change nothing");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
