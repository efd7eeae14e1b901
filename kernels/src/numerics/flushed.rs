//! Flushed arithmetic: subnormal inputs count as zero and subnormal results become zero, both with their sign (DAZ and FTZ of x86).
//!
//! Whether a result is subnormal is decided after rounding to 24 bits without a limit to the exponent, as x86 does. [`f32::mul_add`] and the
//! product round to multiples of 2^-149 there, so that what lies in [2^-126 - 2^-150, 2^-126 - 2^-151) reads 2^-126 and not zero. A
//! subnormal sum of two f32 is exact, so that additions need no such care.

use half::bf16;

/// Elements of a group: 16 of its even chain and 16 of its odd one.
pub const GROUP: usize = 32;

/// `x`, or a zero of its sign if it is subnormal.
#[inline(always)]
pub fn flush(x: f32) -> f32 {
    if x.is_subnormal() { 0.0f32.copysign(x) } else { x }
}

/// `a + b`, flushed.
#[inline(always)]
pub fn add(a: f32, b: f32) -> f32 {
    flush(flush(a) + flush(b))
}

/// `a * b`, flushed.
#[inline(always)]
pub fn mul(a: f32, b: f32) -> f32 {
    let (a, b) = (flush(a), flush(b));
    flush_rounded(a * b, || f64::from(a) * f64::from(b)) // Exact: 48 bits.
}

/// `a * b + c` with one rounding, flushed; `a` and `b` are bf16.
#[inline(always)]
pub fn fma(a: bf16, b: bf16, c: f32) -> f32 {
    let (a, b, c) = (flush(a.to_f32()), flush(b.to_f32()), flush(c));
    // Exact where it decides: the product has 16 bits, and c is a multiple of 2^-149 that nearly cancels it.
    flush_rounded(a.mul_add(b, c), || f64::from(a) * f64::from(b) + f64::from(c))
}

/// Flushes a result that was rounded to a multiple of 2^-149.
#[inline(always)]
fn flush_rounded(rounded: f32, exact: impl Fn() -> f64) -> f32 {
    if rounded.abs() != f32::MIN_POSITIVE {
        return flush(rounded);
    }
    let half_step = f64::from(f32::MIN_POSITIVE) * 2f64.powi(-25);
    if exact().abs() < f64::from(f32::MIN_POSITIVE) - half_step { 0.0f32.copysign(rounded) } else { rounded }
}

/// Adds the groups of `sum_k x_k * w_k` to `acc`: per group an even and an odd chain over k ascending, `acc + (even + odd)`.
pub fn add_groups(acc: f32, products: impl ExactSizeIterator<Item = (bf16, bf16)>) -> f32 {
    let groups = products.len().div_ceil(GROUP);
    let mut products = products.chain(std::iter::repeat((bf16::ZERO, bf16::ZERO)));
    (0..groups).fold(acc, |acc, _| {
        let mut chains = [0.0; 2];
        for (i, (x, w)) in products.by_ref().take(GROUP).enumerate() {
            chains[i % 2] = fma(x, w, chains[i % 2]);
        }
        add(acc, add(chains[0], chains[1]))
    })
}

/// Dot product of bf16, given as bits, in groups, padded with `+0` to whole ones.
///
/// # Panics
/// If the lengths differ.
pub fn dot(x: &[u16], w: &[u16]) -> f32 {
    assert_eq!(x.len(), w.len());
    add_groups(0.0, x.iter().zip(w).map(|(x, w)| (bf16::from_bits(*x), bf16::from_bits(*w))))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAST: f32 = f32::MIN_POSITIVE;

    fn vector(elements: &[(usize, f32)], len: usize) -> Vec<u16> {
        let mut out = vec![0; len];
        elements.iter().for_each(|&(i, x)| out[i] = bf16::from_f32(x).to_bits());
        out
    }

    #[test]
    fn subnormals_are_zero_of_their_sign() {
        let b = bf16::from_f32;
        assert_eq!(add(LEAST / 2.0, LEAST / 2.0), 0.0);
        assert_eq!(add(1.5 * LEAST, -LEAST), 0.0);
        assert_eq!(add(-1.5 * LEAST, LEAST).to_bits(), (-0.0f32).to_bits());
        assert_eq!(mul(-LEAST, 0.5).to_bits(), (-0.0f32).to_bits());
        assert!(fma(b(LEAST / 2.0), bf16::INFINITY, 1.0).is_nan());
        // Just below the least normal number, and what rounds to it with 24 bits.
        let (x, tiny) = (2f32.powi(-63), 2f32.powi(-100));
        assert_eq!(fma(b(-tiny), b(2f32.powi(-50)), LEAST), 0.0);
        assert_eq!(fma(b(-tiny), b(2f32.powi(-51)), LEAST), LEAST);
        assert_eq!(mul(x, x * (1.0 - f32::EPSILON / 2.0)), 0.0);
        assert_eq!(fma(b(x), b(x), 0.0), LEAST);
    }

    #[test]
    fn order_is_the_written_one() {
        // big absorbs a 1 that is added to it: each sum holds for this order only.
        let big = 33_554_432.0;
        for (elements, want) in [
            (vec![(0, 1.0), (2, big), (4, -big)], 0.0), // ascending within the even chain
            (vec![(0, big), (1, 1.0), (2, -big)], 1.0), // odd is apart from even
            (vec![(1, big), (30, 1.0), (31, -big)], 1.0), // to the end of the group
            (vec![(31, 1.0), (32, big), (34, -big)], 1.0), // chains end with the group
            (vec![(0, 1.0), (32, big), (33, -big)], 1.0), // even and odd are added before the total
            (vec![(0, big), (32, 1.0), (64, -big)], 0.0), // groups ascend
        ] {
            for len in [96, 70] {
                let x = vector(&elements, len);
                assert_eq!(dot(&x, &vec![bf16::ONE.to_bits(); len]), want, "{elements:?}");
            }
        }
    }
}
