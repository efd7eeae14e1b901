//! Which traces are kept by tail sampling. Pure.

use super::End;
use baton_node::telemetry::TelemetryConfig;
use baton_types::ErrorKind;
use std::time::Duration;

/// Why a trace is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kept {
    Error,
    Slow,
}

/// The tail sampling settings.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TailPolicy {
    errors: bool,
    slow: bool,
    first_token: Duration,
    whole: Duration,
}

impl TailPolicy {
    /// From the operator's configuration.
    pub(crate) fn new(config: &TelemetryConfig) -> Self {
        Self {
            errors: config.keep_errors,
            slow: config.keep_slow,
            first_token: Duration::from_millis(config.slow_first_token_ms),
            whole: Duration::from_millis(config.slow_ms),
        }
    }

    /// Whether a request was slow, to its first token or in total. A request without a token counts its whole time as
    /// time to the first token.
    pub(crate) fn is_slow(&self, end: &End) -> bool {
        end.took > self.whole || end.first_token.unwrap_or(end.took) > self.first_token
    }

    /// Whether its trace is kept. A client that disconnected is not a failure.
    pub(crate) fn keeps(&self, end: &End) -> Option<Kept> {
        if self.errors && end.failed.is_some_and(|kind| kind != ErrorKind::Cancelled) {
            return Some(Kept::Error);
        }
        (self.slow && self.is_slow(end)).then_some(Kept::Slow)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failures_and_slow_requests_are_kept_where_that_is_wanted() {
        let ms = Duration::from_millis;
        let end = |failed, took, first: Option<u64>| End { failed, took: ms(took), first_token: first.map(ms) };
        let (fine, late) = (end(None, 900, Some(90)), end(None, 900, Some(101)));
        let long = end(None, 1_001, Some(1));
        let failed = end(Some(ErrorKind::Unavailable), 50, None);
        let waited = end(Some(ErrorKind::Cancelled), 101, None);
        let gone = end(Some(ErrorKind::Cancelled), 99, None);
        // end, kept with both settings, with errors only, with slow only
        let cases = [
            (fine, None, None, None),
            (late, Some(Kept::Slow), None, Some(Kept::Slow)),
            (long, Some(Kept::Slow), None, Some(Kept::Slow)),
            (failed, Some(Kept::Error), Some(Kept::Error), None),
            (waited, Some(Kept::Slow), None, Some(Kept::Slow)),
            (gone, None, None, None),
        ];
        let config = TelemetryConfig { slow_first_token_ms: 100, slow_ms: 1_000, ..TelemetryConfig::default() };
        for (end, both, errors, slow) in cases {
            let with = |keep_errors, keep_slow| {
                TailPolicy::new(&TelemetryConfig { keep_errors, keep_slow, ..config.clone() }).keeps(&end)
            };
            assert_eq!((with(true, true), with(true, false), with(false, true)), (both, errors, slow), "{end:?}");
            assert_eq!(with(false, false), None);
        }
    }
}
