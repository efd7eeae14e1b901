//! Known answers: inputs whose result shows where an instruction set leaves the order of the class. A process checks them at its start, in
//! some microseconds, before it says that it computes the class.

use super::linear::{PanelVectors, product};
use super::pack::{PairStep, Panels, WideStep, fill};
use crate::cpu::SimdLevel;
use crate::cpu::known::{BIG, power};
use crate::cpu::target::Target;
use crate::device::DeviceError;
use crate::host::Store;
use baton_types::Dtype;

/// K of every case.
const K: usize = 4;
/// Panels that pass together over one row, and the first feature of another.
const FEATURES: usize = 8 * super::pack::PANEL + 1;

/// A sum of K products.
struct Case {
    x: [f32; K],
    /// Exact in bf16.
    w: [f32; K],
    /// Bits of the sum.
    expected: u32,
}

const ABOVE: f32 = 1.0 + 0.007_812_5; // 1 + 2^-7

const CASES: &[Case] = &[
    // One rounding: with two, the product is 1 + 2^-7 + 2^-23 and the sum 2^-23.
    Case { x: [1.0, 1.0 + f32::EPSILON, 0.0, 0.0], w: [-ABOVE, ABOVE, 0.0, 0.0], expected: 0x3401_0000 },
    // K ascends.
    Case { x: [1.0, BIG, BIG, 0.0], w: [1.0, BIG, -BIG, 0.0], expected: 0 },
    Case { x: [BIG, BIG, 1.0, 0.0], w: [BIG, -BIG, 1.0, 0.0], expected: 0x3f80_0000 },
    Case { x: [0.0, BIG, BIG, 1.0], w: [0.0, BIG, -BIG, 1.0], expected: 0x3f80_0000 },
    // Subnormal results, x and weights count.
    Case { x: [power(-100), 0.0, 0.0, 0.0], w: [power(-30), 0.0, 0.0, 0.0], expected: 0x0008_0000 },
    Case { x: [0.0, power(-130), 0.0, 0.0], w: [0.0, power(100), 0.0, 0.0], expected: 0x3080_0000 },
    Case { x: [0.0, 0.0, power(100), 0.0], w: [0.0, 0.0, power(-133), 0.0], expected: 0x2f00_0000 },
    // A sum starts from +0.
    Case { x: [-0.0, 0.0, 0.0, -0.0], w: [1.0, -1.0, -0.0, 1.0], expected: 0 },
    // Overflow of a product.
    Case { x: [0.0, 0.0, 0.0, power(127)], w: [0.0, 0.0, 0.0, 2.0], expected: 0x7f80_0000 },
];

/// Whether these instructions give the known answers on this processor. Microseconds.
///
/// # Errors
/// If there is no memory for the weights.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    Ok(is_right(level, Dtype::Bf16)? && is_right(level, Dtype::F32)?)
}

fn is_right(level: SimdLevel, weights: Dtype) -> Result<bool, DeviceError> {
    let mut panels = Panels::zeroed(FEATURES, K, weights)?;
    let read = |feature: usize, out: &mut [f32]| out.copy_from_slice(&CASES[feature % CASES.len()].w);
    if weights == Dtype::Bf16 {
        fill::<PairStep>(&mut panels, read)
    } else {
        fill::<WideStep>(&mut panels, read)
    }
    let vectors = PanelVectors::of(level);
    let right = [1, 2, 3, vectors.rows_max()].into_iter().all(|rows| {
        // Rows meet the features of their own case; the first row's case changes, so that each has been one of few rows.
        (0..CASES.len()).all(|first| {
            let x: Vec<f32> = (first..first + rows).flat_map(|row| CASES[row % CASES.len()].x).collect();
            let mut out = vec![f32::NAN; rows * FEATURES];
            // SAFETY: `out` has `[rows, FEATURES]` elements, and this is the only task.
            let target = unsafe { Target::new(out.as_mut_ptr(), FEATURES, 0..FEATURES, Store::Set) };
            product(vectors, &x, &panels, 1, target);
            let set = out.clone();
            // SAFETY: as above.
            let target = unsafe { Target::new(out.as_mut_ptr(), FEATURES, 0..FEATURES, Store::Add) };
            product(vectors, &x, &panels, 1, target);
            let rows = set.chunks_exact(FEATURES).zip(out.chunks_exact(FEATURES));
            rows.enumerate().all(|(row, (set, twice))| {
                let case = (first + row) % CASES.len();
                let sum = f32::from_bits(CASES[case].expected);
                let mut both = set.iter().zip(twice).skip(case).step_by(CASES.len());
                // Twice a number is exact.
                both.all(|(set, twice)| set.to_bits() == sum.to_bits() && twice.to_bits() == (sum + sum).to_bits())
            })
        })
    });
    Ok(right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_gives_the_known_answers() {
        for (index, case) in CASES.iter().enumerate() {
            let sum = case.x.iter().zip(case.w).fold(0.0f32, |acc, (x, w)| x.mul_add(w, acc));
            assert_eq!(sum.to_bits(), case.expected, "case {index}: {sum:e}");
            assert!(case.w.iter().all(|w| half::bf16::from_f32(*w).to_f32() == *w), "case {index}: weights are bf16");
        }
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
