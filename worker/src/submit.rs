//! A sequence on its way from the wire into the engine, and what a client is told when the engine does not take it.

use baton_engine::api::{SequenceRequest, SubmitError};
use baton_types::{ErrorKind, RequestError, SequenceSpec};
use std::time::{Duration, Instant};

/// How long a client waits before it asks a full queue again: a few steps.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// The row of the error table behind an engine's refusal.
pub fn submit_error(error: &SubmitError) -> RequestError {
    let kind = match error {
        SubmitError::NeverFits { .. } => ErrorKind::ContextLengthExceeded,
        SubmitError::Full { .. } => ErrorKind::Overloaded,
        SubmitError::Invalid(_) => ErrorKind::InvalidRequest,
        SubmitError::Stopped => ErrorKind::Unavailable,
    };
    let request_error = RequestError::new(kind, error.to_string());
    if kind == ErrorKind::Overloaded { request_error.retry_after(RETRY_AFTER) } else { request_error }
}

/// What the engine runs for a sequence that came over the wire.
pub fn engine_request(sequence: SequenceSpec, deadline: Instant) -> SequenceRequest {
    let SequenceSpec { request_id, tokens, prompt_len, sampling, sample_index, priority } = sequence;
    SequenceRequest { id: request_id, tokens, prompt_len, sampling, sample_index, deadline, priority }
}
