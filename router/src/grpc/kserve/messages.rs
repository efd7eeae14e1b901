//! The layer before the service: checks requests as bytes before they are decoded, refuses methods that are not served,
//! and holds memory for whole answers until their clients have read them.
//!
//! An input tensor takes two bytes on the wire and hundreds as a struct, and a number of one byte becomes eight. So
//! lists have limits, and the memory of numbers is counted.

use super::super::one_message::{admit, read};
use crate::config::READING_COSTS;
use crate::request::PROMPTS_MAX;
use baton_node::calls::Counted;
use baton_node::grpc::{MessageHold, PREFIX_BYTES, message_bytes};
use baton_node::intake::Hold;
use baton_proto::convert::status;
use baton_types::RequestError;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame};
use http_body_util::Full;
use prost::bytes::{Buf as _, Bytes};
use prost::encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field};
use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::Service;

use tonic::server::NamedService;

/// Most input tensors, and most output tensors, of one request.
pub(super) const TENSORS_MAX: usize = 16;
/// Most parameters of a request.
const PARAMETERS_MAX: usize = 64;
/// Most parameters of a tensor.
const TENSOR_PARAMETERS_MAX: usize = 8;
/// Most bytes of a shape: some dimensions of ten bytes at most.
const SHAPE_BYTES_MAX: usize = 64;
/// Memory of a number per byte of its text on the wire: eight bytes, in a list that has doubled.
const NUMBER_COSTS: u64 = 16;

/// Memory of a whole answer; it lives as long as the answer's body.
#[derive(Clone, Debug)]
pub(super) struct AnswerHold {
    _hold: Arc<Hold>,
}

impl AnswerHold {
    pub(super) fn new(hold: Hold) -> Self {
        Self { _hold: Arc::new(hold) }
    }
}

/// A service whose requests are checked.
#[derive(Clone, Debug)]
pub(crate) struct CheckedMessages<S> {
    service: S,
    message_bytes_max: usize,
}

impl<S> CheckedMessages<S> {
    /// Longer messages are passed on, so that the service refuses them.
    pub(crate) fn new(service: S, message_bytes_max: usize) -> Self {
        Self { service, message_bytes_max }
    }
}

impl<S: NamedService> NamedService for CheckedMessages<S> {
    const NAME: &'static str = S::NAME;
}

impl<S> Service<Request<Body>> for CheckedMessages<S>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible> + Clone + Send + 'static,
    S::Future: Send,
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
        let max = self.message_bytes_max;
        let (parts, body) = request.into_parts();
        let method = Method::of(parts.uri.path());
        async move {
            let body = match method {
                Method::Small => body,
                Method::Infer => match read(body, max, parts.extensions.get(), check_infer).await {
                    Ok(whole) => Body::new(Full::new(whole)),
                    Err(refused) => return Ok(refused.into_http()),
                },
                Method::Stream => {
                    let held = parts.extensions.get().cloned();
                    Body::new(EachMessage { body, bytes: Vec::new(), max, held, passes: false, ended: false })
                }
                Method::Unserved(name) => return Ok(unserved(&name).into_http()),
            };
            let mut answer = service.call(Request::from_parts(parts, body)).await?;
            Ok(match answer.extensions_mut().remove::<AnswerHold>() {
                Some(hold) => answer.map(|body| Body::new(Counted::new(body, hold))),
                None => answer,
            })
        }
        .boxed()
    }
}

/// How the messages of a method are treated.
enum Method {
    /// Names alone.
    Small,
    Infer,
    Stream,
    /// A method of the protocol, or none.
    Unserved(String),
}

/// Longer than any name of a method.
const METHOD_CHARS_MAX: usize = 64;

impl Method {
    fn of(path: &str) -> Self {
        match path.rsplit('/').next().unwrap_or_default() {
            "ServerLive" | "ServerReady" | "ModelReady" | "ServerMetadata" | "ModelMetadata" => Self::Small,
            "ModelInfer" => Self::Infer,
            "ModelStreamInfer" => Self::Stream,
            name => Self::Unserved(name.chars().take(METHOD_CHARS_MAX).collect()),
        }
    }
}

fn unserved(method: &str) -> Status {
    Status::unimplemented(format!(
        "{method} is not served: models are loaded by the operators of the cluster, tensors come with the request, and metrics are \
         at /metrics; use ServerLive, ServerReady, ServerMetadata, ModelReady, ModelMetadata, ModelInfer or ModelStreamInfer"
    ))
}

/// The messages of a stream, each passed on once it is complete and checked.
struct EachMessage {
    body: Body,
    /// What has come of the next messages.
    bytes: Vec<u8>,
    max: usize,
    held: Option<MessageHold>,
    /// After a message that is too long: the service refuses it.
    passes: bool,
    /// After a message that was refused: nothing follows.
    ended: bool,
}

impl EachMessage {
    /// The next complete message, with its prefix.
    fn next(&mut self) -> Option<Result<Bytes, Status>> {
        let (prefix, rest) = self.bytes.split_first_chunk()?;
        let length = message_bytes(prefix);
        if length > self.max || self.passes {
            self.passes = true;
            return Some(Ok(std::mem::take(&mut self.bytes).into()));
        }
        let message = rest.get(..length)?;
        if let Err(error) = admit(message, self.held.as_ref(), check_infer) {
            self.bytes.clear();
            self.ended = true;
            return Some(Err(status::from_error(&error)));
        }
        let later = self.bytes.split_off(PREFIX_BYTES + length);
        Some(Ok(std::mem::replace(&mut self.bytes, later).into()))
    }
}

impl HttpBody for EachMessage {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        if this.ended {
            return Poll::Ready(None);
        }
        loop {
            if let Some(message) = this.next() {
                return Poll::Ready(Some(message.map(Frame::data)));
            }
            match ready!(Pin::new(&mut this.body).poll_frame(cx)) {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => this.bytes.extend_from_slice(&data),
                    Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
                },
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                // A message that was cut off is told by the decoder.
                None if this.bytes.is_empty() => return Poll::Ready(None),
                None => return Poll::Ready(Some(Ok(Frame::data(std::mem::take(&mut this.bytes).into())))),
            }
        }
    }
}

/// Memory of a decoded `ModelInferRequest`.
///
/// # Errors
/// If one of its lists has too many items.
fn check_infer(message: &[u8]) -> Result<u64, RequestError> {
    let (mut inputs, mut outputs, mut contents, mut parameters, mut numbers) = (0, 0, 0, 0, 0);
    fields(message, &mut |number, field| match number {
        4 => count("parameters", &mut parameters, PARAMETERS_MAX),
        5 => {
            count("inputs", &mut inputs, TENSORS_MAX)?;
            numbers += check_input(field)?;
            Ok(())
        }
        6 => {
            count("outputs", &mut outputs, TENSORS_MAX)?;
            let mut parameters = 0;
            fields(field, &mut |number, _| match number {
                2 => count("outputs.parameters", &mut parameters, TENSOR_PARAMETERS_MAX),
                _ => Ok(()),
            })
        }
        7 => count("raw_input_contents", &mut contents, TENSORS_MAX),
        _ => Ok(()),
    })?;
    Ok((PREFIX_BYTES + message.len()) as u64 * READING_COSTS + numbers * NUMBER_COSTS)
}

/// Bytes of the numbers in an input tensor. Its contents may come in several pieces, which are joined.
fn check_input(tensor: &[u8]) -> Result<u64, RequestError> {
    let (mut shape, mut parameters, mut texts, mut numbers) = (0, 0, 0, 0);
    fields(tensor, &mut |number, field| match number {
        3 => {
            shape += field.len();
            let message = || format!("inputs.shape takes at most {SHAPE_BYTES_MAX} bytes");
            if shape > SHAPE_BYTES_MAX { Err(RequestError::invalid("inputs.shape", message())) } else { Ok(()) }
        }
        4 => count("inputs.parameters", &mut parameters, TENSOR_PARAMETERS_MAX),
        5 => fields(field, &mut |number, field| match number {
            8 => count("inputs.contents.bytes_contents", &mut texts, PROMPTS_MAX),
            _ => {
                numbers += field.len() as u64;
                Ok(())
            }
        }),
        _ => Ok(()),
    })?;
    Ok(numbers)
}

fn count(name: &str, counted: &mut usize, max: usize) -> Result<(), RequestError> {
    *counted += 1;
    if *counted > max {
        return Err(RequestError::invalid(name, format!("{name} takes at most {max} items")));
    }
    Ok(())
}

/// Takes a field's number and bytes.
type Visit<'a> = dyn FnMut(u32, &[u8]) -> Result<(), RequestError> + 'a;

/// Passes each field's number and bytes to `with`, in one level. Bytes that are no message end it: the service refuses
/// them.
fn fields(mut message: &[u8], with: &mut Visit<'_>) -> Result<(), RequestError> {
    while message.has_remaining() {
        let Ok((number, wire)) = decode_key(&mut message) else { return Ok(()) };
        let field = if wire == WireType::LengthDelimited {
            let Ok(length) = decode_varint(&mut message) else { return Ok(()) };
            let Some((field, rest)) = usize::try_from(length).ok().and_then(|n| message.split_at_checked(n)) else {
                return Ok(());
            };
            message = rest;
            field
        } else {
            let before = message;
            if skip_field(wire, number, &mut message, DecodeContext::default()).is_err() {
                return Ok(());
            }
            &before[..before.len() - message.len()]
        };
        with(number, field)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_proto::kserve::model_infer_request::{InferInputTensor, InferRequestedOutputTensor};
    use baton_proto::kserve::{InferParameter, InferTensorContents, ModelInferRequest};
    use http_body_util::BodyExt as _;
    use prost::Message as _;

    fn parameters(count: usize) -> std::collections::HashMap<String, InferParameter> {
        (0..count).map(|i| (i.to_string(), InferParameter::default())).collect()
    }

    fn check(request: &ModelInferRequest) -> Result<u64, Option<String>> {
        check_infer(&request.encode_to_vec()).map_err(|e| e.param)
    }

    #[test]
    fn lists_are_bounded_by_name() {
        let refused = |name: &str| Err(Some(name.to_owned()));
        let of = |inputs| ModelInferRequest { inputs, ..Default::default() };
        let input = InferInputTensor::default();
        assert!(check(&of(vec![input.clone(); TENSORS_MAX])).is_ok());
        assert_eq!(check(&of(vec![input.clone(); TENSORS_MAX + 1])), refused("inputs"));
        let raw = ModelInferRequest { raw_input_contents: vec![Bytes::new(); 17], ..Default::default() };
        assert_eq!(check(&raw), refused("raw_input_contents"));
        let many = ModelInferRequest { parameters: parameters(PARAMETERS_MAX + 1), ..Default::default() };
        assert_eq!(check(&many), refused("parameters"));
        let tensor = InferInputTensor { parameters: parameters(TENSOR_PARAMETERS_MAX + 1), ..Default::default() };
        assert_eq!(check(&of(vec![tensor])), refused("inputs.parameters"));
        let tensor = InferInputTensor { shape: vec![1; SHAPE_BYTES_MAX + 1], ..Default::default() };
        assert_eq!(check(&of(vec![tensor])), refused("inputs.shape"));
        let texts = InferTensorContents { bytes_contents: vec![Bytes::new(); PROMPTS_MAX + 1], ..Default::default() };
        let tensor = InferInputTensor { contents: Some(texts), ..Default::default() };
        assert_eq!(check(&of(vec![tensor])), refused("inputs.contents.bytes_contents"));
        let output = InferRequestedOutputTensor { parameters: parameters(9), ..Default::default() };
        let outputs = ModelInferRequest { outputs: vec![output], ..Default::default() };
        assert_eq!(check(&outputs), refused("outputs.parameters"));
        let outputs = ModelInferRequest { outputs: vec![Default::default(); 17], ..Default::default() };
        assert_eq!(check(&outputs), refused("outputs"));
    }

    #[test]
    fn numbers_count_as_they_are_kept() {
        let contents = InferTensorContents { int64_contents: vec![1; 1000], ..Default::default() };
        let tensor = InferInputTensor { contents: Some(contents), ..Default::default() };
        let request = ModelInferRequest { inputs: vec![tensor], ..Default::default() };
        let kept = (size_of::<i64>() * 1000) as u64;
        assert!(check(&request).unwrap() >= kept + request.encoded_len() as u64);
        for no_message in [&[0xff; 30][..], &[0x2a, 0x7f], b"", &[0x2b, 0x2b, 0x2b]] {
            assert!(check_infer(no_message).is_ok());
        }
    }

    fn framed(message: &[u8]) -> Vec<u8> {
        let length = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[0][..], &length, message].concat()
    }

    #[tokio::test]
    async fn a_stream_passes_whole_messages_on() {
        let (good, bad) = (
            ModelInferRequest { id: "1".into(), ..Default::default() }.encode_to_vec(),
            ModelInferRequest { raw_input_contents: vec![Bytes::new(); 17], ..Default::default() }.encode_to_vec(),
        );
        let pass = async |bytes: Vec<u8>, piece: usize, max: usize| {
            let frames: Vec<_> = bytes.chunks(piece).map(Bytes::copy_from_slice).collect();
            let frames = futures::stream::iter(frames.into_iter().map(|data| Ok::<_, Status>(Frame::data(data))));
            let body = Body::new(http_body_util::StreamBody::new(frames));
            let mut each = EachMessage { body, bytes: Vec::new(), max, held: None, passes: false, ended: false };
            let mut passed = Vec::new();
            while let Some(frame) = each.frame().await {
                passed.push(frame.map(|frame| frame.into_data().unwrap().to_vec()).map_err(|s| s.code()));
            }
            passed
        };
        let (one, two) = (framed(&good), [framed(&good), framed(&good)].concat());
        for piece in [1, 3, 7, 100] {
            assert_eq!(pass(two.clone(), piece, 1000).await, [Ok(one.clone()), Ok(one.clone())], "{piece}");
        }
        let cut = [&one[..], &one[..4]].concat();
        assert_eq!(pass(cut, 100, 1000).await, [Ok(one.clone()), Ok(one[..4].to_vec())]);
        let long: Vec<u8> = pass(two.clone(), 100, 1).await.into_iter().flat_map(Result::unwrap).collect();
        assert_eq!(long, two, "the service refuses it");
        let refused = [framed(&bad), framed(&good)].concat();
        assert_eq!(pass(refused, 100, 1000).await, [Err(tonic::Code::InvalidArgument)]);
    }
}
