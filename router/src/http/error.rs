//! Errors in OpenAI's shape. Status codes come from the table in `types`, except for a few that only HTTP has.

use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use baton_types::RequestError;
use serde_json::{Value, json};

/// `{"error": {message, type, param, code}}`.
pub(super) fn body(error: &RequestError) -> Value {
    let (kind, code) = error.kind.openai();
    json!({"error": {"message": error.message, "type": kind, "param": error.param, "code": code}})
}

/// A complete answer that is an error.
pub(crate) fn response(error: &RequestError) -> Response {
    let status = StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    let mut response = (status, axum::Json(body(error))).into_response();
    if let Some(wait) = error.retry_after {
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    }
    response
}

/// Errors that only HTTP has.
pub(crate) fn plain(status: StatusCode, message: &str, code: &str) -> Response {
    let error = json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": code}});
    (status, axum::Json(error)).into_response()
}

pub(super) async fn no_route(uri: Uri) -> Response {
    plain(StatusCode::NOT_FOUND, &format!("there is nothing at {:.256}", uri.path()), "not_found")
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{method} is not allowed at {:.256}", uri.path());
    plain(StatusCode::METHOD_NOT_ALLOWED, &message, "method_not_allowed")
}
