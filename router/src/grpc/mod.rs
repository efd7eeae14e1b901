//! The gRPC front: `baton.v1.Inference` over the flow, and `baton.v1.Admin` for operators.

mod access;
mod admin;
mod convert;
mod trace;

pub(crate) use access::{callers, operators};
pub(crate) use admin::AdminService;

use crate::auth::Caller;
use crate::deadline::{Deadlines, of_grpc};
use crate::flow::{Core, Generation, Refused};
use crate::output::{Event, EventResult};
use baton_proto::convert::{finish_reason_code, status};
use baton_proto::v1::{self, inference_server::Inference};
use baton_types::RequestId;
use futures::StreamExt as _;
use futures::stream::BoxStream;
use std::sync::Arc;
use std::time::Instant;
use tonic::metadata::MetadataMap;
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
        let (metadata, extensions, message) = request.into_parts();
        let Caller { tenant, operator: _ } = access::caller(&extensions)?;
        let stated = of_grpc(&metadata);
        let headers = metadata.into_headers();
        let (id, given) = convert::id(&message, &headers);
        let request = given.and(stated).and_then(|stated| {
            convert::request((id.clone(), tenant), message, headers, received, self.deadlines.of(stated, received))
        });
        let generation = match request {
            Ok(request) => self.core.generate(request).await,
            Err(error) => Err(Refused { error, trace_id: String::new() }),
        };
        match generation {
            Ok(generation) => {
                let trace_id = generation.trace_id.clone();
                let mut response = Response::new(responses(generation));
                name(response.metadata_mut(), &id, &trace_id);
                Ok(response)
            }
            Err(refused) => {
                let mut status = status::from_error(&refused.error);
                name(status.metadata_mut(), &id, &refused.trace_id);
                Err(status)
            }
        }
    }
}

/// Names request and trace in the metadata of an answer.
fn name(metadata: &mut MetadataMap, id: &RequestId, trace_id: &str) {
    for (key, value) in [("x-request-id", id.as_str()), ("x-trace-id", trace_id)] {
        if let Some(value) = value.parse().ok().filter(|_| !value.is_empty()) {
            metadata.insert(key, value);
        }
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
                crossed_classes: finished.crossed_classes,
                ..Default::default()
            },
        };
        message.request_id.clone_from(&request_id);
        if let Some((trace_id, model)) = first.take() {
            (message.trace_id, message.model, message.seed) = (trace_id, model, seed);
        }
        Ok(message)
    };
    events.map(convert).boxed()
}
