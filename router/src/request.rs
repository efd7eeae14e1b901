//! The one validated request that both fronts become, and its resolution against a model card.

use crate::auth::Key;
use crate::cache_scope::CacheOptions;
use baton_text::{Content, Message};
use baton_types::{
    ErrorKind, ModelCard, RequestError, RequestId, SamplingDefaults, SamplingError, SamplingParams, TenantId, TokenId,
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Instant;

/// Most stop strings of one request.
pub(crate) const STOP_STRINGS_MAX: usize = 16;
/// Longest stop string, in bytes.
pub(crate) const STOP_STRING_BYTES_MAX: usize = 256;
/// Highest priority; its negative is the lowest.
pub(crate) const PRIORITY_MAX: i32 = 100;
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

/// What the model is to continue.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Prompt {
    /// Messages, to be laid out by the model's chat template.
    Chat {
        /// In order.
        messages: Vec<Message>,
        /// Given to the template besides the messages.
        template_kwargs: Map<String, Value>,
    },
    /// Text and token ids, in order.
    Segments(Vec<Segment>),
}

/// Memory of a message besides its text.
const MESSAGE_BYTES: usize = 256;
/// Memory of a JSON value in a list that has grown, besides its text.
const VALUE_BYTES: usize = 64;
/// Memory of a member of a JSON object besides its value and its name.
const MEMBER_BYTES: usize = 128;

/// About what JSON takes in memory. How deep it is was bounded where it was read.
fn members_bytes(members: &Map<String, Value>) -> usize {
    members.iter().map(|(name, value)| MEMBER_BYTES + name.len() + value_bytes(value)).sum()
}

fn value_bytes(value: &Value) -> usize {
    let more = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 0,
        Value::String(text) => text.len(),
        Value::Array(items) => items.iter().map(value_bytes).sum(),
        Value::Object(members) => members_bytes(members),
    };
    VALUE_BYTES + more
}

impl Prompt {
    /// About what it takes in memory, and what it becomes on the way to tokens once more.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes: usize = match self {
            Self::Chat { messages, template_kwargs } => {
                let text = |content: &Content| match content {
                    Content::Text(text) => text.len(),
                    Content::Parts(parts) => parts.iter().map(|part| part.len() + MESSAGE_BYTES).sum(),
                };
                let message = |Message { role: _, content, extra }: &Message| {
                    MESSAGE_BYTES + content.as_ref().map_or(0, text) + members_bytes(extra)
                };
                messages.iter().map(message).sum::<usize>() + members_bytes(template_kwargs)
            }
            Self::Segments(segments) => segments
                .iter()
                .map(|segment| {
                    size_of::<Segment>()
                        + match segment {
                            Segment::Text(text) => text.len(),
                            Segment::Tokens(ids) => size_of_val(&ids[..]),
                        }
                })
                .sum(),
        };
        2 * bytes as u64
    }
}

/// One piece of a plain prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Segment {
    /// To be tokenized; text that spells a control token stays text.
    Text(String),
    /// Taken as they are.
    Tokens(Vec<TokenId>),
}

/// Sampling as the client asked for it; `None` takes the model card's default, then the server's.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Sampling {
    /// See [`SamplingParams`], as for all fields below.
    pub(crate) temperature: Option<f32>,
    /// Nucleus.
    pub(crate) top_p: Option<f32>,
    /// 0 keeps all.
    pub(crate) top_k: Option<u32>,
    /// -2 to 2.
    pub(crate) presence_penalty: Option<f32>,
    /// -2 to 2.
    pub(crate) frequency_penalty: Option<f32>,
    /// Over 0 and at most 10.
    pub(crate) repetition_penalty: Option<f32>,
    /// Drawn where absent.
    pub(crate) seed: Option<u64>,
    /// Most tokens to generate; more than fits the context is refused.
    pub(crate) max_tokens: Option<u32>,
    /// Used where `max_tokens` is absent, cut to what fits; `None` is all that remains of the context.
    pub(crate) max_tokens_default: Option<u32>,
    /// Generate on past the model's end tokens.
    pub(crate) ignore_eos: bool,
    /// Further token ids that end the sequence.
    pub(crate) stop_token_ids: Vec<TokenId>,
    /// Report log-probabilities, with this many alternatives.
    pub(crate) logprobs: Option<u32>,
}

/// A request that was checked as far as it can be without knowing the model.
#[derive(Clone, Debug)]
pub(crate) struct GenerationRequest {
    /// The client's id, or one drawn here.
    pub(crate) id: RequestId,
    /// Whose key it came with; never what the request says.
    pub(crate) tenant: TenantId,
    /// The key itself, where keys are asked for.
    pub(crate) key: Option<Key>,
    /// Name of the model; empty where the client leaves it to the cluster.
    pub(crate) model: String,
    /// What to continue.
    pub(crate) prompt: Arc<Prompt>,
    /// How to sample.
    pub(crate) sampling: Sampling,
    /// How many answers; checked by [`check_samples`].
    pub(crate) samples: u32,
    /// Text that ends generation; checked by [`check_stop_strings`].
    pub(crate) stop: Vec<String>,
    /// Overrides the router's policy.
    pub(crate) prefill_policy: Option<PrefillPolicy>,
    /// Higher goes first where requests wait, and is preempted last.
    pub(crate) priority: i32,
    /// How it uses prefix caches.
    pub(crate) cache: CacheOptions,
    /// After this instant the answer is [`ErrorKind::DeadlineExceeded`].
    pub(crate) deadline: Instant,
    /// The headers that came with it; `traceparent` makes the client's span the parent.
    pub(crate) headers: http::HeaderMap,
    /// When the request came.
    pub(crate) received: Instant,
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

/// Checks the range of a priority.
pub(crate) fn check_priority(priority: i32) -> Result<(), RequestError> {
    if (-PRIORITY_MAX..=PRIORITY_MAX).contains(&priority) {
        return Ok(());
    }
    let message = format!("priority must be -{PRIORITY_MAX} to {PRIORITY_MAX}, got {priority}");
    Err(RequestError::invalid("priority", message))
}

/// Checks the number of samples.
pub(crate) fn check_samples(samples: u32) -> Result<(), RequestError> {
    if (1..=SAMPLES_MAX).contains(&samples) {
        return Ok(());
    }
    Err(RequestError::invalid("n", format!("n must be 1 to {SAMPLES_MAX}, got {samples}")))
}

/// Checks number and length of stop strings.
pub(crate) fn check_stop_strings(stop: &[String]) -> Result<(), RequestError> {
    if stop.len() > STOP_STRINGS_MAX {
        let message = format!("stop takes at most {STOP_STRINGS_MAX} strings, got {}", stop.len());
        return Err(RequestError::invalid("stop", message));
    }
    if stop.iter().any(|s| s.is_empty() || s.len() > STOP_STRING_BYTES_MAX) {
        let message = format!("stop strings are 1 to {STOP_STRING_BYTES_MAX} bytes long");
        return Err(RequestError::invalid("stop", message));
    }
    Ok(())
}

/// Temperature where neither client nor model card gives one: OpenAI's default.
const TEMPERATURE_DEFAULT: f32 = 1.0;

/// A drawn seed survives JSON readers that know no integers, only doubles: it can be sent again as it was told.
const DRAWN_SEED_BITS: u32 = 53;

impl Sampling {
    /// The complete parameters for a prompt of `prompt_tokens`, when prompt and answer may hold `context_max` tokens together.
    pub(crate) fn resolve(
        &self,
        defaults: &SamplingDefaults,
        prompt_tokens: usize,
        context_max: u64,
    ) -> Result<SamplingParams, RequestError> {
        let prompt = prompt_tokens as u64;
        let exceeded = |param: &str, what: String| {
            let message = format!(
                "{what}; the limit of this model here is {context_max} tokens. Shorten the prompt or max_tokens"
            );
            RequestError::new(ErrorKind::ContextLengthExceeded, message).param(param)
        };
        if prompt >= context_max {
            let what = format!("the prompt has {prompt} tokens and leaves no room for an answer");
            return Err(exceeded("prompt", what));
        }
        let remaining = u32::try_from(context_max - prompt).unwrap_or(u32::MAX);
        let max_tokens = match (self.max_tokens, self.max_tokens_default) {
            (Some(asked), _) if asked > remaining => {
                let total = prompt + u64::from(asked);
                let what = format!("{prompt} prompt tokens and max_tokens {asked} make {total}");
                return Err(exceeded("max_tokens", what));
            }
            (Some(asked), _) => asked,
            (None, Some(default)) => default.min(remaining),
            (None, None) => remaining,
        };
        let params = SamplingParams {
            temperature: self.temperature.or(defaults.temperature).unwrap_or(TEMPERATURE_DEFAULT),
            top_p: self.top_p.or(defaults.top_p).unwrap_or(1.0),
            top_k: self.top_k.or(defaults.top_k).unwrap_or(0),
            presence_penalty: self.presence_penalty.unwrap_or(0.0),
            frequency_penalty: self.frequency_penalty.unwrap_or(0.0),
            repetition_penalty: self.repetition_penalty.or(defaults.repetition_penalty).unwrap_or(1.0),
            seed: self.seed.unwrap_or_else(|| rand::random::<u64>() >> (u64::BITS - DRAWN_SEED_BITS)),
            max_tokens,
            ignore_eos: self.ignore_eos,
            stop_token_ids: self.stop_token_ids.clone(),
            logprobs: self.logprobs,
        };
        Ok(params.try_new()?)
    }

    /// Checks the ranges of all fields given, before any queue.
    pub(crate) fn check(&self) -> Result<(), SamplingError> {
        let d = SamplingParams::default();
        let given = SamplingParams {
            temperature: self.temperature.unwrap_or(d.temperature),
            top_p: self.top_p.unwrap_or(d.top_p),
            top_k: self.top_k.unwrap_or(d.top_k),
            presence_penalty: self.presence_penalty.unwrap_or(d.presence_penalty),
            frequency_penalty: self.frequency_penalty.unwrap_or(d.frequency_penalty),
            repetition_penalty: self.repetition_penalty.unwrap_or(d.repetition_penalty),
            max_tokens: self.max_tokens.unwrap_or(d.max_tokens),
            stop_token_ids: self.stop_token_ids.clone(),
            logprobs: self.logprobs,
            ..d
        };
        given.try_new().map(drop)
    }
}

/// Checks that every token id is in the model's vocabulary.
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

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(sampling: Sampling, prompt: usize) -> Result<SamplingParams, ErrorKind> {
        let defaults = SamplingDefaults { temperature: Some(0.6), top_p: Some(0.9), ..SamplingDefaults::default() };
        sampling.resolve(&defaults, prompt, 100).map_err(|e| e.kind)
    }

    #[test]
    fn max_tokens_is_bounded_by_the_context() {
        let cases = [
            (None, None, 10, Ok(90)),
            (None, Some(16), 10, Ok(16)),
            (None, Some(16), 90, Ok(10)),
            (Some(90), Some(16), 10, Ok(90)),
            (Some(91), None, 10, Err(ErrorKind::ContextLengthExceeded)),
            (Some(0), None, 10, Err(ErrorKind::InvalidRequest)),
            (None, None, 99, Ok(1)),
            (None, None, 100, Err(ErrorKind::ContextLengthExceeded)),
        ];
        for (max_tokens, max_tokens_default, prompt, expected) in cases {
            let sampling = Sampling { max_tokens, max_tokens_default, ..Sampling::default() };
            assert_eq!(resolve(sampling, prompt).map(|p| p.max_tokens), expected, "{max_tokens:?} {prompt}");
        }
    }

    #[test]
    fn client_then_card_then_server_decides() {
        let params = resolve(Sampling { temperature: Some(0.0), ..Sampling::default() }, 1).unwrap();
        assert_eq!((params.temperature, params.top_p, params.repetition_penalty), (0.0, 0.9, 1.0));
        assert_eq!(resolve(Sampling::default(), 1).unwrap().temperature, 0.6);
        let bare = Sampling::default().resolve(&SamplingDefaults::default(), 1, 100).unwrap();
        assert_eq!(bare.temperature, 1.0);
        assert!((0..100).all(|_| resolve(Sampling::default(), 1).unwrap().seed < 1 << 53));
        assert_ne!(bare.seed, resolve(Sampling::default(), 1).unwrap().seed, "each request draws its own seed");
    }

    #[test]
    fn a_prompt_counts_for_all_that_it_keeps() {
        const LONG: usize = 1 << 20;
        let long = || "x".repeat(LONG);
        let chat = |message: Message| Prompt::Chat { messages: vec![message], template_kwargs: Map::new() };
        let with = |name: &str, value: Value| {
            let mut message = Message::text(baton_text::Role::User, "x");
            message.extra.insert(name.into(), value);
            chat(message)
        };
        let kwargs = [("a".to_owned(), serde_json::json!(long()))].into_iter().collect();
        for (what, prompt) in [
            ("text", chat(Message::text(baton_text::Role::User, long()))),
            ("name", with("name", serde_json::json!(long()))),
            ("the name of a field", with(&long(), Value::Null)),
            ("nested", with("tool_calls", serde_json::json!([{"function": {"arguments": [long()]}}]))),
            ("many", with("tool_calls", serde_json::json!(vec![0; LONG / 32]))),
            ("arguments of the template", Prompt::Chat { messages: vec![], template_kwargs: kwargs }),
            ("segments", Prompt::Segments(vec![Segment::Text(String::new()); LONG / size_of::<Segment>()])),
            ("tokens", Prompt::Segments(vec![Segment::Tokens(vec![0; LONG / 4])])),
        ] {
            let bytes = prompt.bytes();
            assert!((2 * LONG as u64..6 * LONG as u64).contains(&bytes), "{what}: {bytes}");
        }
    }

    #[test]
    fn stop_strings_are_bounded() {
        assert!(check_stop_strings(&vec!["x".to_owned(); 16]).is_ok());
        for bad in [vec!["x".to_owned(); 17], vec![String::new()], vec!["y".repeat(257)]] {
            assert_eq!(check_stop_strings(&bad).unwrap_err().param.as_deref(), Some("stop"));
        }
    }
}
