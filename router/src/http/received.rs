//! A call of the API as it was received: its head, and its body within the limits.

use super::body::{self, BodyError};
use super::error::Shape;
use super::{HttpState, headers};
use crate::auth::Caller;
use axum::body::Body;
use axum::http::request::Parts;
use axum::http::{HeaderMap, StatusCode};
use axum::response::Response;
use baton_node::intake::{Client, Hold};
use baton_types::{ErrorKind, RequestError, RequestId};
use std::time::Instant;

/// A call without its body.
pub(super) struct Head {
    pub(super) id: RequestId,
    /// The shape of its errors.
    pub(super) shape: Shape,
    pub(super) caller: Caller,
    /// The client whose shares its body and answer use.
    pub(super) client: Client,
    pub(super) headers: HeaderMap,
    pub(super) received: Instant,
    pub(super) deadline: Instant,
}

/// A call, and the memory that is held for its body.
pub(super) struct Received {
    pub(super) head: Head,
    pub(super) body: Vec<u8>,
    pub(super) hold: Hold,
}

/// Receives a call whole, or returns the response that refuses it.
pub(super) async fn receive(
    state: &HttpState,
    caller: Caller,
    call: axum::extract::Request,
) -> Result<Received, Response> {
    let received = state.core.runtime.now();
    let (Parts { headers, extensions, uri, .. }, body) = call.into_parts();
    let shape = Shape::of(&uri);
    let (id, given) = headers::id(&headers);
    let deadline = given.and_then(|()| headers::deadline(&headers, state.deadlines, received));
    let refused = match deadline {
        _ if !headers::is_json(&headers) => {
            let message = "the body must be JSON: set content-type: application/json";
            shape.plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
        }
        _ if !headers::is_plain(&headers) => {
            let message = "the body must not be compressed: send it without content-encoding";
            shape.plain(StatusCode::UNSUPPORTED_MEDIA_TYPE, message, "unsupported_media_type")
        }
        Err(e) => shape.response(&e),
        Ok(deadline) => {
            let client = caller.client(&extensions);
            let head = Head { id: id.clone(), shape, caller, client, headers, received, deadline };
            match read_body(state, body, head).await {
                Ok(received) => return Ok(received),
                Err(refused) => refused,
            }
        }
    };
    Err(headers::add_id(refused, &id))
}

/// The deadline counts from the first byte: a client that sends its body slowly waits no longer than one that gets no
/// answer. The body's memory is held until it is tokenized.
async fn read_body(state: &HttpState, body: Body, head: Head) -> Result<Received, Response> {
    let shape = head.shape;
    let mut hold = state.core.intake.hold(head.client.clone());
    Err(match body::read(body, state.body, head.received, head.deadline, &mut hold).await {
        Ok(body) => return Ok(Received { head, body, hold }),
        Err(BodyError::TooLarge) => {
            let message = format!("the body is over the limit of {} bytes", state.body.bytes_max);
            shape.plain(StatusCode::PAYLOAD_TOO_LARGE, &message, "request_too_large")
        }
        Err(BodyError::Full(full)) => shape.response(&full.into()),
        Err(BodyError::Slow) => {
            let message = format!("the body was not complete within {:?}; send it faster", state.body.time_max);
            shape.plain(StatusCode::REQUEST_TIMEOUT, &message, "body_timeout")
        }
        Err(BodyError::Deadline) => {
            let message = "the deadline passed before the whole body had come";
            shape.response(&RequestError::new(ErrorKind::DeadlineExceeded, message))
        }
        Err(BodyError::Unreadable) => {
            shape.plain(StatusCode::BAD_REQUEST, "the body could not be read", "unreadable_body")
        }
    })
}
