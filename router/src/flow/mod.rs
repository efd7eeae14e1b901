//! One request in order: look up, admit, tokenize ([`prepare`]), then for each sample place, prefill, decode, stream
//! ([`sample`]), and the end.
//!
//! ```text
//!  fronts ──> Request ──prepare──> Prepared ──run──> Sample ──attempts──> port::Link ──> workers
//!     ^                                                 │
//!     └───────────────────── Events <──── Answer <──────┘
//! ```
//!
//! The fronts hand in a [`Request`] and receive a [`Generation`]: dropping that cancels the request on all workers.
//! Clock, tasks and random numbers come from [`baton_types::Runtime`] alone, and workers from [`crate::port::Link`].

mod answer;
mod attempt;
mod core;
mod end;
mod grammars;
mod hashes;
mod job;
mod memory;
mod place;
mod prepare;
mod run;
mod sample;
mod tokenize;
mod turns;

pub(crate) use self::core::Limits;
pub use self::core::{Core, Outside};
pub use prepare::Prepared;

use crate::metrics::Outcome;
use crate::output::Events;
use crate::request::{Prompt, Request, spelled};
use crate::traces::End;
use baton_types::RequestError;
use job::Job;
use std::sync::Arc;
use tokio::sync::mpsc;
use tracing::{Instrument, Span, field};

#[derive(Debug)]
pub struct Generation {
    pub request: Arc<Prepared>,
    /// Id of its trace; empty where tracing is off.
    pub trace_id: String,
    /// Deltas, then one end.
    pub events: Events,
}

/// A request that was refused before any worker was called.
#[derive(Debug)]
pub struct Refused {
    pub error: RequestError,
    /// Id of its trace; empty where tracing is off.
    pub trace_id: String,
}

impl Core {
    /// Starts a request; errors here are those that need no worker. A `traceparent` among the `headers` makes the client's span the parent.
    pub async fn generate(
        self: &Arc<Self>,
        request: Request,
        prompt: Prompt,
        headers: &http::HeaderMap,
    ) -> Result<Generation, Refused> {
        let span = request_span(&request, &prompt, headers);
        let trace_id = baton_node::telemetry::trace_id_of(&span).unwrap_or_default();
        let log = baton_node::telemetry::log_span(request.id.as_str(), &trace_id);
        let (received, spellings) = (request.received, request.spellings.clone());
        let started = async {
            let admitted = self.prepare(request, prompt, &span).await?;
            let (out, events) = mpsc::channel(self.limits.events_max(admitted.request.choices().count()));
            let request = admitted.request.clone();
            let metrics = self.metrics.of(&request.model.card, received);
            run::start(self, Job::new(request.clone(), span.clone(), metrics), admitted, out);
            Ok((request, Events::new(events, self.unread.token())))
        };
        match started.instrument(log).await {
            Ok((request, events)) => Ok(Generation { request, trace_id, events }),
            Err(error) => {
                let error = spelled(&spellings, error);
                end::failed(&span, &error);
                self.metrics.refused(Outcome::Failed(error.kind));
                let took = self.runtime.now().saturating_duration_since(received);
                self.tail.ended(&span, End { failed: Some(error.kind), took, first_token: None }, &[]);
                Err(Refused { error, trace_id })
            }
        }
    }
}

fn request_span(request: &Request, prompt: &Prompt, headers: &http::HeaderMap) -> Span {
    let operation = if matches!(prompt, Prompt::Chat { .. }) { "chat" } else { "text_completion" };
    let span = tracing::info_span!(
        parent: None,
        "generate",
        otel.kind = "server",
        otel.status_code = field::Empty,
        error.type = field::Empty,
        gen_ai.operation.name = operation,
        gen_ai.request.model = Some(&request.model).filter(|model| !model.is_empty()),
        gen_ai.response.model = field::Empty,
        gen_ai.request.max_tokens = field::Empty,
        gen_ai.request.temperature = field::Empty,
        gen_ai.request.top_p = field::Empty,
        gen_ai.request.seed = field::Empty,
        gen_ai.response.id = %request.id,
        baton.tenant = %request.tenant,
        gen_ai.response.finish_reasons = field::Empty,
        gen_ai.usage.input_tokens = field::Empty,
        gen_ai.usage.output_tokens = field::Empty,
        baton.cached_tokens = field::Empty,
        baton.cache_write_tokens = field::Empty,
        baton.recomputed_tokens = field::Empty,
        baton.placement.reason = field::Empty,
        baton.queue_ms = field::Empty,
        baton.ttft_ms = field::Empty,
        baton.retries = field::Empty,
        baton.slow = field::Empty,
        baton.kv.bytes = field::Empty,
        baton.kv.transfer_ms = field::Empty,
        baton.kv.exposed_ms = field::Empty,
    );
    baton_node::telemetry::set_parent_http(&span, headers);
    span
}
