//! Pages of other origins: which of them may call, by the setting `http.cors_origins`.

use axum::http::{HeaderName, HeaderValue, Method, Uri, header};
use std::time::Duration;
use tower_http::cors::{AllowHeaders, AllowOrigin, CorsLayer};

/// Stands for every origin.
pub(super) const ANY: &str = "*";
/// How long browsers keep the answer to a preflight.
const MAX_AGE: Duration = Duration::from_secs(600);
/// Headers of answers that pages may read besides the plain ones.
const EXPOSED: [HeaderName; 6] = [
    HeaderName::from_static("x-request-id"),
    HeaderName::from_static("request-id"),
    HeaderName::from_static("x-trace-id"),
    HeaderName::from_static("x-baton-cache-hit"),
    HeaderName::from_static("x-baton-ignored-fields"),
    header::RETRY_AFTER,
];

/// Whether a text is an origin as browsers send it, `scheme://host[:port]`, or stands for all of them.
pub(crate) fn is_origin(text: &str) -> bool {
    let parts = |uri: Uri| {
        let is_bare = uri.path() == "/" && uri.query().is_none() && !text.ends_with('/');
        is_bare && uri.scheme().is_some() && uri.authority().is_some_and(|a| !a.as_str().contains('@'))
    };
    text == ANY || (!text.contains(|c: char| c.is_ascii_uppercase()) && text.parse().is_ok_and(parts))
}

/// Adds the headers of these origins, and answers their preflights; `None` without any. Keys come in headers that pages
/// set themselves, so no credentials of browsers are allowed.
pub(crate) fn cors(origins: &[String]) -> Option<CorsLayer> {
    let allowed = if origins.iter().any(|origin| origin == ANY) {
        AllowOrigin::any()
    } else {
        AllowOrigin::list(origins.iter().filter_map(|origin| HeaderValue::from_str(origin).ok()))
    };
    let layer = CorsLayer::new()
        .allow_origin(allowed)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request())
        .expose_headers(EXPOSED)
        .max_age(MAX_AGE);
    (!origins.is_empty()).then_some(layer)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_origin_is_a_scheme_and_a_host() {
        for origin in ["*", "http://localhost:3000", "https://chat.example.com", "app://x"] {
            assert!(is_origin(origin), "{origin}");
        }
        for other in ["", "null", "example.com", "https://a/", "https://a/b", "https://a?b", "https://u@a", "https://A"]
        {
            assert!(!is_origin(other), "{other}");
        }
        assert!(cors(&[]).is_none() && cors(&["*".into()]).is_some());
    }
}
