//! Opening streams to workers: what a request says, how long it may take, which trace it belongs to.

use crate::workers::WorkerHandle;
use baton_node::grpc::set_deadline;
use baton_proto::convert::status::{stated_error, to_error};
use baton_proto::v1::{self, decode_client::DecodeClient, prefill_client::PrefillClient};
use baton_types::{ErrorKind, RequestError, RequestId};
use std::time::Instant;
use tonic::{Request, Streaming};
use tracing::Span;

/// Hex digits that keep the name of one attempt apart from all others on a worker.
const ATTEMPT_HEX: usize = 16;

/// The name of one attempt on the workers: two clients may use one request id, and a retry may meet its own former attempt.
pub(super) fn attempt_id(request: &RequestId) -> RequestId {
    let kept = &request.as_str()[..request.as_str().len().min(RequestId::BYTES_MAX - ATTEMPT_HEX - 1)];
    RequestId::try_new(format!("{kept}.{:016x}", rand::random::<u64>())).expect("a cut name and hex digits are a name")
}

/// The spans of one call.
#[derive(Clone, Copy, Debug)]
pub(super) struct Spans<'a> {
    /// Of the call.
    pub(super) call: &'a Span,
    /// Of the request.
    pub(super) request: &'a Span,
}

/// Opens the stream that holds the claim on a decode worker.
pub(super) async fn open_decode(
    worker: &WorkerHandle,
    deadline: Instant,
    sequence: v1::Sequence,
    prefill: v1::decode_request::Prefill,
    spans: Spans<'_>,
) -> Result<Streaming<v1::DecodeEvent>, RequestError> {
    let party = Some(worker.party().clone().into());
    let request = v1::DecodeRequest { sequence: Some(sequence), prefill: Some(prefill), party };
    let request = addressed(request, deadline, spans)?;
    let answer = DecodeClient::new(worker.channel()).generate(request).await;
    Ok(answer.map_err(|s| of_worker(worker, &s))?.into_inner())
}

/// Calls a prefill worker for a sequence that `sink` has claimed capacity for. From there it reads first what it lacks of so many tokens.
pub(super) async fn open_prefill(
    worker: &WorkerHandle,
    (sink, pull_to_tokens): (&WorkerHandle, u64),
    deadline: Instant,
    sequence: v1::Sequence,
    spans: Spans<'_>,
) -> Result<Streaming<v1::PrefillEvent>, RequestError> {
    let address = sink.record.shards.first().map(|s| s.transfer_address.clone()).unwrap_or_default();
    let pull = (pull_to_tokens > 0).then(|| v1::PullPrefix {
        owner: Some(sink.party().clone().into()),
        owner_address: address.clone().into(),
        tokens: u32::try_from(pull_to_tokens).unwrap_or(u32::MAX),
        block_tokens: sink.record.layout.block_tokens(),
    });
    let request = v1::PrefillRequest {
        sequence: Some(sequence),
        sink: Some(sink.party().clone().into()),
        sink_address: address.into(),
        party: Some(worker.party().clone().into()),
        pull,
    };
    let request = addressed(request, deadline, spans)?;
    let answer = PrefillClient::new(worker.channel()).run(request).await;
    Ok(answer.map_err(|s| of_worker(worker, &s))?.into_inner())
}

fn addressed<T>(message: T, deadline: Instant, spans: Spans<'_>) -> Result<Request<T>, RequestError> {
    let now = Instant::now();
    if deadline <= now {
        return Err(RequestError::new(ErrorKind::DeadlineExceeded, "the deadline passed before a worker was called"));
    }
    let mut request = Request::new(message);
    set_deadline(request.metadata_mut(), deadline, now);
    baton_node::telemetry::inject_call(spans.call, spans.request, request.metadata_mut());
    Ok(request)
}

/// A worker's refusal, or what became of the connection to it, with its name before the message.
pub(super) fn of_worker(worker: &WorkerHandle, status: &tonic::Status) -> RequestError {
    let error = to_error(status);
    let who = format!("{} worker {}", worker.record.role.name(), worker.party().instance);
    let is_gone = error.kind == ErrorKind::Unavailable && stated_error(status).is_none();
    let message = match is_gone {
        true => format!("{who} is gone or cannot be reached ({}); send the request again", error.message),
        false => format!("{who}: {}", error.message),
    };
    RequestError { message, ..error }
}

/// A worker broke the order of its events.
pub(super) fn out_of_order(worker: &WorkerHandle) -> RequestError {
    let who = format!("{} worker {}", worker.record.role.name(), worker.party().instance);
    RequestError::new(ErrorKind::Internal, format!("{who} sent an event that does not belong here"))
}

/// A prefill worker has handed its KV over, and the decode worker says nothing of it.
pub(super) fn not_adopted(prefill: &WorkerHandle, decode: &WorkerHandle) -> RequestError {
    let message = format!(
        "prefill worker {} has handed the KV over and decode worker {} did not adopt it; send the request again",
        prefill.party().instance,
        decode.party().instance
    );
    RequestError::new(ErrorKind::Unavailable, message)
}

/// The stream of a worker ended although the sequence had not.
pub(super) fn ended_early(worker: &WorkerHandle) -> RequestError {
    let who = format!("{} worker {}", worker.record.role.name(), worker.party().instance);
    RequestError::new(
        ErrorKind::Unavailable,
        format!("{who} ended its stream before the sequence was finished; send the request again"),
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attempts_of_one_id_differ_and_stay_names() {
        for id in ["a".to_owned(), "x".repeat(128)] {
            let id = RequestId::try_new(id).unwrap();
            assert_ne!(attempt_id(&id), attempt_id(&id));
            assert!(attempt_id(&id).as_str().starts_with(&id.as_str()[..1]));
        }
    }
}
