//! `exp` with the same bits on every host.
//!
//! The platform's `exp` differs between C libraries, and a draw compares sums of it. This one uses only IEEE additions and
//! multiplications in a written order, and compilers vectorize it, which matters over a whole vocabulary.

/// Upper part of ln 2: its low 21 bits are zero, so `k * LN2_HIGH` is exact for `|k| < 2^21`.
const LN2_HIGH: f64 = f64::from_bits(0x3FE6_2E42_FEE0_0000);
/// `ln 2 - LN2_HIGH`, as in fdlibm.
const LN2_LOW: f64 = 1.908_214_929_270_587_7e-10;
/// Adding and subtracting 1.5 * 2^52 rounds to the nearest integer, whose low bits then stand in the mantissa.
const ROUND: f64 = 6_755_399_441_055_744.0;
/// Below this, results would be subnormal; they count as 0. Weights relative to the best token never need them.
const UNDERFLOW: f64 = -708.0;

/// `1/n!` for n = 13 down to 2: Taylor's series, whose remainder at `ln(2)/2` is under 2^-56.
const COEFFICIENTS: [f64; 12] = [
    1.0 / 6_227_020_800.0,
    1.0 / 479_001_600.0,
    1.0 / 39_916_800.0,
    1.0 / 3_628_800.0,
    1.0 / 362_880.0,
    1.0 / 40_320.0,
    1.0 / 5_040.0,
    1.0 / 720.0,
    1.0 / 120.0,
    1.0 / 24.0,
    1.0 / 6.0,
    0.5,
];

/// `e^x` for `x <= 0`, within 2 units in the last place; 0 below -708.
pub(super) fn exp(x: f64) -> f64 {
    let clamped = x.max(UNDERFLOW);
    let shifted = clamped * std::f64::consts::LOG2_E + ROUND;
    let k = shifted - ROUND;
    let r = (clamped - k * LN2_HIGH) - k * LN2_LOW;
    let series = COEFFICIENTS.iter().fold(0.0, |sum, c| sum * r + c);
    let mantissa = 1.0 + (r + r * r * series);
    // 2^k: `shifted` holds k in its low mantissa bits, two's complement.
    let power = f64::from_bits((shifted.to_bits().wrapping_add(1023)) << 52);
    if x < UNDERFLOW { 0.0 } else { mantissa * power }
}
