//! Authenticates callers by key, and passes the caller to the handlers behind. Without a key, pages of names that may be another's are refused.

use super::cors::ANY;
use super::error::Shape;
use super::headers;
use crate::auth::{Access, Denied, KEY_HEADERS};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;
use std::net::IpAddr;
use std::sync::Arc;

/// Whom the API answers.
#[derive(Clone, Debug)]
pub(crate) struct Admitted {
    pub(crate) access: Access,
    /// Whose pages may call without a key: `http.cors_origins`.
    pub(crate) origins: Arc<[String]>,
}

/// Whether a page of this origin may call without a key. Somebody may own a name and let it lead here: his pages would have this origin
/// (DNS rebinding), and browsers would let them read the answers.
fn may_call(origins: &[String], headers: &HeaderMap) -> bool {
    let Some(origin) = headers.get(header::ORIGIN) else { return true };
    let Ok(origin) = origin.to_str() else { return false };
    origin_authority(origin).is_some_and(is_nobodys)
        || origins.iter().any(|allowed| allowed == ANY || allowed == origin)
}

/// The `host[:port]` of an origin; `null`, which stands for one that is not told, has none.
pub(crate) fn origin_authority(origin: &str) -> Option<&str> {
    origin.split_once("://").map(|(_, authority)| authority)
}

/// Adds the caller to the request, and removes the key: no code behind this sees it.
pub(super) async fn admit(State(admitted): State<Admitted>, mut request: Request, next: Next) -> Response {
    let shape = Shape::of(request.uri());
    match admitted.access.caller(request.headers()) {
        Ok(caller) if caller.key.is_none() && !may_call(&admitted.origins, request.headers()) => {
            let message = "without an API key, pages are answered at an IP address, at a name without dots, or of an origin in http.cors_origins";
            headers::add_id(
                shape.plain(StatusCode::FORBIDDEN, message, "other_origin"),
                &headers::id(request.headers()).0,
            )
        }
        Ok(caller) => {
            KEY_HEADERS.iter().for_each(|name| drop(request.headers_mut().remove(name)));
            request.extensions_mut().insert(caller);
            next.run(request).await
        }
        Err(denied) => headers::add_id(answer(denied, shape), &headers::id(request.headers()).0),
    }
}

fn answer(denied: Denied, shape: Shape) -> Response {
    let mut response = shape.plain(StatusCode::UNAUTHORIZED, &denied.to_string(), "invalid_api_key");
    response.headers_mut().insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

/// Whether nobody can own the host of this authority, `host[:port]`: it is an address, or a name without a dot.
pub(crate) fn is_nobodys(authority: &str) -> bool {
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    };
    let host = host.trim_start_matches('[').trim_end_matches(']');
    host.parse::<IpAddr>().is_ok() || !host.trim_end_matches('.').contains('.')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_of_names_that_somebody_may_own_need_a_key() {
        let call = |origins: &[String], origin: &str| {
            may_call(origins, &HeaderMap::from_iter([(header::ORIGIN, HeaderValue::from_str(origin).unwrap())]))
        };
        let listed = |origin: &str| [origin.to_owned()];
        assert!(may_call(&[], &HeaderMap::new()), "no browser");
        for own in ["http://127.0.0.1:8000", "http://[::1]:8000", "http://localhost:8000", "http://router", "app://x"] {
            assert!(call(&[], own), "{own}");
        }
        for other in ["http://evil.example", "http://evil.example:8000", "https://127.0.0.1.evil.example", "null"] {
            assert!(!call(&[], other), "{other}");
        }
        assert!(call(&listed("https://chat.example.com"), "https://chat.example.com"));
        assert!(!call(&listed("https://chat.example.com"), "https://evil.example"));
        assert!(call(&listed("*"), "https://evil.example"));
    }
}
