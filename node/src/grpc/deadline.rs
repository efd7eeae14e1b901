//! `grpc-timeout`: a caller's timeout becomes an instant, and the remaining time is sent with further calls.

use baton_types::RequestError;
use std::time::{Duration, Instant};
use tonic::metadata::{MetadataMap, MetadataValue};

/// The header, as the gRPC protocol names it.
pub const TIMEOUT_HEADER: &str = "grpc-timeout";

/// Parses a timeout as the gRPC protocol writes it: at most 8 digits and a unit, `H`, `M`, `S`, `m`, `u` or `n`.
pub fn parse_timeout(text: &str) -> Option<Duration> {
    let (digits, unit) = text.split_at_checked(text.len().checked_sub(1)?)?;
    if digits.is_empty() || digits.len() > 8 || !digits.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    let value: u64 = digits.parse().ok()?;
    Some(match unit {
        "H" => Duration::from_secs(value * 3600),
        "M" => Duration::from_secs(value * 60),
        "S" => Duration::from_secs(value),
        "m" => Duration::from_millis(value),
        "u" => Duration::from_micros(value),
        "n" => Duration::from_nanos(value),
        _ => return None,
    })
}

/// When a call must end: after the caller's timeout, but at most `timeout_max` from now; `timeout_max` if it states
/// none.
pub fn deadline_of(metadata: &MetadataMap, now: Instant, timeout_max: Duration) -> Result<Instant, RequestError> {
    let timeout = match metadata.get(TIMEOUT_HEADER) {
        None => timeout_max,
        Some(value) => value.to_str().ok().and_then(parse_timeout).ok_or_else(|| {
            RequestError::invalid(TIMEOUT_HEADER, "grpc-timeout must be at most 8 digits and a unit, e.g. 1500m or 30S")
        })?,
    };
    Ok(now + timeout.min(timeout_max))
}

/// Sets a call's timeout to the time left until `deadline`. If none is left it is one microsecond, so that the callee
/// reports the timeout.
pub fn set_deadline(metadata: &mut MetadataMap, deadline: Instant, now: Instant) {
    let micros = deadline.saturating_duration_since(now).as_micros().max(1);
    // At most 8 digits: the finest unit that holds the value, rounded up so that this side times out first.
    let units = [(1u128, "u"), (1_000, "m"), (1_000_000, "S"), (60_000_000, "M"), (3_600_000_000, "H")];
    let fits = |&&(factor, _): &&(u128, &str)| micros.div_ceil(factor) < 100_000_000;
    let (factor, unit) = units.iter().find(fits).unwrap_or(&units[4]);
    let value = micros.div_ceil(*factor).min(99_999_999);
    if let Ok(text) = MetadataValue::try_from(format!("{value}{unit}")) {
        metadata.insert(TIMEOUT_HEADER, text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn timeouts_parse_as_the_protocol_says() {
        let check = |text: &str, expected: Option<Duration>| assert_eq!(parse_timeout(text), expected, "{text:?}");
        check("1H", Some(Duration::from_secs(3600)));
        check("2M", Some(Duration::from_secs(120)));
        check("3S", Some(Duration::from_secs(3)));
        check("1500m", Some(Duration::from_millis(1500)));
        check("7u", Some(Duration::from_micros(7)));
        check("99999999n", Some(Duration::from_nanos(99_999_999)));
        check("99999999H", Some(Duration::from_secs(99_999_999 * 3600)));
        for bad in ["", "S", "5", "5s", "-1S", "+1S", "123456789S", "1.5S", "1 S", "1é"] {
            check(bad, None);
        }
    }

    #[test]
    fn deadlines_are_capped_and_travel_on() {
        let (now, max) = (Instant::now(), Duration::from_secs(60));
        let deadline = |text: Option<&str>| {
            let mut metadata = MetadataMap::new();
            text.map(|t| metadata.insert(TIMEOUT_HEADER, t.parse().unwrap()));
            deadline_of(&metadata, now, max).map(|d| d - now)
        };
        assert_eq!(deadline(None).unwrap(), max);
        assert_eq!(deadline(Some("5S")).unwrap(), Duration::from_secs(5));
        assert_eq!(deadline(Some("5H")).unwrap(), max);
        assert_eq!(deadline(Some("soon")).unwrap_err().param.as_deref(), Some(TIMEOUT_HEADER));

        for (left, header) in [
            (0, "1u"),
            (1_500_000, "1500000u"),
            (99_999_999, "99999999u"),
            (100_000_001, "100001m"),
            (8_000_000_000_000, "8000000S"),
        ] {
            let mut metadata = MetadataMap::new();
            set_deadline(&mut metadata, now + Duration::from_micros(left), now);
            assert_eq!(metadata.get(TIMEOUT_HEADER).unwrap(), header);
        }
    }
}
