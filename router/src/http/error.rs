//! Errors in the shape of the API that was called. Status codes come from the table in `types`, except for a few that
//! only HTTP has.

use crate::{anthropic, openai};
use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, Uri, header};
use axum::response::{IntoResponse, Response};
use baton_types::RequestError;
use serde_json::json;

/// The shape of errors at one path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Shape {
    /// Also of what is no API.
    OpenAi,
    Anthropic,
}

impl Shape {
    pub(super) fn of(uri: &Uri) -> Self {
        match uri.path().strip_prefix("/v1/messages") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }

    /// A complete answer that is an error.
    pub(crate) fn response(self, error: &RequestError) -> Response {
        let status = StatusCode::from_u16(error.kind.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let body = match self {
            Self::OpenAi => openai::error::error_body(error),
            Self::Anthropic => anthropic::error::error_body(error),
        };
        let mut response = (status, Json(body)).into_response();
        if let Some(wait) = error.retry_after {
            let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
        }
        response
    }

    /// Errors that only HTTP has.
    pub(crate) fn plain(self, status: StatusCode, message: &str, code: &str) -> Response {
        let error = match self {
            Self::OpenAi => {
                json!({"error": {"message": message, "type": "invalid_request_error", "param": null, "code": code}})
            }
            Self::Anthropic => anthropic::error::envelope(anthropic::error::type_of_status(status.as_u16()), message),
        };
        (status, Json(error)).into_response()
    }
}

pub(super) async fn no_route(uri: Uri) -> Response {
    let message = format!("there is nothing at {:.256}", uri.path());
    Shape::of(&uri).plain(StatusCode::NOT_FOUND, &message, "not_found")
}

pub(super) async fn wrong_method(method: Method, uri: Uri) -> Response {
    let message = format!("{method} is not allowed at {:.256}", uri.path());
    Shape::of(&uri).plain(StatusCode::METHOD_NOT_ALLOWED, &message, "method_not_allowed")
}
