//! Headers of requests and answers.

use crate::deadline::{Deadlines, parse_http};
use crate::request::request_id;
use axum::http::{HeaderMap, HeaderName, HeaderValue, header};
use axum::response::Response;
use baton_types::{RequestError, RequestId};
use std::time::Instant;

const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
const REQUEST_TIMEOUT: HeaderName = HeaderName::from_static("x-request-timeout");
const TRACE_ID: HeaderName = HeaderName::from_static("x-trace-id");
/// Cached share of the prompt, in percent.
const CACHE_HIT: HeaderName = HeaderName::from_static("x-baton-cache-hit");
/// Names of fields that were ignored, since the API does not have them.
const IGNORED_FIELDS: HeaderName = HeaderName::from_static("x-baton-ignored-fields");

/// The request's id from its header, see [`request_id`].
pub(super) fn id(headers: &HeaderMap) -> (RequestId, Result<(), RequestError>) {
    request_id(headers.get(REQUEST_ID).map(|v| v.to_str().unwrap_or_default()), REQUEST_ID.as_str())
}

/// The instant at which the request ends.
pub(super) fn deadline(headers: &HeaderMap, deadlines: Deadlines, received: Instant) -> Result<Instant, RequestError> {
    let stated = headers.get(REQUEST_TIMEOUT).map(|v| parse_http(v.to_str().unwrap_or_default())).transpose()?;
    Ok(deadlines.of(stated, received))
}

/// Whether the content type is JSON. Any other is refused: pages of other origins can send other types without a
/// preflight.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    let value = headers.get(header::CONTENT_TYPE).and_then(|v| v.to_str().ok()).unwrap_or_default();
    value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
}

/// Whether the body has no content coding.
pub(super) fn is_plain(headers: &HeaderMap) -> bool {
    let codings = headers.get_all(header::CONTENT_ENCODING).iter().flat_map(|v| v.as_bytes().split(|b| *b == b','));
    codings.map(<[u8]>::trim_ascii).all(|coding| coding.is_empty() || coding.eq_ignore_ascii_case(b"identity"))
}

/// Adds the request's id to its answer.
pub(super) fn add_id(mut response: Response, id: &RequestId) -> Response {
    if let Ok(value) = HeaderValue::from_str(id.as_str()) {
        response.headers_mut().insert(REQUEST_ID, value);
    }
    response
}

/// The request's id under the name that clients of Anthropic's API read.
pub(super) async fn request_id_of_anthropic(mut response: Response) -> Response {
    if let Some(id) = response.headers().get(REQUEST_ID).cloned() {
        response.headers_mut().insert("request-id", id);
    }
    response
}

/// Adds the trace id, if there is one.
pub(super) fn add_trace(mut response: Response, trace_id: &str) -> Response {
    if let Some(value) = HeaderValue::from_str(trace_id).ok().filter(|v| !v.is_empty()) {
        response.headers_mut().insert(TRACE_ID, value);
    }
    response
}

/// Adds the names of ignored fields, if there are some.
pub(super) fn add_ignored(mut response: Response, names: &[String]) -> Response {
    if let Some(value) = HeaderValue::from_str(&names.join(", ")).ok().filter(|_| !names.is_empty()) {
        response.headers_mut().insert(IGNORED_FIELDS, value);
    }
    response
}

/// The cached share of the prompt.
pub(super) fn add_cache_hit(mut response: Response, percent: u64) -> Response {
    response.headers_mut().insert(CACHE_HIT, HeaderValue::from(percent));
    response
}
