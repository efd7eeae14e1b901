//! The gRPC front: `baton.v1.Inference` over the flow, and `baton.v1.Admin` for operators.

mod access;
mod admin;
mod convert;
mod trace;
mod whole;

pub(crate) use access::{callers, operators};
pub(crate) use admin::AdminService;
pub(crate) use whole::Whole;

use crate::deadline::{Deadlines, of_grpc};
use crate::flow::{Core, Generation, Refused};
use crate::output::{Event, EventResult, Opened, Opening, Total, cache_hit_percent};
use baton_node::grpc::Held;
use baton_node::intake::Client;
use baton_proto::convert::{finish_reason_code, status};
use baton_proto::v1::{self, inference_server::Inference};
use baton_types::{RequestError, RequestId};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::time::timeout;
use tonic::metadata::MetadataMap;
use tonic::{Request, Response, Status};

/// Cached share of the prompt in percent, as in the header of the HTTP API.
const CACHE_HIT: &str = "x-baton-cache-hit";

type Responses = BoxStream<'static, Result<v1::GenerateResponse, Status>>;

/// The service.
#[derive(Clone, Debug)]
pub(crate) struct InferenceService {
    core: Arc<Core>,
    deadlines: Deadlines,
    /// How long the head of an answer waits for its first token.
    head_max: Duration,
}

impl InferenceService {
    /// A service over the flow.
    pub(crate) fn new(core: Arc<Core>, deadlines: Deadlines, head_max: Duration) -> Self {
        Self { core, deadlines, head_max }
    }

    /// The answer with what its first token tells; one whose first token takes longer than others wait is opened without it.
    async fn answer(&self, mut generation: Generation, client: Client) -> Result<Response<Responses>, RequestError> {
        let room = self.core.answers.hold(client);
        let prompt_tokens = generation.prompt_tokens.len();
        let mut opening = Opening::new(generation.samples, &generation.events, 0, room)?;
        if self.head_max > Duration::ZERO
            && let Ok(read) = timeout(self.head_max, opening.read(&mut generation.events)).await
        {
            read?;
        }
        let (first, cached_tokens) = opening.done();
        let percent = cached_tokens.map(|cached| cache_hit_percent(cached, prompt_tokens));
        let mut response = Response::new(responses(first, generation));
        if let Some(percent) = percent {
            response.metadata_mut().insert(CACHE_HIT, percent.into());
        }
        Ok(response)
    }
}

#[tonic::async_trait]
impl Inference for InferenceService {
    type GenerateStream = Responses;

    async fn generate(&self, request: Request<v1::GenerateRequest>) -> Result<Response<Self::GenerateStream>, Status> {
        let received = Instant::now();
        let (metadata, extensions, message) = request.into_parts();
        let caller = access::caller(&extensions)?;
        let client = caller.client(&extensions);
        let stated = of_grpc(&metadata);
        let headers = metadata.into_headers();
        let (id, given) = convert::id(&message, &headers);
        let request = given.and(stated).and_then(|stated| {
            convert::request((id.clone(), caller), message, headers, received, self.deadlines.of(stated, received))
        });
        let held = extensions.get::<Held>();
        let generation = match request {
            Ok(request) => {
                // It takes no more than reading it.
                let bytes = request.prompt.bytes() + request.model.len() as u64;
                let less = held.map(|held| held.with(|hold| hold.set(bytes.min(hold.bytes())))).transpose();
                debug_assert!(less.is_ok());
                self.core.generate(request).await
            }
            Err(error) => Err(Refused { error, trace_id: String::new() }),
        };
        drop(extensions);
        let (answer, trace_id) = match generation {
            Ok(generation) => {
                let trace_id = generation.trace_id.clone();
                (self.answer(generation, client).await, trace_id)
            }
            Err(refused) => (Err(refused.error), refused.trace_id),
        };
        match answer {
            Ok(mut response) => {
                name(response.metadata_mut(), &id, &trace_id);
                Ok(response)
            }
            Err(error) => {
                let mut status = status::from_error(&error);
                name(status.metadata_mut(), &id, &trace_id);
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

fn usage(total: &Total) -> v1::Usage {
    v1::Usage { cost: total.cost.as_ref().map(|cost| cost.amount), ..total.usage.into() }
}

/// Events as messages; the first one names trace, model and seed.
fn responses(known: Opened, generation: Generation) -> Responses {
    let Generation { id, model, seed, trace_id, events, prompt_tokens: _, samples: _ } = generation;
    let request_id = id.to_string();
    let mut first = Some((trace_id, model.card.id.clone()));
    let convert = move |event: EventResult| {
        let event = event.map_err(|e| status::from_error(&e))?;
        let mut message = match event {
            Event::Delta(delta) => v1::GenerateResponse {
                index: delta.sample,
                text: delta.text,
                token_ids: delta.token_ids,
                logprobs: delta.logprobs.into_iter().map(Into::into).collect(),
                ..Default::default()
            },
            Event::Finished(finished) => v1::GenerateResponse {
                index: finished.sample,
                finish_reason: finish_reason_code(Some(finished.reason)),
                usage: finished.total.as_ref().map(usage),
                timings: Some(finished.timings.into()),
                crossed_classes: finished.crossed_classes,
                currency: finished.total.and_then(|total| total.cost).map(|cost| cost.currency).unwrap_or_default(),
                ..Default::default()
            },
        };
        message.request_id.clone_from(&request_id);
        if let Some((trace_id, model)) = first.take() {
            (message.trace_id, message.model, message.seed) = (trace_id, model, seed);
        }
        Ok(message)
    };
    // What was known stays with the rest: the room for both is there.
    let all = stream::unfold((known, events), async |(mut known, mut events)| {
        let event = match known.next() {
            Some(event) => Ok(event),
            None => events.next().await?,
        };
        Some((event, (known, events)))
    });
    all.map(convert).boxed()
}
