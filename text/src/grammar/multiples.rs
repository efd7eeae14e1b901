//! What `multipleOf` takes: a number's digits are followed by their remainder, so a divisor takes as many states as it is large, and divisors
//! of one number as many as their least common multiple.

use super::schemas::each_inside;
use crate::TextError;
use serde_json::{Map, Number, Value};

pub(super) const KEYWORD: &str = "multipleOf";

/// Most states for all divisors of a grammar. 10,000 take some 0.2 s and 5 MB.
pub(super) const STATES_MAX: u64 = 10_000;

/// All divisors of a schema, as if they were of one number: which ones may meet is not asked.
#[derive(Clone, Copy)]
pub(super) struct Multiples {
    /// Least common multiple of the digits of all divisors; the largest number is one that is too large.
    common: u64,
    /// Most digits behind the point.
    decimals: u64,
}

impl Default for Multiples {
    fn default() -> Self {
        Self { common: 1, decimals: 0 }
    }
}

impl Multiples {
    pub(super) fn add(&mut self, divisor: &Number) {
        let (digits, decimals) = digits(divisor).unwrap_or((u64::MAX, 0));
        // What is no divisor is refused elsewhere.
        if digits > 0 {
            let shared = common_divisor(self.common, digits);
            self.common = (self.common / shared).saturating_mul(digits);
        }
        self.decimals = self.decimals.max(decimals);
    }

    /// States that numbers of this schema may take.
    pub(super) fn states(self) -> u64 {
        if self.common == 1 { 0 } else { self.common.saturating_mul(1 + self.decimals) }
    }
}

/// The digits of a number as an integer, and how many of them are behind the point; `None` if they are many.
fn digits(number: &Number) -> Option<(u64, u64)> {
    let text = number.to_string();
    let text = text.trim_start_matches('-');
    let (mantissa, exponent) = text.split_once(['e', 'E']).unwrap_or((text, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let fraction = fraction.trim_end_matches('0');
    let exponent = exponent.parse::<i64>().ok()? - fraction.len() as i64;
    let digits: u64 = format!("{whole}{fraction}").parse().ok()?;
    let zeros = 10u64.checked_pow(u32::try_from(exponent.max(0)).ok()?)?;
    Some((digits.checked_mul(zeros)?, exponent.min(0).unsigned_abs()))
}

fn common_divisor(a: u64, b: u64) -> u64 {
    if b == 0 { a } else { common_divisor(b, a % b) }
}

/// Takes all divisors out of a schema that may leave them out; numbers in data, as in `enum`, stay.
pub(super) fn leave_out(schema: &mut Map<String, Value>) -> Result<(), TextError> {
    schema.retain(|name, value| name != KEYWORD || !value.is_number());
    each_inside(schema, &mut leave_out)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_those_of_the_least_common_multiple() {
        let states = |divisors: &[&str]| {
            let mut multiples = Multiples::default();
            divisors.iter().for_each(|divisor| multiples.add(&divisor.parse().unwrap()));
            multiples.states()
        };
        for (divisors, expected) in [
            (&[][..], 0),
            (&["1"], 0),
            (&["0.01"], 0),
            (&["7"], 7),
            (&["7", "7", "1"], 7),
            (&["4", "6"], 12),
            (&["0.25"], 75),
            (&["2.50", "10"], 100),
            (&["1e3"], 1000),
            (&["5e-1"], 10),
            (&["9007199254740993"], 9_007_199_254_740_993),
            (&["9999", "9998", "9997", "9995", "9991", "9990"], u64::MAX),
            (&["1e300"], u64::MAX),
            (&["0"], 0),
        ] {
            assert_eq!(states(divisors), expected, "{divisors:?}");
        }
    }
}
