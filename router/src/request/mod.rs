//! The common request of both fronts: the parameters of the body, the caller, and the deadline. `flow` later adds the
//! model, the tokens and the resolved sampling.

mod bad_words;
mod prompt;
mod sampling;
mod spelling;
mod tools;
mod truncate;

pub(crate) use bad_words::BadWords;
pub(crate) use prompt::chat_text_bytes;
pub use prompt::{Prompt, Segment};
pub use sampling::{AskedGrammar, Sampling};
pub(crate) use spelling::{Spelling, spelled};
pub use tools::Tools;
pub(crate) use tools::{Tool, ToolChoice};
pub(crate) use truncate::Truncate;

use crate::auth::Key;
use crate::cache_scope::CacheOptions;
use baton_text::StopMatcher;
use baton_types::{ModelCard, RequestError, RequestId, Share, TenantId, TenantLabel, TokenId, Weight};
use serde::{Deserialize, Serialize};
use std::ops::Deref;
use std::time::Instant;

/// Highest priority; its negative is the lowest.
pub(crate) const PRIORITY_MAX: i32 = 100;
/// Domain separation of tenant labels. With another text, routers of two releases would give one tenant different
/// labels.
const TENANT_LABEL: &str = "baton 2026-11-24 fair share, label of a tenant";
/// Most samples of one request.
pub(crate) const SAMPLES_MAX: u32 = 128;
/// Most prompts of one call.
pub(crate) const PROMPTS_MAX: usize = 256;
/// Most answers of one call: each prompt has as many as there are samples.
pub(crate) const ANSWERS_MAX: u32 = 1024;
/// Most messages of one chat.
pub(crate) const MESSAGES_MAX: usize = 4096;

/// Where prompts are prefilled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PrefillPolicy {
    /// Short prompts on the decode worker, long ones on a prefill worker.
    #[default]
    Auto,
    /// Always on a prefill worker; no room there is an error.
    Remote,
    /// Always on the decode worker.
    Local,
}

/// The parameters in the body of a request, without its prompt.
#[derive(Clone, Debug)]
pub struct Parameters {
    /// Name of the model; empty if the client leaves the choice to the cluster.
    pub model: String,
    pub sampling: Sampling,
    /// Number of answers, at least 1.
    pub samples: u32,
    /// Text that ends generation.
    pub stops: StopMatcher,
    /// Overrides the router's policy.
    pub prefill_policy: Option<PrefillPolicy>,
    /// Higher priorities are scheduled first and preempted last.
    pub priority: i32,
    /// How it uses prefix caches.
    pub cache: CacheOptions,
    /// Tools that a chat's answer may call.
    pub tools: Option<Tools>,
    /// How much of a long prompt is kept; `None`: a prompt that does not fit is refused.
    pub truncate: Option<Truncate>,
    /// Fields that the client named otherwise than the checks do.
    pub spellings: Vec<Spelling>,
    /// Whether the answer begins with the text of the prompt.
    pub echo: bool,
}

impl Default for Parameters {
    /// One answer; the cluster decides all else.
    fn default() -> Self {
        Self {
            model: String::new(),
            sampling: Sampling::default(),
            samples: 1,
            stops: StopMatcher::default(),
            prefill_policy: None,
            priority: 0,
            cache: CacheOptions::default(),
            tools: None,
            truncate: None,
            spellings: Vec::new(),
            echo: false,
        }
    }
}

impl Parameters {
    /// Refuses a form of the answer beside required calls, which are a form too.
    pub(crate) fn check_one_form(&self) -> Result<(), RequestError> {
        let choice = self.tools.as_ref().map(|tools| &tools.choice);
        let is_required = matches!(choice, Some(ToolChoice::Required | ToolChoice::Named(_)));
        match &self.sampling.grammar {
            Some(AskedGrammar { param, .. }) if is_required => {
                let message = format!("an answer has one form: leave out {param}, or let tool_choice be auto");
                Err(RequestError::invalid("tool_choice", message))
            }
            _ => Ok(()),
        }
    }

    /// Checks everything that does not depend on the model, for so many prompts.
    pub(crate) fn check(&self, prompts: u32) -> Result<(), RequestError> {
        self.sampling.check()?;
        let (priority, samples) = (self.priority, self.samples);
        if !(-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority) {
            let message = format!("priority must be -{PRIORITY_MAX} to {PRIORITY_MAX}, got {priority}");
            return Err(RequestError::invalid("priority", message));
        }
        if !(1..=SAMPLES_MAX).contains(&samples) {
            return Err(RequestError::invalid("n", format!("n must be 1 to {SAMPLES_MAX}, got {samples}")));
        }
        let answers = prompts.saturating_mul(samples);
        if answers > ANSWERS_MAX {
            let message = format!(
                "{prompts} prompts of n = {samples} answers make {answers}; a call has at most {ANSWERS_MAX}: send several"
            );
            return Err(RequestError::invalid("prompt", message));
        }
        Ok(())
    }
}

/// A request without the text of its prompt, which is dropped once it is tokenized.
#[derive(Clone, Debug)]
pub struct Request {
    /// The client's id, or a drawn one.
    pub id: RequestId,
    /// The tenant that owns the key; never taken from the request.
    pub tenant: TenantId,
    /// The tenant's weight in fair sharing.
    pub(crate) weight: Weight,
    /// The key, if keys are configured.
    pub(crate) key: Option<Key>,
    /// When its head arrived.
    pub received: Instant,
    /// After this instant the answer is [`baton_types::ErrorKind::DeadlineExceeded`].
    pub deadline: Instant,
    /// The parameters of its body.
    pub parameters: Parameters,
}

impl Request {
    /// A request without a key.
    pub fn new(id: RequestId, tenant: TenantId, received: Instant, deadline: Instant, parameters: Parameters) -> Self {
        Self { id, tenant, weight: Weight::default(), key: None, received, deadline, parameters }
    }

    /// The same request, of a tenant with this weight.
    pub fn with_weight(self, weight: Weight) -> Self {
        Self { weight, ..self }
    }

    /// The tenant's label and weight, as sent to workers.
    pub(crate) fn share(&self) -> Share {
        Share { tenant: label_of(&self.tenant), weight: self.weight }
    }
}

/// What stands for a tenant where its name is no one's concern.
pub(crate) fn label_of(tenant: &TenantId) -> TenantLabel {
    let label = blake3::derive_key(TENANT_LABEL, tenant.as_str().as_bytes());
    TenantLabel(u64::from_le_bytes(*label.first_chunk().unwrap_or(&[0; 8])))
}

impl Deref for Request {
    type Target = Parameters;

    fn deref(&self) -> &Parameters {
        &self.parameters
    }
}

/// A request id: the client's, or a random one. If the client's is refused, a random one identifies the error. `param`
/// is the client's name for the field.
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
