//! Checks messages as bytes: a message must be complete, and its lists within their limits, before it is decoded.
//! Here is the check of `GenerateRequest`.
//!
//! A segment takes two bytes on the wire and a hundred bytes as a struct, so a message of a few MiB would take half a
//! GiB. Scanning its fields is cheap, and bytes after the first message are not read.

use super::convert::SEGMENTS_MAX;
use crate::config::READING_COSTS;
use baton_node::grpc::{MessageHold, PREFIX_BYTES, message_bytes};
use baton_proto::convert::status;
use baton_text::STOPS_MAX;
use baton_types::RequestError;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use prost::bytes::{Buf as _, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, skip_field};
use std::task::{Context, Poll};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;
use tonic::server::NamedService;

/// Repeated fields whose items are larger in memory than on the wire: field number, most items, name.
const LISTS: [(u32, usize, &str); 2] = [(2, SEGMENTS_MAX, "prompt"), (4, STOPS_MAX, "stop")];

/// Checks a message, and tells how much memory it takes decoded. Bytes that are not a valid message pass, so that the
/// service refuses them.
pub(super) type Check = fn(&[u8]) -> Result<u64, RequestError>;

/// A service that receives complete `GenerateRequest`s.
#[derive(Clone, Debug)]
pub(crate) struct WholeMessage<S> {
    service: S,
    message_bytes_max: usize,
}

impl<S> WholeMessage<S> {
    /// Longer messages are passed on, so that the service refuses them.
    pub(crate) fn new(service: S, message_bytes_max: usize) -> Self {
        Self { service, message_bytes_max }
    }
}

impl<S: NamedService> NamedService for WholeMessage<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for WholeMessage<S>
where
    S: Service<Request<Body>, Response = Response<Body>> + Clone + Send + 'static,
    S::Future: Send,
    S::Error: Send,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let clone = self.service.clone();
        // The clone that is ready.
        let mut service = std::mem::replace(&mut self.service, clone);
        let message_bytes_max = self.message_bytes_max;
        async move {
            let (parts, body) = request.into_parts();
            match read(body, message_bytes_max, parts.extensions.get(), check_generate).await {
                Ok(whole) => service.call(Request::from_parts(parts, Body::new(Full::new(whole)))).await,
                Err(refused) => Ok(refused.into_http()),
            }
        }
        .boxed()
    }
}

/// The first message of a call with its prefix, and the memory held for it.
pub(super) async fn read(
    mut body: Body,
    message_bytes_max: usize,
    held: Option<&MessageHold>,
    check: Check,
) -> Result<Bytes, Status> {
    let mut bytes = Vec::new();
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame?.into_data() {
            bytes.extend_from_slice(&data);
        }
        let Some((prefix, message)) = bytes.split_first_chunk() else { continue };
        // Bytes after the first message are ignored.
        let length = message_bytes(prefix);
        if length > message_bytes_max || message.len() >= length {
            break;
        }
    }
    admit(bytes.get(PREFIX_BYTES..).unwrap_or_default(), held, check).map_err(|error| status::from_error(&error))?;
    Ok(bytes.into())
}

/// Checks a message and holds memory for it.
pub(super) fn admit(message: &[u8], held: Option<&MessageHold>, check: Check) -> Result<(), RequestError> {
    let memory = check(message)?;
    match held {
        Some(held) => Ok(held.with(|hold| hold.set(memory.max(hold.bytes())))?),
        None => Ok(()),
    }
}

fn check_generate(message: &[u8]) -> Result<u64, RequestError> {
    check_lists(message)?;
    Ok((PREFIX_BYTES + message.len()) as u64 * READING_COSTS)
}

/// Counts the items of lists. Bytes that are not a valid message are passed on, so that the service refuses them.
fn check_lists(mut message: &[u8]) -> Result<(), RequestError> {
    let mut counts = LISTS.map(|_| 0);
    while message.has_remaining() {
        let Ok((number, wire)) = decode_key(&mut message) else { return Ok(()) };
        for ((field, max, name), count) in LISTS.into_iter().zip(&mut counts) {
            *count += usize::from(number == field && wire == WireType::LengthDelimited);
            if *count > max {
                return Err(RequestError::invalid(name, format!("{name} takes at most {max} items")));
            }
        }
        if skip_field(wire, number, &mut message, DecodeContext::default()).is_err() {
            return Ok(());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::v1;
    use prost::Message as _;

    #[test]
    fn long_lists_are_refused_by_name() {
        let check = |segments: usize, stops: usize, expected: Option<&str>| {
            let message = v1::GenerateRequest {
                model: "m".into(),
                prompt: vec![v1::Segment::default(); segments],
                stop: vec![String::new(); stops],
                priority: -3,
                ..Default::default()
            };
            let found = check_lists(&message.encode_to_vec()).map_err(|e| e.param);
            assert_eq!(found.err().flatten().as_deref(), expected, "{segments} {stops}");
        };
        check(1, 1, None);
        check(SEGMENTS_MAX, STOPS_MAX, None);
        check(SEGMENTS_MAX + 1, 0, Some("prompt"));
        check(1, STOPS_MAX + 1, Some("stop"));
        for no_message in [&[0xff; 30][..], &[0x12, 0x7f], b""] {
            assert!(check_lists(no_message).is_ok());
        }
    }
}
