//! Authenticates callers by key, and passes the caller to the handlers behind.

use super::error::Shape;
use super::headers;
use crate::auth::{Access, Denied, KEY_HEADERS};
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode, header};
use axum::middleware::Next;
use axum::response::Response;

/// Adds the caller to the request, and removes the key: no code behind this sees it.
pub(super) async fn admit(State(access): State<Access>, mut request: Request, next: Next) -> Response {
    let shape = Shape::of(request.uri());
    match access.caller(request.headers()) {
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
