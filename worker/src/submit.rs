//! Converts a sequence from the wire into one for the engine, and an engine's refusal into the error for the client.

use baton_engine::EngineHandle;
use baton_engine::api::{AdapterUse, PinFor, PrefixUse, Reuse, SequenceRequest, SubmitError};
use baton_kv_cache::PrefixHasher;
use baton_types::{CacheUse, Digest, ErrorKind, RequestError, SequenceSpec, TokenId};
use std::time::{Duration, Instant};

/// The retry delay for a client that found the queue full: a few steps.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// The row of the error table for an engine's refusal.
pub fn submit_error(error: &SubmitError) -> RequestError {
    let kind = match error {
        SubmitError::NeverFits { .. } => ErrorKind::ContextLengthExceeded,
        SubmitError::Full { .. } => ErrorKind::Overloaded,
        SubmitError::Invalid(_) => ErrorKind::InvalidRequest,
        // The holder of the adapter's slot lost it: a defect.
        SubmitError::UnknownAdapter(_) => ErrorKind::Internal,
        SubmitError::Stopped => ErrorKind::Unavailable,
    };
    let request_error = RequestError::new(kind, error.to_string());
    if kind == ErrorKind::Overloaded { request_error.retry_after(RETRY_AFTER) } else { request_error }
}

/// The engine's sequence for one that came over the wire. `model` is its fingerprint, and `adapter` the one that the sequence names. Its prefixes
/// are hashed here and nowhere later.
pub fn engine_request(
    sequence: SequenceSpec,
    engine: &EngineHandle,
    model: &Digest,
    adapter: Option<AdapterUse>,
    deadline: Instant,
) -> SequenceRequest {
    let SequenceSpec { request_id, tokens, prompt_len, sampling, sample_index, priority, share, cache, adapter: _ } =
        sequence;
    let cache = cache.filter(|_| engine.config().prefix_cache.is_some());
    let digest = adapter.as_ref().map(|used| used.digest);
    let prefix = cache.map(|cache| prefix_use(&cache, &tokens, model, digest));
    SequenceRequest {
        id: request_id,
        tokens,
        prompt_len,
        sampling,
        sample_index,
        deadline,
        priority,
        share,
        prefix,
        adapter,
    }
}

/// How a sequence shares its prefixes, for the model with this fingerprint.
fn prefix_use(cache: &CacheUse, tokens: &[TokenId], model: &Digest, adapter: Option<Digest>) -> PrefixUse {
    let hasher = PrefixHasher::new(model, &cache.salt);
    // The root is derived from the salt and the model: a label that reveals neither.
    let owner = u64::from_le_bytes(*hasher.root().0.first_chunk().unwrap_or(&[0; 8]));
    let mut prefix = match adapter {
        Some(adapter) => PrefixUse::of_adapter(hasher, adapter, tokens),
        None => PrefixUse::new(hasher, tokens),
    };
    (prefix.ttl, prefix.pin, prefix.cold) = (cache.ttl, cache.pin.map(|time| PinFor { owner, time }), cache.cold);
    prefix
}

/// Cached tokens, and tokens written to the cache, as reported with a first token.
pub fn reused(reuse: Option<Reuse>) -> (Option<u32>, Option<u32>) {
    let count = |tokens: usize| u32::try_from(tokens).unwrap_or(u32::MAX);
    (reuse.map(|reuse| count(reuse.cached_tokens)), reuse.map(|reuse| count(reuse.written_tokens)))
}
