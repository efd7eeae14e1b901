//! The one request that both fronts become: what the body asks for, who asks, and until when. What is only known later (model, tokens,
//! resolved sampling) is added once, in `flow`.

mod prompt;
mod sampling;

pub use prompt::{Prompt, Segment};
pub use sampling::Sampling;

use crate::auth::Key;
use crate::cache_scope::CacheOptions;
use baton_text::StopMatcher;
use baton_types::{ModelCard, RequestError, RequestId, Share, TenantId, TenantLabel, TokenId, Weight};
use serde::{Deserialize, Serialize};
use std::ops::Deref;
use std::time::Instant;

/// Highest priority; its negative is the lowest.
pub(crate) const PRIORITY_MAX: i32 = 100;
/// What labels of tenants are derived for. With another text, routers of two releases would name one tenant differently.
const TENANT_LABEL: &str = "baton 2026-11-24 fair share, label of a tenant";
/// Most samples of one request.
pub(crate) const SAMPLES_MAX: u32 = 128;
/// Most messages of one chat.
pub(crate) const MESSAGES_MAX: usize = 4096;

/// Where prompts are prefilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPolicy {
    /// Short prompts where they will decode, long ones on a prefill worker.
    #[default]
    Auto,
    /// Always on a prefill worker; no room there is an error.
    Remote,
    /// Always on the decode worker.
    Local,
}

/// What the body of a request asks for besides its prompt.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Name of the model; empty where the client leaves it to the cluster.
    pub model: String,
    /// How to sample.
    pub sampling: Sampling,
    /// How many answers.
    pub samples: u32,
    /// Text that ends generation.
    pub stops: StopMatcher,
    /// Overrides the router's policy.
    pub prefill_policy: Option<PrefillPolicy>,
    /// Higher goes first where requests wait, and is preempted last.
    pub priority: i32,
    /// How it uses prefix caches.
    pub cache: CacheOptions,
}

impl Default for Parameters {
    /// One answer, and all else left to the cluster.
    fn default() -> Self {
        Self {
            model: String::new(),
            sampling: Sampling::default(),
            samples: 1,
            stops: StopMatcher::default(),
            prefill_policy: None,
            priority: 0,
            cache: CacheOptions::default(),
        }
    }
}

impl Parameters {
    /// Checks what needs no model.
    pub(crate) fn check(&self) -> Result<(), RequestError> {
        self.sampling.check()?;
        let (priority, samples) = (self.priority, self.samples);
        if !(-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority) {
            let message = format!("priority must be -{PRIORITY_MAX} to {PRIORITY_MAX}, got {priority}");
            return Err(RequestError::invalid("priority", message));
        }
        if !(1..=SAMPLES_MAX).contains(&samples) {
            return Err(RequestError::invalid("n", format!("n must be 1 to {SAMPLES_MAX}, got {samples}")));
        }
        Ok(())
    }
}

/// A request, without the text of its prompt, which lives until it is tokens.
#[derive(Clone, Debug)]
pub struct Request {
    /// The client's id, or one drawn here.
    pub id: RequestId,
    /// Whose key it came with; never what the request says.
    pub tenant: TenantId,
    /// What its tenant is due beside others.
    pub(crate) weight: Weight,
    /// The key itself, where keys are asked for.
    pub(crate) key: Option<Key>,
    /// When it came.
    pub received: Instant,
    /// After this instant the answer is [`baton_types::ErrorKind::DeadlineExceeded`].
    pub deadline: Instant,
    /// What its body says.
    pub parameters: Parameters,
}

impl Request {
    /// A request without a key.
    pub fn new(id: RequestId, tenant: TenantId, received: Instant, deadline: Instant, parameters: Parameters) -> Self {
        Self { id, tenant, weight: Weight::default(), key: None, received, deadline, parameters }
    }

    /// The same of a tenant of this weight.
    pub fn with_weight(self, weight: Weight) -> Self {
        Self { weight, ..self }
    }

    /// Whose it is, as workers are told.
    pub(crate) fn share(&self) -> Share {
        let label = blake3::derive_key(TENANT_LABEL, self.tenant.as_str().as_bytes());
        let label = u64::from_le_bytes(*label.first_chunk().unwrap_or(&[0; 8]));
        Share { tenant: TenantLabel(label), weight: self.weight }
    }
}

impl Deref for Request {
    type Target = Parameters;

    fn deref(&self) -> &Parameters {
        &self.parameters
    }
}

/// A request id: the client's, or a random one; also a random one, to name the error with, where the client's is refused. `param` is what
/// the client calls it.
pub(crate) fn request_id(given: Option<&str>, param: &str) -> (RequestId, Result<(), RequestError>) {
    match given.map(RequestId::try_new) {
        Some(Ok(id)) => (id, Ok(())),
        Some(Err(e)) => (baton_node::id::request_id(), Err(RequestError::invalid(param, e.to_string()))),
        None => (baton_node::id::request_id(), Ok(())),
    }
}

/// Checks that there is a prompt, of the model's tokens.
pub(crate) fn check_tokens(tokens: &[TokenId], card: &ModelCard) -> Result<(), RequestError> {
    if tokens.is_empty() {
        return Err(RequestError::invalid("prompt", "the prompt is empty; give at least one token"));
    }
    check_vocab("prompt", tokens, card)
}

/// Checks that every id is one of the model's.
pub(crate) fn check_vocab(param: &str, tokens: &[TokenId], card: &ModelCard) -> Result<(), RequestError> {
    match tokens.iter().find(|&&t| t >= card.vocab) {
        None => Ok(()),
        Some(t) => {
            let message = format!("{param}: token id {t} is outside the vocabulary of {} tokens", card.vocab);
            Err(RequestError::invalid(param, message))
        }
    }
}
