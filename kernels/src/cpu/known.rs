//! Operands of known answers.

/// 2^`exponent`, subnormal below -126.
pub(super) const fn power(exponent: i32) -> f32 {
    if exponent < -126 {
        f32::from_bits(1 << (149 + exponent))
    } else {
        f32::from_bits(((127 + exponent) as u32) << 23)
    }
}

/// BIG * BIG + 1 rounds to BIG * BIG.
pub(super) const BIG: f32 = power(12);
