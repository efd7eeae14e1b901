//! Errors in Anthropic's envelope.

use baton_types::{ErrorKind, RequestError};
use serde_json::{Value, json};

/// `{"type": "error", "error": {type, message}}`.
pub(crate) fn envelope(kind: &str, message: &str) -> Value {
    json!({"type": "error", "error": {"type": kind, "message": message}})
}

pub(crate) fn error_body(error: &RequestError) -> Value {
    envelope(type_of(error.kind), &error.message)
}

fn type_of(kind: ErrorKind) -> &'static str {
    match kind {
        // The cluster has no room for anyone: a client of Anthropic's API comes again later.
        ErrorKind::Unavailable => "overloaded_error",
        kind => type_of_status(kind.http_status()),
    }
}

/// Anthropic's name for a status of HTTP.
pub(crate) const fn type_of_status(status: u16) -> &'static str {
    match status {
        401 => "authentication_error",
        403 => "permission_error",
        404 => "not_found_error",
        413 => "request_too_large",
        429 => "rate_limit_error",
        504 => "timeout_error",
        400..=498 => "invalid_request_error",
        _ => "api_error",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_kind_has_a_type() {
        let types = ErrorKind::ALL.map(type_of);
        let (invalid, api) = ("invalid_request_error", "api_error");
        let expected = [invalid, invalid, "not_found_error", "rate_limit_error", "timeout_error", api];
        assert_eq!(types[..6], expected);
        assert_eq!(types[6..], ["overloaded_error", invalid, api]);
        let told = error_body(&RequestError::invalid("max_tokens", "max_tokens is required"));
        let error = json!({"type": "invalid_request_error", "message": "max_tokens is required"});
        assert_eq!(told, json!({"type": "error", "error": error}));
    }
}
