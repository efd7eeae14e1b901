//! The dot product of tensor cores in exact integers: the bits of their `mma` instructions.
//!
//! `docs/numerics.md` has the rules, `docs/gpu.md` the measurements behind them.

pub mod inputs;
#[cfg(test)]
mod tests;

use baton_types::Dtype;
use half::{bf16, f16};

/// A float of 16 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs, reason = "the names of the formats")]
pub enum Half {
    Bf16,
    F16,
}

impl Half {
    /// The element type.
    pub const fn dtype(self) -> Dtype {
        match self {
            Self::Bf16 => Dtype::Bf16,
            Self::F16 => Dtype::F16,
        }
    }

    /// The format of this element type; `None` if it does not have 16 bits.
    pub const fn of(dtype: Dtype) -> Option<Self> {
        match dtype {
            Dtype::Bf16 => Some(Self::Bf16),
            Dtype::F16 => Some(Self::F16),
            Dtype::F32 => None,
        }
    }

    /// The bits of `x`, rounded to nearest even.
    #[inline(always)]
    pub fn from_f32(self, x: f32) -> u16 {
        match self {
            Self::Bf16 => bf16::from_f32(x).to_bits(),
            Self::F16 => f16::from_f32(x).to_bits(),
        }
    }

    /// The value of these bits.
    #[inline(always)]
    pub fn to_f32(self, bits: u16) -> f32 {
        match self {
            Self::Bf16 => bf16::from_bits(bits).to_f32(),
            Self::F16 => f16::from_bits(bits).to_f32(),
        }
    }

    /// `x` after a round trip.
    #[inline(always)]
    pub fn round(self, x: f32) -> f32 {
        self.to_f32(self.from_f32(x))
    }

    /// Bits of the exponent and of the fraction.
    const fn fields(self) -> (u32, u32) {
        match self {
            Self::Bf16 => (8, 7),
            Self::F16 => (5, 10),
        }
    }
}

/// The arithmetic of a generation of tensor cores, for operands of 16 bits and an accumulator of f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum TensorCore {
    /// sm_90.
    Tc16F25,
    /// sm_80 to sm_89, by documents.
    Tc8F24,
}

/// The largest exponent of a step's terms counts as no less.
pub(crate) const EXPONENT_MIN: i32 = -133;

/// The bits of every result that is NaN.
pub(crate) const NAN: u32 = 0x7fff_ffff;

/// Bits of an f32's fraction.
const F32_FRACTION: u32 = 23;

/// Of a subnormal f32, the exponent of its lowest bit.
const F32_LOWEST: i32 = -149;

impl TensorCore {
    /// Name of the class.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Tc16F25 => "tc16f25",
            Self::Tc8F24 => "tc8f24",
        }
    }

    /// Products that are added in one step.
    pub const fn group(self) -> usize {
        match self {
            Self::Tc16F25 => 16,
            Self::Tc8F24 => 8,
        }
    }

    /// Bits of a term behind the binary point of the largest exponent.
    pub const fn fraction(self) -> u32 {
        match self {
            Self::Tc16F25 => 25,
            Self::Tc8F24 => 24,
        }
    }

    /// `acc` and at most [`TensorCore::group`] products, in one step.
    pub fn step(self, half: Half, acc: f32, products: impl Iterator<Item = (u16, u16)>) -> f32 {
        let (mut terms, mut specials) = (Vec::with_capacity(self.group() + 1), Specials::default());
        let c = Parts::of(acc.to_bits(), 8, F32_FRACTION);
        specials.add(c.kind, c.negative);
        terms.push(Term { significand: c.signed(), exponent: c.exponent, fraction: F32_FRACTION });
        for (x, w) in products {
            let (exponent_bits, fraction) = half.fields();
            let [x, w] = [x, w].map(|bits| Parts::of(u32::from(bits), exponent_bits, fraction));
            specials.add(x.kind.times(w.kind), x.negative != w.negative);
            terms.push(Term {
                significand: x.signed() * w.signed(),
                exponent: x.exponent + w.exponent,
                fraction: 2 * fraction,
            });
        }
        specials.result().unwrap_or_else(|| self.sum(&terms))
    }

    /// The sum of finite terms.
    fn sum(self, terms: &[Term]) -> f32 {
        let exponents = terms.iter().filter(|term| term.significand != 0).map(|term| term.exponent);
        let Some(largest) = exponents.max() else { return 0.0 };
        let largest = largest.max(EXPONENT_MIN);
        let sum = terms.iter().map(|term| term.cut(largest, self.fraction())).sum();
        truncated(sum, largest - self.fraction() as i32)
    }

    /// Adds `x . w` to `acc`, in steps with k ascending. The last step may have fewer products: zeros change nothing.
    ///
    /// # Panics
    /// If the lengths differ.
    pub fn dot(self, half: Half, acc: f32, x: &[u16], w: &[u16]) -> f32 {
        assert_eq!(x.len(), w.len());
        let groups = x.chunks(self.group()).zip(w.chunks(self.group()));
        groups.fold(acc, |acc, (x, w)| self.step(half, acc, x.iter().copied().zip(w.iter().copied())))
    }
}

/// `significand * 2^(exponent - fraction)`.
struct Term {
    significand: i64,
    exponent: i32,
    fraction: u32,
}

impl Term {
    /// In units of `2^(largest - fraction)`, cut towards zero.
    fn cut(&self, largest: i32, fraction: u32) -> i64 {
        let left = fraction as i32 - self.fraction as i32 + self.exponent - largest;
        match left {
            0.. => self.significand << left,
            -62..0 => self.significand / (1 << -left),
            _ => 0,
        }
    }
}

#[derive(Clone, Copy, PartialEq)]
enum Kind {
    Zero,
    Finite,
    Infinite,
    Nan,
}

impl Kind {
    /// Of a product.
    fn times(self, other: Self) -> Self {
        match (self, other) {
            (Self::Nan, _) | (_, Self::Nan) | (Self::Infinite, Self::Zero) | (Self::Zero, Self::Infinite) => Self::Nan,
            (Self::Infinite, _) | (_, Self::Infinite) => Self::Infinite,
            (Self::Zero, _) | (_, Self::Zero) => Self::Zero,
            (Self::Finite, Self::Finite) => Self::Finite,
        }
    }
}

/// A float's fields. A subnormal has its format's least exponent.
struct Parts {
    negative: bool,
    kind: Kind,
    significand: i64,
    exponent: i32,
}

impl Parts {
    fn of(bits: u32, exponent_bits: u32, fraction_bits: u32) -> Self {
        let all = (1 << exponent_bits) - 1;
        let bias = all >> 1;
        let field = (bits >> fraction_bits) as i32 & all;
        let fraction = i64::from(bits & ((1 << fraction_bits) - 1));
        let kind = match (field, fraction) {
            (0, 0) => Kind::Zero,
            (field, 0) if field == all => Kind::Infinite,
            (field, _) if field == all => Kind::Nan,
            _ => Kind::Finite,
        };
        Self {
            negative: bits >> (exponent_bits + fraction_bits) & 1 == 1,
            kind,
            significand: if field == 0 { fraction } else { fraction | 1 << fraction_bits },
            exponent: field.max(1) - bias,
        }
    }

    fn signed(&self) -> i64 {
        if self.negative { -self.significand } else { self.significand }
    }
}

/// Terms that are not finite.
#[derive(Default)]
struct Specials {
    nan: bool,
    positive: bool,
    negative: bool,
}

impl Specials {
    fn add(&mut self, kind: Kind, negative: bool) {
        self.nan |= kind == Kind::Nan;
        self.positive |= kind == Kind::Infinite && !negative;
        self.negative |= kind == Kind::Infinite && negative;
    }

    /// The result, if there is any such term.
    fn result(&self) -> Option<f32> {
        match (self.nan || (self.positive && self.negative), self.positive, self.negative) {
            (true, ..) => Some(f32::from_bits(NAN)),
            (_, true, _) => Some(f32::INFINITY),
            (_, _, true) => Some(f32::NEG_INFINITY),
            _ => None,
        }
    }
}

/// `sum * 2^exponent` as an f32, truncated towards zero. A zero is positive.
fn truncated(sum: i64, exponent: i32) -> f32 {
    let magnitude = sum.unsigned_abs();
    let top = 63 - magnitude.max(1).leading_zeros() as i32;
    let lowest = (top + exponent - F32_FRACTION as i32).max(F32_LOWEST);
    let shift = lowest - exponent;
    let kept = if shift <= 0 { magnitude << -shift } else { magnitude.checked_shr(shift as u32).unwrap_or(0) };
    if kept == 0 {
        return 0.0;
    }
    // Exact: at most 24 bits, and a multiple of 2^-149. What is too large becomes infinite.
    let value = kept as f64 * 2f64.powi(lowest);
    (if sum < 0 { -value } else { value }) as f32
}
