//! Known answers of these classes.

use super::operand::Operand;
use super::products::Products;
use super::step::LANES;
use super::{Arithmetic, attention};
use crate::cpu::SimdLevel;
use crate::cpu::known::Attention;
use crate::cpu::simd::Width;
use crate::cpu::threads::Threads;
use crate::device::DeviceError;
use crate::host::{KvStep, Scores};
use crate::numerics::{Half, TensorCore};
use baton_types::Dtype;

/// Operands of a product: more than two groups, padded to whole ones.
const K: usize = 48;

const fn attention(position: usize, window: Option<usize>, expected: u64) -> Attention {
    Attention { dtype: Dtype::Bf16, dim: 20, position, rows: 2, window, expected }
}

/// A class with the right [`products`], and the right attention: over two blocks, and over two splits.
struct Known {
    cores: TensorCore,
    half: Half,
    products: u64,
    attention: &'static [Attention],
}

const ALL: [Known; 4] = [
    Known {
        cores: TensorCore::Tc16F25,
        half: Half::Bf16,
        products: 0x6ff9_ad83_64ab_59f8,
        attention: &[attention(70, None, 0xa359_31e3_a38a_6ebe), attention(515, Some(23), 0x2ae1_3740_a18a_ebd5)],
    },
    Known { cores: TensorCore::Tc16F25, half: Half::F16, products: 0x335d_19d4_2672_c762, attention: &[] },
    Known {
        cores: TensorCore::Tc8F24,
        half: Half::Bf16,
        products: 0x290c_cee2_0731_750b,
        attention: &[attention(70, None, 0x8ec8_cc8d_0a67_44c0), attention(515, Some(23), 0x4bdf_8edc_b1d0_4673)],
    },
    Known { cores: TensorCore::Tc8F24, half: Half::F16, products: 0x23b3_d429_55f8_6ee7, attention: &[] },
];

/// Whether the instructions of a level give the known answers on this processor.
///
/// # Errors
/// If there is no memory for keys and values.
pub(in crate::cpu) fn known_answers(level: SimdLevel) -> Result<bool, DeviceError> {
    let (threads, width) = (Threads::none(), Width::of(level));
    for Known { cores, half, products: expected, attention: cases } in ALL {
        let arithmetic = Arithmetic { cores, half, width };
        let attend = |step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]| {
            attention::attend(&threads, arithmetic, step, q, scores, out);
        };
        if products(arithmetic) != expected || !Attention::all_right(cases, attend)? {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Numbers that look random, and small ones between them.
fn element(i: usize) -> f32 {
    let bits = (i as u32 + 1).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    let number = (bits >> 8) as f32 / (1 << 22) as f32 - 2.0;
    if bits & 3 == 0 { number / 1024.0 } else { number }
}

/// A digest of the dot products of a row.
fn products(arithmetic: Arithmetic) -> u64 {
    let Arithmetic { half, width, .. } = arithmetic;
    let row: Vec<f32> = (0..K).map(element).collect();
    let panel: Vec<[u16; LANES]> =
        (0..K).map(|k| std::array::from_fn(|lane| half.from_f32(element(1000 + k * LANES + lane)))).collect();
    let mut x = Operand::default();
    x.fill(arithmetic, &row, K);
    let mut sums = [[0.0; LANES]];
    width.run(Products { arithmetic, x: &x, first: 0, panel: &panel, live: None, sums: &mut sums });
    digest(sums.as_flattened())
}

/// FNV-1a, by words.
fn digest(sums: &[f32]) -> u64 {
    sums.iter().fold(0xcbf2_9ce4_8422_2325, |hash, x| (hash ^ u64::from(x.to_bits())).wrapping_mul(0x0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::numerics::Numerics;
    use crate::reference::attention_splits::attend;

    #[test]
    fn the_reference_gives_the_known_answers() {
        let (mut answers, mut expected) = (Vec::new(), Vec::new());
        for Known { cores, half, products, attention } in ALL {
            let of = |first: usize, step: usize| -> Vec<u16> {
                (0..K).map(|k| half.from_f32(element(first + k * step))).collect()
            };
            let dot = |lane: usize| cores.dot(half, 0.0, &of(0, 1), &of(1000 + lane, LANES));
            let sums: [f32; LANES] = std::array::from_fn(dot);
            answers.push(digest(&sums));
            expected.push(products);
            let class = Numerics::TensorCore { cores, half };
            let attend =
                |case: &Attention| case.digest(|step, q, scores, out| attend(class, step, q, scores, out)).unwrap();
            answers.extend(attention.iter().map(attend));
            expected.extend(attention.iter().map(|case| case.expected));
        }
        let text = |digests: Vec<u64>| digests.into_iter().map(|x| format!("{x:#018x}")).collect::<Vec<_>>();
        assert_eq!(text(answers), text(expected));
    }

    #[test]
    fn every_instruction_set_gives_the_known_answers() {
        for level in SimdLevel::ALL.into_iter().filter(|level| level.available()) {
            assert_eq!(known_answers(level), Ok(true), "{level:?}");
        }
    }
}
