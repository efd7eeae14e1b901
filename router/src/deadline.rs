//! Deadlines that clients state.

use baton_types::{RequestError, shown};
use std::time::{Duration, Instant};

/// Default and longest deadline.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadlines {
    /// Used if the client states none.
    pub(crate) default: Duration,
    /// The longest; a longer one is reduced to it.
    pub(crate) max: Duration,
}

impl Deadlines {
    /// The deadline of a request that arrived at `received`.
    pub(crate) fn of(&self, stated: Option<Duration>, received: Instant) -> Instant {
        received + stated.unwrap_or(self.default).min(self.max)
    }
}

/// `x-request-timeout`: seconds (`30`, `1.5`), or a number with one of the units `ms`, `s`, `m`.
pub(crate) fn parse_http(value: &str) -> Result<Duration, RequestError> {
    let refuse = || {
        let got = shown(value);
        let message = format!("x-request-timeout must be seconds, or a number with ms, s or m, got {got}");
        RequestError::invalid("x-request-timeout", message)
    };
    let value = value.trim();
    let digits = value.find(|c: char| c != '.' && !c.is_ascii_digit()).unwrap_or(value.len());
    let number: f64 = value[..digits].parse().map_err(|_| refuse())?;
    let seconds = match value[digits..].trim() {
        "" | "s" => number,
        "ms" => number / 1e3,
        "m" => number * 60.0,
        _ => return Err(refuse()),
    };
    Duration::try_from_secs_f64(seconds).map_err(|_| refuse())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn http_timeouts() {
        let cases = [
            ("30", Some(30_000)),
            ("1.5", Some(1_500)),
            ("500ms", Some(500)),
            ("2 s", Some(2_000)),
            ("2m", Some(120_000)),
            ("0", Some(0)),
            ("", None),
            ("-1", None),
            ("1h", None),
            ("1e9999", None),
            ("soon", None),
        ];
        for (text, ms) in cases {
            assert_eq!(parse_http(text).ok(), ms.map(Duration::from_millis), "{text:?}");
        }
    }

    #[test]
    fn long_deadlines_are_cut() {
        let deadlines = Deadlines { default: Duration::from_secs(10), max: Duration::from_secs(60) };
        let now = Instant::now();
        for (stated, expected) in [(None, 10), (Some(5), 5), (Some(600), 60)] {
            assert_eq!(deadlines.of(stated.map(Duration::from_secs), now), now + Duration::from_secs(expected));
        }
    }
}
