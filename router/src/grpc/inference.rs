//! `baton.v1.Inference` over the flow.

use super::{access, convert};
use crate::auth::Caller;
use crate::deadline::Deadlines;
use crate::flow::{Core, Generation, Refused};
use crate::output::{EventResult, Opened, Opening, cache_hit_percent};
use crate::request::{Prompt, Request};
use baton_node::grpc::MessageHold;
use baton_node::intake::Hold;
use baton_proto::convert::status;
use baton_proto::v1::{self, inference_server::Inference};
use baton_types::{RequestError, RequestId};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;
use tonic::metadata::MetadataMap;
use tonic::{Response, Status};

/// Cached share of the prompt in percent, as in the header of the HTTP API.
pub(super) const CACHE_HIT: &str = "x-baton-cache-hit";

type Responses = BoxStream<'static, Result<v1::GenerateResponse, Status>>;

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

    /// The answer with what its first token reports. If the first token takes longer than the head may wait, the answer
    /// is opened without it.
    async fn answer(&self, mut generation: Generation, room: Hold) -> Result<Response<Responses>, RequestError> {
        let head = generation.request.prompt_parts_bytes(generation.events.max());
        let mut opening = Opening::new(generation.request.choices(), &generation.events, head, room)?;
        if self.head_max > Duration::ZERO
            && let Ok(read) = timeout(self.head_max, opening.read(&mut generation.events)).await
        {
            read?;
        }
        let (first, cached_tokens) = opening.done();
        let percent = cached_tokens.map(|cached| cache_hit_percent(cached, generation.request.prompt_tokens()));
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

    async fn generate(
        &self,
        call: tonic::Request<v1::GenerateRequest>,
    ) -> Result<Response<Self::GenerateStream>, Status> {
        let received = self.core.runtime.now();
        let (metadata, extensions, message) = call.into_parts();
        let caller = access::caller(&extensions)?;
        let client = caller.client(&extensions);
        let stated = convert::timeout(&metadata);
        let headers = metadata.into_headers();
        let (id, given) = convert::id(&message, &headers);
        let request = given.and(stated).and_then(|stated| {
            let (parameters, prompt) = convert::request(message)?;
            let Caller { tenant, weight, key, .. } = caller;
            let deadline = self.deadlines.of(stated, received);
            Ok((Request { id: id.clone(), tenant, weight, key, received, deadline, parameters }, prompt))
        });
        let generation = match request {
            Ok((request, prompt)) => {
                hold_less(extensions.get(), &request, &prompt);
                self.core.generate(request, prompt, &headers).await
            }
            Err(error) => Err(Refused { error, trace_id: String::new() }),
        };
        drop(extensions);
        let (answer, trace_id) = match generation {
            Ok(generation) => {
                let trace_id = generation.trace_id.clone();
                (self.answer(generation, self.core.answers.hold(client)).await, trace_id)
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

/// A request that was parsed needs no more memory than parsing it.
fn hold_less(held: Option<&MessageHold>, request: &Request, prompt: &Prompt) {
    let grammar = request.sampling.grammar.as_ref().map_or(0, |asked| asked.grammar.memory_bytes());
    let bytes = prompt.bytes() + (request.model.len() + grammar) as u64;
    let less = held.map(|held| held.with(|hold| hold.set(bytes.min(hold.bytes())))).transpose();
    debug_assert!(less.is_ok());
}

/// Names request and trace in the metadata of an answer.
pub(super) fn name(metadata: &mut MetadataMap, id: &RequestId, trace_id: &str) {
    for (key, value) in [("x-request-id", id.as_str()), ("x-trace-id", trace_id)] {
        if let Some(value) = value.parse().ok().filter(|_| !value.is_empty()) {
            metadata.insert(key, value);
        }
    }
}

/// The messages of a stream that carry these events.
fn responses(known: Opened, generation: Generation) -> Responses {
    let Generation { request, trace_id, events } = generation;
    let mut trace_id = Some(trace_id);
    let convert = move |event: EventResult| match event {
        Ok(event) => Ok(convert::response(event, &request, trace_id.take())),
        Err(error) => Err(status::from_error(&error)),
    };
    // What was read before the head stays with the rest: room for both is reserved.
    let all = stream::unfold((known, events), async |(mut known, mut events)| {
        let event = match known.next() {
            Some(event) => Ok(event),
            None => events.next().await?,
        };
        Some((event, (known, events)))
    });
    all.map(convert).boxed()
}
