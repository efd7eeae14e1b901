//! Known answers: inputs whose result shows where an instruction set leaves the order of the class. A process checks them at its start, in
//! some microseconds, before it says that it computes the class.

use super::gemm::{Epilogue, gemm};
use super::level::Level;
use super::{BLOCK, PANEL, Rows, Threads, Weights};
use crate::cpu::SimdLevel;
use crate::cpu::source::Source;
use crate::cpu::stored::Format;
use crate::device::DeviceError;

/// Blocks of K of a case.
const BLOCKS: usize = 3;

/// One row of x and one feature in Q4_1, Q8_0 or Q6_K, a few values of which are not zero.
struct Case {
    format: Format,
    /// Element k of x and its value. A block's first is its largest.
    x: &'static [(usize, f32)],
    /// For each block d and, in Q4_1, m, as bits of f16; of all integers of w. In Q6_K the first is of all blocks, and m the scales of the first
    /// and the second 16 of each.
    w: [(u16, u16, i8); BLOCKS],
    /// Bits of the sum; any NaN equals any other.
    expected: u32,
}

/// 1, -1 and 2^-24 as bits of f16.
const ONE: u16 = 0x3c00;
const MINUS: u16 = 0xbc00;
const LEAST: u16 = 1;
/// 1365 / 4096, the f16 next to a third.
const THIRD: u16 = 0x3555;
const NONE: (u16, u16, i8) = (0, 0, 0);
const NAN: u32 = 0x7fc0_0000;
const BIG: f32 = 127.0 * 16_777_216.0;
/// 2^-72 and the next below.
const SMALLEST: f32 = f32::from_bits(55 << 23);
const TOO_SMALL: f32 = f32::from_bits((55 << 23) - 1);

const CASES: &[Case] = &[
    // Ties to even: 0.5, 1.5, 2.5, -2.5 of 127 are 0, 2, 2, -2.
    case(
        Format::Q8_0,
        &[(0, 127.0), (1, 0.5), (5, 1.5), (16, 2.5), (31, -2.5)],
        [(ONE, 0, 1), NONE, NONE],
        0x4301_0000,
    ),
    // The extremes of bytes: -127 * -128 * 32 = 520192, and 127 * 127 * 32.
    case(Format::Q8_0, ALL_MINUS, [(ONE, 0, -128), NONE, NONE], 0x48fe_0000),
    case(Format::Q8_0, ALL_MINUS, [(ONE, 0, 127), NONE, NONE], 0xc8fc_0400),
    // And of nibbles: 127 * 15 * 32 would saturate i16.
    case(Format::Q4_1, ALL_MINUS, [(ONE, 0, 15), NONE, NONE], 0xc76e_2000),
    // Blocks ascend: 2^24 + 1 - 2^24 is 0, 2^24 - 2^24 + 1 is 1.
    case(Format::Q8_0, &[(0, BIG), (32, 127.0), (64, BIG)], [(ONE, 0, 1), (ONE, 0, 1), (MINUS, 0, 1)], 0x4300_0000),
    case(Format::Q8_0, &[(0, BIG), (32, BIG), (64, 127.0)], [(ONE, 0, 1), (MINUS, 0, 1), (ONE, 0, 1)], 0x42fe_0000),
    // The product w_d * Q is rounded: fused with what follows, the last bit is another.
    case(Format::Q8_0, &[(0, 3.0), (33, 1.0)], [(THIRD, 0, 127), (THIRD, 0, -77), NONE], 0x42ca_9dff),
    case(Format::Q8_0, &[(0, 5.0), (1, 2.5)], [(0x2e67, 0, -114), NONE, NONE], 0xc2ab_82f8),
    // The minimum goes with the sum of x, in one rounding with w_d * Q: with two, this is 42f568b5.
    case(Format::Q4_1, EVENS, [(0x31c1, 0xb18a, 15), NONE, NONE], 0x42f5_68b3),
    // A scale that is subnormal in f16.
    case(Format::Q4_1, &[(0, 5.0), (7, -1.0), (40, 0.3)], [(THIRD, MINUS, 7), (LEAST, THIRD, 15), NONE], 0x40ae_76f1),
    // Blocks of small values are zero, from 2^-72 on they are not.
    case(Format::Q8_0, &[(0, TOO_SMALL)], [(ONE, 0, 1), NONE, NONE], 0),
    case(Format::Q8_0, &[(0, SMALLEST)], [(ONE, 0, 1), NONE, NONE], 0x1b80_0000),
    // What is not finite makes the row NaN, also against zeros.
    case(Format::Q8_0, &[(0, f32::INFINITY), (1, 1.0)], [NONE, (ONE, 0, 1), NONE], NAN),
    case(Format::Q4_1, &[(70, f32::NAN)], [(ONE, ONE, 1), NONE, NONE], NAN),
    // Two scales of a block: the product with the first is rounded, then that with the second is added in one rounding. Exchanged, or with two
    // roundings, the last bits are others.
    case(Format::Q6K, HALVES, [(THIRD, u16::from_le_bytes([77, 113]), -23), NONE, NONE], 0xc606_dec7),
    case(Format::Q6K, HALVES, [(THIRD, u16::from_le_bytes([77, 143]), 31), NONE, NONE], 0xc405_1eff),
];

/// Every value of the first block -1.
const ALL_MINUS: &[(usize, f32)] = &{
    let mut all = [(0, -127.0); BLOCK];
    let mut k = 0;
    while k < BLOCK {
        all[k].0 = k;
        k += 1;
    }
    all
};

/// 3 at even k of the first block, 0.3 at two odd ones.
const EVENS: &[(usize, f32)] = &{
    let mut all = [(1, 0.3); 18];
    let mut i = 0;
    while i < 16 {
        all[i] = (2 * i, 3.0);
        i += 1;
    }
    all[17].0 = 3;
    all
};

/// Values of both halves of two blocks.
const HALVES: &[(usize, f32)] = &[(0, 2.9), (1, 3.7), (15, -1.7), (16, -2.8), (31, 4.6), (40, 2.1), (60, 3.4)];

const fn case(format: Format, x: &'static [(usize, f32)], w: [(u16, u16, i8); BLOCKS], expected: u32) -> Case {
    Case { format, x, w, expected }
}

impl Case {
    /// Elements of a row.
    fn k(&self) -> usize {
        if self.format == Format::Q6K { 256 } else { BLOCKS * BLOCK }
    }

    fn x(&self) -> Vec<f32> {
        let mut x = vec![0.0; self.k()];
        self.x.iter().for_each(|&(k, value)| x[k] = value);
        x
    }

    /// The feature as stored in a file.
    fn stored(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(210);
        if self.format == Format::Q6K {
            let (d, scales, q) = self.w[0];
            let q = (q + 32) as u8;
            bytes.extend([(q & 15) * 17; 128]);
            bytes.extend([(q >> 4) * 0b0101_0101; 64]);
            bytes.extend(scales.to_le_bytes().repeat(8));
            bytes.extend(d.to_le_bytes());
            return bytes;
        }
        for (d, m, q) in self.w {
            bytes.extend(d.to_le_bytes());
            match self.format {
                Format::Q4_1 => {
                    bytes.extend(m.to_le_bytes());
                    bytes.extend([q as u8 * 17; 16]);
                }
                _ => bytes.extend([q as u8; 32]),
            }
        }
        bytes
    }
}

/// Compares every sum.
struct Check {
    expected: u32,
    right: bool,
}

impl Epilogue for Check {
    fn put(&mut self, _row: usize, _first: usize, sums: &[f32; PANEL]) {
        self.right &= sums.iter().all(|sum| same(*sum, f32::from_bits(self.expected)));
    }
}

/// Equal bits, or both NaN.
fn same(a: f32, b: f32) -> bool {
    a.to_bits() == b.to_bits() || a.is_nan() && b.is_nan()
}

/// Whether the instructions of a level give the known answers on this processor. Microseconds.
///
/// # Errors
/// If there is no memory for the weights.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let (threads, level, mut rows) = (Threads::none(), Level::of(level), Rows::default());
    for case in CASES {
        let w = Weights::pack(&threads, case.format, PANEL, case.k(), &case.stored().repeat(PANEL))?;
        let mut check = Check { expected: case.expected, right: true };
        for count in [69, 5, 1] {
            let x = case.x().repeat(count);
            rows.quantize(level, count, case.k(), &mut Source::dense(&x, case.k()));
            gemm(level, &rows, &w, 0..rows.blocks(), 0..1, &mut check);
        }
        if !check.right {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::quantized;

    #[test]
    fn the_reference_gives_the_known_answers() {
        for (index, case) in CASES.iter().enumerate() {
            let x: Vec<_> = case.x().chunks(BLOCK).map(quantized::Activations::new).collect();
            let sum = quantized::dot(&x, &quantized::blocks(case.format.stored(), &case.stored()));
            assert!(same(sum, f32::from_bits(case.expected)), "case {index}: {:08x} {sum}", sum.to_bits());
        }
    }

    #[test]
    fn one_wrong_sum_is_enough() {
        let mut check = Check { expected: 1f32.to_bits(), right: true };
        check.put(0, 0, &[1.0; PANEL]);
        assert!(check.right);
        let mut sums = [1.0; PANEL];
        sums[PANEL - 1] += f32::EPSILON;
        check.put(0, 0, &sums);
        assert!(!check.right);
        check.put(1, 0, &[1.0; PANEL]);
        assert!(!check.right, "right ones behind it change nothing");
    }

    #[test]
    fn every_level_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
