//! Rows as they enter products.

use super::Arithmetic;
use super::step::decode;
use crate::cpu::simd::{Pass, Wide};
use crate::numerics::Half;
use half::f16;
use half::slice::HalfFloatSliceExt as _;

/// Rows rounded to operands: their bits, values and exponents. Each is `[group][row][product of the group]`; the last group is padded with
/// zeros.
#[derive(Debug, Default)]
pub struct Operand {
    pub(super) rows: usize,
    pub(super) bits: Vec<u16>,
    pub(super) values: Vec<f32>,
    pub(super) exponents: Vec<i32>,
    /// Bits of the rows, before they are divided into groups.
    rounded: Vec<u16>,
}

impl Operand {
    /// Rounds rows of `k` elements.
    pub(super) fn fill(&mut self, arithmetic: Arithmetic, x: &[f32], k: usize) {
        let mut bits = std::mem::take(&mut self.rounded);
        bits.resize(x.len(), 0);
        arithmetic.width.run(Round { half: arithmetic.half, x, bits: &mut bits });
        self.fill_bits(arithmetic, &bits, k);
        self.rounded = bits;
    }

    /// Takes rows of `k` elements that are rounded.
    pub(super) fn fill_bits(&mut self, arithmetic: Arithmetic, rounded: &[u16], k: usize) {
        let Arithmetic { cores, half, width } = arithmetic;
        self.rows = rounded.len() / k;
        let (group, len) = (cores.group(), k.next_multiple_of(cores.group()) * self.rows);
        self.bits.clear();
        self.bits.resize(len, 0);
        self.values.resize(len, 0.0);
        self.exponents.resize(len, 0);
        for (row, bits) in rounded.chunks_exact(k).enumerate() {
            for (index, bits) in bits.chunks(group).enumerate() {
                let at = (index * self.rows + row) * group;
                self.bits[at..at + bits.len()].copy_from_slice(bits);
            }
        }
        width.run(Decode { half, bits: &self.bits, values: &mut self.values, exponents: &mut self.exponents });
    }
}

/// Rounds to nearest even.
struct Round<'a> {
    half: Half,
    x: &'a [f32],
    bits: &'a mut [u16],
}

impl Pass for Round<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        let Self { half, x, bits } = self;
        match half {
            Half::Bf16 => {
                for (to, x) in bits.iter_mut().zip(x) {
                    let bits = x.to_bits();
                    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
                    *to = ((if x.is_nan() { 0x7fc0_0000 } else { nearest }) >> 16) as u16;
                }
            }
            Half::F16 => {
                const AT_ONCE: usize = 64;
                for (bits, x) in bits.chunks_mut(AT_ONCE).zip(x.chunks(AT_ONCE)) {
                    let mut rounded = [f16::ZERO; AT_ONCE];
                    rounded[..x.len()].convert_from_f32_slice(x);
                    bits.iter_mut().zip(rounded).for_each(|(to, x)| *to = x.to_bits());
                }
            }
        }
    }
}

struct Decode<'a> {
    half: Half,
    bits: &'a [u16],
    values: &'a mut [f32],
    exponents: &'a mut [i32],
}

impl Pass for Decode<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, _: W) {
        decode(self.half, self.bits, self.values, self.exponents);
    }
}
