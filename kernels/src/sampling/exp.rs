//! `exp` with the same bits on every host.
//!
//! The platform's `exp` differs between C libraries, and a draw compares sums of it. This one uses only IEEE additions and multiplications
//! in a fixed order. It is not the kernels' `exp`, which uses fused multiply-adds. Compilers turn those into calls where the target may
//! lack the instruction, and a token needs one `exp` per vocabulary entry: 50,000 to 250,000.

/// Upper part of ln 2: 15 bits, so that `k * LN2_HIGH` is exact for every k in range.
pub(crate) const LN2_HIGH: f32 = f32::from_bits(0x3f31_7200);
/// `ln 2 - LN2_HIGH`, rounded.
pub(crate) const LN2_LOW: f32 = f32::from_bits(0x35bf_be8e);
/// Adding and subtracting 1.5 * 2^23 rounds to the nearest integer, whose low bits are then in the mantissa.
pub(crate) const ROUND: f32 = 12_582_912.0;
/// Below this, results would be subnormal; they count as 0. A token e^87 times less likely than the best is never drawn.
pub(crate) const UNDERFLOW: f32 = -87.0;
/// `1/n!` for n = 7 down to 2: Taylor's series, whose remainder at `ln(2)/2` is under 2^-27.
pub(crate) const COEFFICIENTS: [f32; 6] = [1.0 / 5040.0, 1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5];

/// `e^x` for `x <= 0`, within 2 units in the last place; 0 below -87.
#[inline(always)] // Inside a loop it becomes vector instructions.
pub(crate) fn exp(x: f32) -> f32 {
    let clamped = x.max(UNDERFLOW);
    let shifted = clamped * std::f32::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN2_HIGH) - k * LN2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let mantissa = 1.0 + (r + r * r * series);
    // 2^k: `shifted` holds k in its low mantissa bits, two's complement.
    let power = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    if x < UNDERFLOW { 0.0 } else { mantissa * power }
}
