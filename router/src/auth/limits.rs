//! Limits of a key.

use super::keys::Problem;
use crate::request::PRIORITY_MAX;

/// Bounds of one key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KeyLimits {
    /// The highest priority that its requests may ask for.
    pub(crate) priority_max: i32,
    /// Most requests in flight, queued ones included; each sample is one.
    pub(crate) requests_max: u64,
    /// Most tokens in flight: prompt tokens plus the largest possible number of output tokens.
    pub(crate) tokens_max: u64,
}

impl KeyLimits {
    /// A key that may use everything that the router has.
    #[cfg(test)]
    pub(crate) const NONE: Self = Self { priority_max: PRIORITY_MAX, requests_max: u64::MAX, tokens_max: u64::MAX };

    /// Takes one setting of a line, such as `requests_max=8`; `false` if it is not one.
    pub(super) fn take(&mut self, word: &str, line: usize) -> Result<bool, Problem> {
        let Some((name, value)) = word.split_once('=') else { return Ok(false) };
        let wrong = |range| Problem::Limit(line, range);
        let count = |range: &'static str| value.parse().ok().filter(|n| *n > 0).ok_or(wrong(range));
        match name {
            "priority_max" => {
                let known = value.parse().ok().filter(|p| (-PRIORITY_MAX..=PRIORITY_MAX).contains(p));
                self.priority_max = known.ok_or(wrong("priority_max is -100 to 100"))?;
            }
            "requests_max" => self.requests_max = count("requests_max is 1 or more")?,
            "tokens_max" => self.tokens_max = count("tokens_max is 1 or more")?,
            _ => return Ok(false),
        }
        Ok(true)
    }
}
