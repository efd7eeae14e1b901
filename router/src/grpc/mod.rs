//! The gRPC front: `baton.v1.Inference` over the flow, and `baton.v1.Admin` for operators.

mod admin;
mod convert;

pub(crate) use admin::AdminService;

use crate::deadline::{Deadlines, of_grpc};
use crate::flow::{Core, Generation};
use crate::output::{Event, EventResult};
use baton_proto::convert::{finish_reason_code, status};
use baton_proto::v1::{self, inference_server::Inference};
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::sync::Arc;
use std::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct InferenceService {
    core: Arc<Core>,
    deadlines: Deadlines,
}

impl InferenceService {
    /// A service over the flow.
    pub(crate) fn new(core: Arc<Core>, deadlines: Deadlines) -> Self {
        Self { core, deadlines }
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = BoxStream<'static, Result<v1::GenerateResponse, Status>>;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let received = Instant::now();
        let (metadata, _, message) = request.into_parts();
        let stated = of_grpc(&metadata).map_err(|e| status::from_error(&e))?;
        let deadline = self.deadlines.of(stated, received);
        let parsed = convert::request(message, metadata.into_headers(), received, deadline);
        let request = parsed.map_err(|e| status::from_error(&e))?;
        let id = request.id.clone();
        let generation = self.core.generate(request).await.map_err(|e| status::from_error(&e))?;
        let mut response = Response::new(responses(generation));
        if let Ok(id) = id.as_str().parse() {
            response.metadata_mut().insert("x-request-id", id);
        }
        Ok(response)
    }
}

/// Events as messages; the first one names trace, model and seed.
fn responses(generation: Generation) -> BoxStream<'static, Result<v1::GenerateResponse, Status>> {
    let Generation { id, model, seed, trace_id, events, prompt_tokens: _ } = generation;
    let request_id = id.to_string();
    let mut first = Some((trace_id, model.card.id));
    let convert = move |event: EventResult| {
        let event = event.map_err(|e| status::from_error(&e))?;
        let mut message = match event {
            Event::Delta(delta) => v1::GenerateResponse {
                text: delta.text,
                token_ids: delta.token_ids,
                logprobs: delta.logprobs.into_iter().map(Into::into).collect(),
                ..Default::default()
            },
            Event::Finished(finished) => v1::GenerateResponse {
                finish_reason: finish_reason_code(Some(finished.reason)),
                usage: Some(finished.usage.into()),
                timings: Some(finished.timings.into()),
                ..Default::default()
            },
        };
        message.request_id.clone_from(&request_id);
        if let Some((trace_id, model)) = first.take() {
            (message.trace_id, message.model, message.seed) = (trace_id, model, seed);
        }
        Ok(message)
    };
    ReceiverStream::new(events).map(convert).boxed()
}
