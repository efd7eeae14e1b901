//! One step of the dot product in [`LANES`] lanes, by f32.
//!
//! Let `E` be the largest exponent of a lane's terms, as `docs/numerics.md` defines it. For `E` within [`range`], products of f32 multiplied by
//! `2^(F - E)` and converted to integers, towards zero, are the cut terms:
//!
//! - A product below 2^-126 is rounded, to at most 2^-126. It is cut to zero, since it counts as at most half a unit.
//! - Every other product is exact, and so is its multiple by a power of two.
//!
//! All other steps are computed by [`TensorCore::step`]. Those of operands that are not finite are among them: such operands have an exponent
//! that is above the range.

use crate::cpu::simd::{WIDEST, Wide};
use crate::numerics::{Half, TensorCore};
use std::ops::Range;

/// Output features, or tokens, or elements of a head, that are computed side by side.
pub(super) const LANES: usize = WIDEST;

/// Exponent of a zero. The sum with any other exponent of a finite operand is below every range.
const ZERO: i32 = -1000;

/// Exponent of what is not finite. The sum with any other exponent is above every range.
const NOT_FINITE: i32 = 10_000;

/// Products whose cut terms can be added in 32 bits: each is below 2^27, and the cut accumulator below 2^26.
const ADDED: usize = 8;

/// Most vectors that the lanes take.
const VECTORS_MAX: usize = 4;

/// Whose groups have `G` products.
const fn cores<const G: usize>() -> TensorCore {
    const {
        assert!(G == TensorCore::Tc16F25.group() || G == TensorCore::Tc8F24.group());
    }
    if G == TensorCore::Tc16F25.group() { TensorCore::Tc16F25 } else { TensorCore::Tc8F24 }
}

/// The least and the largest `E` that vectors compute: `2^(F - E)` is a normal f32, 2^-126 counts as at most half a unit, and products are below
/// 2^128.
pub(super) const fn range<const G: usize>() -> [i32; 2] {
    [cores::<G>().fraction() as i32 - 125, 126]
}

/// Values and exponents of operands. Values that are not finite are not specified.
///
/// # Panics
/// If the lengths differ.
#[inline(always)]
pub(super) fn decode(half: Half, bits: &[u16], values: &mut [f32], exponents: &mut [i32]) {
    match half {
        Half::Bf16 => decode_by::<7, 0xff>(bits, values, exponents, |bits| f32::from_bits(bits << 16)),
        Half::F16 => decode_by::<10, 0x1f>(bits, values, exponents, |bits| {
            let normal = f32::from_bits(((bits & 0x7fff) << 13) + ((127 - 15) << 23));
            let subnormal = (bits & 0x3ff).cast_signed() as f32 * f32::from_bits((127 - 24) << 23);
            let magnitude = if bits & 0x7c00 == 0 { subnormal } else { normal };
            f32::from_bits(magnitude.to_bits() | (bits & 0x8000) << 16)
        }),
    }
}

/// Of a format with so many bits of the fraction, and this field of the exponent.
#[inline(always)]
fn decode_by<const FRACTION: u32, const ALL: i32>(
    bits: &[u16],
    values: &mut [f32],
    exponents: &mut [i32],
    value: impl Fn(u32) -> f32,
) {
    assert!(bits.len() == values.len() && bits.len() == exponents.len());
    for ((bits, to), exponent) in bits.iter().zip(values).zip(exponents) {
        let bits = u32::from(*bits);
        let field = (bits >> FRACTION).cast_signed() & ALL;
        let finite = if field == ALL { NOT_FINITE } else { field.max(1) - (ALL >> 1) };
        *exponent = if bits & 0x7fff == 0 { ZERO } else { finite };
        *to = value(bits);
    }
}

/// Operands of one group of products of a row.
#[derive(Clone, Copy)]
pub(super) struct RowGroup<'a, const G: usize> {
    pub(super) values: &'a [f32; G],
    pub(super) exponents: &'a [i32; G],
}

/// Operands of one group of products of all lanes.
pub(super) struct Group<const G: usize> {
    values: [[f32; LANES]; G],
    exponents: [[i32; LANES]; G],
}

impl<const G: usize> Group<G> {
    #[inline(always)]
    pub(super) fn decode(half: Half, words: &[[u16; LANES]; G]) -> Self {
        let mut group = Self { values: [[0.0; LANES]; G], exponents: [[0; LANES]; G] };
        decode(half, words.as_flattened(), group.values.as_flattened_mut(), group.exponents.as_flattened_mut());
        group
    }

    /// Adds the products of a row's operands with those of each lane to its accumulator. `false`: a lane is out of [`range`], and nothing is
    /// changed.
    #[inline(always)]
    pub(super) fn add_products<W: Wide>(&self, w: W, x: RowGroup<'_, G>, acc: &mut [f32; LANES]) -> bool {
        const { assert!(W::LANES * VECTORS_MAX >= LANES && LANES.is_multiple_of(W::LANES)) };
        let [least, most] = range::<G>();
        let fraction = cores::<G>().fraction() as i32;
        let (from, below) = (w.splat(least as f32), w.splat((most + 1) as f32));
        let mut tops = [w.splat_int(0); VECTORS_MAX];
        let mut inside = true;
        for (at, top) in (0..LANES).step_by(W::LANES).zip(&mut tops) {
            let field = w.and(w.shift_right::<23>(w.bits(vector(w, acc, at))), w.splat_int(0xff));
            // Zeros and subnormals count as 2^-126.
            *top = w.add_int(w.max_int(field, w.splat_int(1)), w.splat_int(-127));
            for k in 0..G {
                let exponent = w.add_int(vector_int(w, &self.exponents[k], at), w.splat_int(x.exponents[k]));
                *top = w.max_int(*top, exponent);
            }
            inside &= w.within(w.float(*top), from, below) == u32::MAX >> (32 - W::LANES);
        }
        if !inside {
            let mut each = [0i32; LANES];
            for (at, top) in (0..LANES).step_by(W::LANES).zip(tops) {
                let to = &mut each[at..at + W::LANES];
                // SAFETY: one vector.
                unsafe { w.store_int(to.as_mut_ptr().cast(), top) };
            }
            if !self.settle(x, acc, &mut each) {
                return false;
            }
            for (at, top) in (0..LANES).step_by(W::LANES).zip(&mut tops) {
                *top = vector_int(w, &each, at);
            }
        }
        for (at, top) in (0..LANES).step_by(W::LANES).zip(tops) {
            // 2^(F - E) and 2^(E - F).
            let scale = w.float_of_bits(w.shift_left::<23>(w.sub_int(w.splat_int(127 + fraction), top)));
            let unit = w.float_of_bits(w.shift_left::<23>(w.add_int(w.splat_int(127 - fraction), top)));
            let mut sums = [w.truncate(w.mul(vector(w, acc, at), scale)), w.splat_int(0)];
            for k in 0..G {
                let product = w.mul(vector(w, &self.values[k], at), w.splat(x.values[k]));
                sums[k / ADDED] = w.add_int(sums[k / ADDED], w.truncate(w.mul(product, scale)));
            }
            // Exact, but for overflow.
            let total = w.mul(w.sum_towards_zero(sums[0], sums[1]), unit);
            let to = &mut acc[at..at + W::LANES];
            // SAFETY: one vector.
            unsafe { w.store_int(to.as_mut_ptr().cast(), w.bits(total)) };
        }
        true
    }

    /// Gives lanes whose terms are all zero an exponent that is in the range. Returns whether all lanes have one then.
    #[inline(never)]
    fn settle(&self, x: RowGroup<'_, G>, acc: &[f32; LANES], tops: &mut [i32; LANES]) -> bool {
        let [least, most] = range::<G>();
        for (lane, top) in tops.iter_mut().enumerate() {
            let zero = |k: usize| x.values[k] == 0.0 || self.values[k][lane] == 0.0;
            if *top < least && acc[lane] == 0.0 && (0..G).all(zero) {
                *top = 0;
            }
        }
        tops.iter().all(|top| (least..=most).contains(top))
    }
}

/// The lanes from `at` on.
#[inline(always)]
fn vector<W: Wide>(w: W, lanes: &[f32; LANES], at: usize) -> W::F {
    // SAFETY: one vector.
    unsafe { w.load(lanes[at..at + W::LANES].as_ptr()) }
}

/// As [`vector`].
#[inline(always)]
fn vector_int<W: Wide>(w: W, lanes: &[i32; LANES], at: usize) -> W::I {
    // SAFETY: one vector.
    unsafe { w.load_int(lanes[at..at + W::LANES].as_ptr()) }
}

/// The same by [`TensorCore::step`]. Products of `k` that are not `live` do not exist.
#[cold]
#[inline(never)]
pub(super) fn add_products_exactly<const G: usize>(
    half: Half,
    x: &[u16; G],
    w: &[[u16; LANES]; G],
    live: Range<usize>,
    acc: &mut [f32; LANES],
) {
    for (l, acc) in acc.iter_mut().enumerate() {
        let products = live.clone().map(|k| (x[k], w[k][l]));
        *acc = cores::<G>().step(half, *acc, products);
    }
}
