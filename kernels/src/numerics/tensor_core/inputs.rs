//! Seeded inputs of dot products, each kind made to show a rule of the arithmetic. Those of `tests/gpu/facts/inputs.h`, number for number.

use super::Half;
use crate::random::Random;

/// What the inputs are like.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    NearOne,
    WideExponents,
    Cancelling,
    ZerosBesideLarge,
    SubnormalInputs,
    SubnormalResults,
    Overflow,
    InfinitiesAndNan,
    AnyBits,
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::NearOne,
        Self::WideExponents,
        Self::Cancelling,
        Self::ZerosBesideLarge,
        Self::SubnormalInputs,
        Self::SubnormalResults,
        Self::Overflow,
        Self::InfinitiesAndNan,
        Self::AnyBits,
    ];

    /// Elements of operands. Of the cancelling kind, each is followed by its own negative with some bits changed (`left`), and its partner by
    /// a copy, so that a sum is small beside its terms.
    pub fn operands(self, random: &mut Random, half: Half, len: usize, left: bool) -> Vec<u16> {
        let mut all = Vec::with_capacity(len);
        for i in 0..len {
            let element = if self == Self::Cancelling && i % 2 == 1 {
                let changed = u16::from(random.below(3) == 0);
                all[i - 1] ^ if left { 0x8000 } else { 0 } ^ changed
            } else {
                self.operand(random, half)
            };
            all.push(element);
        }
        all
    }

    fn operand(self, random: &mut Random, half: Half) -> u16 {
        let bf16 = half == Half::Bf16;
        let (least, most) = if bf16 { (-126, 127) } else { (-14, 15) };
        let sign = (random.below(2) << 15) as u16;
        let of = |random: &mut Random, low, high| value(random, half, low, high);
        match self {
            Self::NearOne => of(random, -2, 2),
            Self::WideExponents if bf16 => of(random, -14, 14),
            Self::WideExponents => of(random, least, most),
            Self::Cancelling => of(random, -7, 7),
            Self::ZerosBesideLarge => match random.below(3) {
                0 => sign,
                1 => of(random, most - 3, most),
                _ => of(random, least, (least + 20).min(most)),
            },
            Self::SubnormalInputs => match random.below(2) {
                1 => sign | random.below(if bf16 { 128 } else { 1024 }) as u16,
                _ if random.below(2) == 1 => of(random, least, least + 8),
                _ => of(random, most - 8, most),
            },
            Self::SubnormalResults if bf16 => of(random, -76, -62),
            Self::SubnormalResults => of(random, least, least + 4),
            Self::Overflow if bf16 => of(random, 60, 65),
            Self::Overflow => of(random, most - 1, most),
            Self::InfinitiesAndNan => match random.below(24) {
                0 => sign | if bf16 { 0x7f80 } else { 0x7c00 },
                1 if random.below(8) != 0 => sign,
                1 if bf16 => sign | (0x7f81 + random.below(126)) as u16,
                1 => sign | (0x7c01 + random.below(1022)) as u16,
                _ => of(random, -4, 4),
            },
            Self::AnyBits => random.next() as u16,
        }
    }

    /// An accumulator; one of four is zero.
    pub fn accumulator(self, random: &mut Random) -> f32 {
        let of = |random: &mut Random, low, high| {
            let exponent = between(random, low, high);
            let sign = random.below(2);
            f32::from_bits(sign << 31 | ((exponent + 127) as u32) << 23 | random.below(1 << 23))
        };
        if random.below(4) == 0 {
            return if random.below(2) == 1 { 0.0 } else { -0.0 };
        }
        match self {
            Self::NearOne => of(random, -3, 6),
            Self::WideExponents => of(random, -30, 30),
            Self::Cancelling => of(random, -16, 16),
            Self::ZerosBesideLarge if random.below(2) == 1 => of(random, -126, -90),
            Self::ZerosBesideLarge => of(random, -20, 20),
            Self::SubnormalInputs if random.below(2) == 1 => {
                let sign = random.below(2);
                f32::from_bits(sign << 31 | random.below(1 << 23))
            }
            Self::SubnormalInputs => of(random, -126, -100),
            Self::SubnormalResults if random.below(2) == 1 => f32::from_bits(random.below(1 << 23)),
            Self::SubnormalResults => of(random, -126, -120),
            Self::Overflow => of(random, 124, 127),
            Self::InfinitiesAndNan if random.below(16) != 0 => of(random, -4, 4),
            Self::InfinitiesAndNan => {
                let sign = random.below(2);
                f32::from_bits(sign << 31 | 0x7f80_0000 | u32::from(random.below(4) == 0))
            }
            Self::AnyBits => f32::from_bits(random.next() as u32),
        }
    }
}

/// A value of any sign and significand, with an exponent in `low..=high`.
fn value(random: &mut Random, half: Half, low: i32, high: i32) -> u16 {
    let exponent = between(random, low, high);
    let sign = random.below(2) << 15;
    let bits = match half {
        Half::Bf16 => sign | ((exponent + 127) as u32) << 7 | random.below(128),
        Half::F16 => sign | ((exponent + 15) as u32) << 10 | random.below(1024),
    };
    bits as u16
}

fn between(random: &mut Random, low: i32, high: i32) -> i32 {
    low + random.below((high - low + 1) as u32) as i32
}
