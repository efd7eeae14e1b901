//! The canonical exponential on vectors: the same operations as [`crate::numerics::exp()`], one for one.

use super::Simd;
use crate::numerics::{EXP_HI, EXP_LN2_HI, EXP_LN2_LO, EXP_LO, EXP_LOG2E, EXP_MAGIC, EXP_POLY, GELU_CUBE, GELU_LINE};

#[inline(always)]
pub(in crate::cpu) fn exp<S: Simd>(s: S, x: S::F) -> S::F {
    let x = s.min(s.splat(EXP_HI), x);
    let x = s.max(s.splat(EXP_LO), x);
    let shifted = s.fma(x, s.splat(EXP_LOG2E), s.splat(EXP_MAGIC));
    let n = s.sub(shifted, s.splat(EXP_MAGIC));
    let r = s.fma(n, s.splat(-EXP_LN2_LO), s.fma(n, s.splat(-EXP_LN2_HI), x));
    let mut p = s.splat(EXP_POLY[0]);
    for c in &EXP_POLY[1..] {
        p = s.fma(p, r, s.splat(*c));
    }
    let [a, b] = s.powers_of_two(shifted);
    s.mul(s.mul(p, a), b)
}

/// `x / (1 + exp(-x))`; the sign is flipped by a product with -1, which is exact.
#[inline(always)]
pub(in crate::cpu) fn silu<S: Simd>(s: S, x: S::F) -> S::F {
    s.div(x, s.add(s.splat(1.0), exp(s, s.mul(x, s.splat(-1.0)))))
}

/// [`crate::numerics::gelu_tanh`]; the sign is flipped as in [`silu`].
#[inline(always)]
pub(in crate::cpu) fn gelu_tanh<S: Simd>(s: S, x: S::F) -> S::F {
    let power = s.mul(x, s.fma(s.mul(x, x), s.splat(GELU_CUBE), s.splat(GELU_LINE)));
    s.div(x, s.add(s.splat(1.0), exp(s, s.mul(power, s.splat(-1.0)))))
}
