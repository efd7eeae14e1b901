//! Fields that chat and plain completions share.

use super::best::Best;
use super::grammar::take_grammar;
use crate::cache_scope::CacheOptions;
use crate::request::{BadWords, Parameters, Sampling, Spelling, Truncate};
use crate::wire::fields::{Fields, Policy, Row, only_empty, only_false, only_null, only_one};
use crate::wire::{Unknown, json};
use baton_text::{STOPS_MAX, StopMatcher};
use baton_types::{RequestError, SamplingParams, TokenId};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use std::collections::BTreeMap;

/// Rows of every table, whatever the API.
pub(crate) const SHARED: &[Row] = &[
    ("model", Policy::Supported),
    ("stream", Policy::Supported),
    ("temperature", Policy::Supported),
    ("top_p", Policy::Supported),
    ("top_k", Policy::Supported),
    ("presence_penalty", Policy::Supported),
    ("frequency_penalty", Policy::Supported),
    ("repetition_penalty", Policy::Supported),
    ("repeat_penalty", Policy::Supported),
    ("seed", Policy::Supported),
    ("stop_token_ids", Policy::Supported),
    ("ignore_eos", Policy::Supported),
    ("prefill_policy", Policy::Supported),
    ("priority", Policy::Supported),
    ("cache_salt", Policy::Supported),
    ("cache", Policy::Supported),
    ("metadata", Policy::Ignored),
    ("service_tier", Policy::Ignored),
    ("logit_bias", Policy::Supported),
    ("min_p", Policy::Supported),
    ("typical_p", Policy::Supported),
    ("bad_words", Policy::Supported),
    ("min_tokens", Policy::Supported),
    ("allowed_token_ids", Policy::Supported),
];

/// Further rows of chats and completions.
pub(crate) const COMMON: &[Row] = &[
    ("stream_options", Policy::Supported),
    ("max_tokens", Policy::Supported),
    ("n", Policy::Supported),
    ("stop", Policy::Supported),
    ("return_token_ids", Policy::Supported),
    ("logprobs", Policy::Supported),
    ("user", Policy::Ignored),
    ("store", Policy::Ignored),
    ("safety_identifier", Policy::Ignored),
    ("prompt_cache_key", Policy::Ignored),
    ("prompt_cache_retention", Policy::Ignored),
    ("use_beam_search", only_false()),
    ("length_penalty", only_one()),
    ("skip_special_tokens", Policy::Only { accepts: |v| v == &Value::Bool(true), values: "true" }),
    ("include_stop_str_in_output", only_false()),
    ("prompt_logprobs", Policy::Supported),
    ("truncate_prompt_tokens", Policy::Supported),
    ("logits_processors", only_empty()),
    ("response_format", Policy::Supported),
    ("structured_outputs", Policy::Supported),
    ("guided_json", Policy::Supported),
    ("guided_regex", Policy::Supported),
    ("guided_choice", Policy::Supported),
    ("guided_grammar", Policy::Supported),
    // There is one implementation.
    ("guided_decoding_backend", Policy::Ignored),
    ("guided_whitespace_pattern", only_null()),
];

/// How the answer is to be shaped.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AnswerOptions {
    /// Server-sent events instead of one body.
    pub(crate) stream: bool,
    /// A last event with the usage.
    pub(crate) include_usage: bool,
    /// The usage so far with every event.
    pub(crate) continuous_usage: bool,
    /// Token ids of prompt and answer besides the text.
    pub(crate) return_token_ids: bool,
    /// The best of each prompt's answers are shown.
    pub(crate) best: Option<Best>,
    /// Each answer begins with the text of its prompt.
    pub(crate) echo: bool,
    /// The log-probabilities of each answer begin with those of its prompt, with this many alternatives.
    pub(crate) echo_logprobs: Option<u32>,
    /// Log-probabilities of the prompt in a field of their own, with this many alternatives.
    pub(crate) prompt_logprobs: Option<u32>,
}

#[derive(Default, Deserialize)]
struct StreamOptions {
    include_usage: Option<bool>,
    continuous_usage_stats: Option<bool>,
    include_obfuscation: Option<bool>,
    #[serde(flatten)]
    unknown: BTreeMap<String, IgnoredAny>,
}

/// What both kinds of requests ask for.
#[derive(Debug)]
pub(crate) struct Common {
    /// Of the request; `max_tokens` defaults and `logprobs` differ between the two.
    pub(crate) parameters: Parameters,
    /// Shape of the answer.
    pub(crate) options: AnswerOptions,
    /// Fields that the API does not have.
    pub(crate) unknown: Unknown,
    /// Whether there is a `reasoning_effort`, which not every chat template reads.
    pub(crate) has_effort: bool,
}

#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct RawCache {
    ttl_ms: Option<u64>,
    pin_ms: Option<u64>,
    off: Option<bool>,
    cold: Option<bool>,
}

/// Reads what the body's table has of the fields that requests share.
pub(crate) fn take_common(fields: &mut Fields<'_>) -> Result<Common, RequestError> {
    let stream = fields.take("stream")?.unwrap_or(false);
    let stream_options: Option<StreamOptions> = fields.take("stream_options")?;
    if stream_options.is_some() && !stream {
        return Err(RequestError::invalid("stream_options", "stream_options is only allowed with stream: true"));
    }
    let stream_options = stream_options.unwrap_or_default();
    if stream_options.include_obfuscation == Some(true) {
        return Err(RequestError::invalid("stream_options", "stream_options.include_obfuscation is not supported"));
    }
    if stream_options.continuous_usage_stats == Some(true) && stream_options.include_usage != Some(true) {
        let message = "stream_options.continuous_usage_stats needs stream_options.include_usage: true";
        return Err(RequestError::invalid("stream_options", message));
    }
    let mut unknown = fields.take_unknown();
    stream_options.unknown.keys().for_each(|name| unknown.tell_inside("stream_options", name));
    let stops = StopMatcher::new(&take_stop(fields)?)?;
    let mut spellings = Vec::new();
    let prompt_logprobs = fields.take::<u32>("prompt_logprobs")?;
    if prompt_logprobs.is_some() && stream {
        let message = "prompt_logprobs are not in streams: leave out stream, or take echo with logprobs in completions";
        return Err(RequestError::invalid("prompt_logprobs", message));
    }
    let sampling = Sampling {
        temperature: fields.take("temperature")?,
        top_p: fields.take("top_p")?,
        top_k: take_top_k(fields)?,
        min_p: fields.take("min_p")?,
        typical_p: fields.take("typical_p")?,
        bad_words: BadWords::try_new(fields.take("bad_words")?.unwrap_or_default())?,
        presence_penalty: fields.take("presence_penalty")?,
        frequency_penalty: fields.take("frequency_penalty")?,
        repetition_penalty: take_repetition(fields, &mut spellings)?,
        seed: take_seed(fields)?,
        max_tokens: fields.take("max_tokens")?,
        max_tokens_default: None,
        ignore_eos: fields.take("ignore_eos")?.unwrap_or(false),
        stop_token_ids: fields.take::<Vec<TokenId>>("stop_token_ids")?.unwrap_or_default(),
        logprobs: None,
        prompt_logprobs,
        may_be_empty: prompt_logprobs.is_some(),
        min_tokens: fields.take("min_tokens")?.unwrap_or(0),
        logit_bias: take_logit_bias(fields)?,
        allowed_token_ids: take_allowed(fields)?,
        grammar: take_grammar(fields)?,
    };
    Ok(Common {
        parameters: Parameters {
            model: fields.take("model")?.unwrap_or_default(),
            sampling,
            samples: fields.take("n")?.unwrap_or(1),
            stops,
            prefill_policy: fields.take("prefill_policy")?,
            priority: fields.take("priority")?.unwrap_or(0),
            cache: take_cache(fields)?,
            tools: None,
            truncate: take_truncate(fields)?,
            spellings,
            echo: false,
        },
        options: AnswerOptions {
            stream,
            include_usage: stream_options.include_usage.unwrap_or(false),
            continuous_usage: stream_options.continuous_usage_stats.unwrap_or(false),
            return_token_ids: fields.take("return_token_ids")?.unwrap_or(false),
            best: None,
            echo: false,
            echo_logprobs: None,
            prompt_logprobs,
        },
        unknown,
        has_effort: false,
    })
}

/// The factor under its two names.
fn take_repetition(fields: &mut Fields<'_>, spellings: &mut Vec<Spelling>) -> Result<Option<f32>, RequestError> {
    let (named, other) = (fields.take::<f32>("repetition_penalty")?, fields.take::<f32>("repeat_penalty")?);
    match (named, other) {
        (Some(named), Some(other)) if named != other => {
            let message = "repeat_penalty is another name of repetition_penalty, and they differ: leave one out";
            Err(RequestError::invalid("repeat_penalty", message))
        }
        (None, Some(other)) => {
            spellings.push(Spelling { checked: "repetition_penalty", given: "repeat_penalty" });
            Ok(Some(other))
        }
        (named, _) => Ok(named),
    }
}

/// The number of tokens, or -1.
fn take_truncate(fields: &mut Fields<'_>) -> Result<Option<Truncate>, RequestError> {
    fields.take::<i64>("truncate_prompt_tokens")?.map(Truncate::try_new).transpose()
}

fn take_cache(fields: &mut Fields<'_>) -> Result<CacheOptions, RequestError> {
    let RawCache { ttl_ms, pin_ms, off, cold } = fields.take("cache").map_err(cache_shape)?.unwrap_or_default();
    let (off, cold) = (off.unwrap_or(false), cold.unwrap_or(false));
    Ok(CacheOptions { salt: fields.take("cache_salt")?, ttl_ms, pin_ms, off, cold, ..CacheOptions::default() })
}

fn cache_shape(error: RequestError) -> RequestError {
    let reason = error.message.split(", expected struct").next().unwrap_or_default().to_owned();
    RequestError::invalid("cache", format!("{reason}; cache is an object of ttl_ms, pin_ms, off and cold"))
}

/// One string or a list of them.
fn take_stop(fields: &mut Fields<'_>) -> Result<Vec<String>, RequestError> {
    let Some(stop) = fields.take_raw("stop") else { return Ok(Vec::new()) };
    if let Some(one) = json::text(stop) {
        return Ok(vec![one]);
    }
    let shape = || RequestError::invalid("stop", "stop must be a string or a list of strings");
    match json::items(stop.get(), STOPS_MAX).map_err(|_| shape())? {
        Some(items) => items.into_iter().map(|item| json::text(item).ok_or_else(shape)).collect(),
        None => Err(RequestError::invalid("stop", format!("stop takes at most {STOPS_MAX} strings"))),
    }
}

/// An object of token ids, as text, and numbers. Each token once, though JSON allows keys twice.
fn take_logit_bias(fields: &mut Fields<'_>) -> Result<Vec<(TokenId, f32)>, RequestError> {
    let Some(object) = fields.take_raw("logit_bias") else { return Ok(Vec::new()) };
    let shape = || RequestError::invalid("logit_bias", "logit_bias is an object of token ids and numbers");
    let (mut bias, mut is_right) = (Vec::new(), true);
    let read = json::members(object.get(), |token, value| {
        match (token.parse::<TokenId>(), json::read::<f32>(value)) {
            (Ok(token), Ok(value)) => bias.push((token, value)),
            _ => is_right = false,
        }
        is_right && bias.len() <= SamplingParams::LOGIT_BIAS_MAX
    });
    // One too many is told by the check of all parameters.
    let is_whole = read.is_ok() || bias.len() > SamplingParams::LOGIT_BIAS_MAX;
    if is_right && is_whole { Ok(bias) } else { Err(shape()) }
}

/// A list of token ids; an empty one would allow nothing.
fn take_allowed(fields: &mut Fields<'_>) -> Result<Vec<TokenId>, RequestError> {
    match fields.take::<Vec<TokenId>>("allowed_token_ids")? {
        Some(ids) if ids.is_empty() => Err(RequestError::invalid(
            "allowed_token_ids",
            "allowed_token_ids allows no token: leave it out, or name some",
        )),
        ids => Ok(ids.unwrap_or_default()),
    }
}

/// Other servers write "all tokens" as -1 or 0.
fn take_top_k(fields: &mut Fields<'_>) -> Result<Option<u32>, RequestError> {
    match fields.take::<i64>("top_k")? {
        None => Ok(None),
        Some(-1) => Ok(Some(0)),
        Some(k) => u32::try_from(k)
            .map(Some)
            .map_err(|_| RequestError::invalid("top_k", format!("top_k must be -1, 0 or positive, got {k}"))),
    }
}

/// OpenAI's seed is a signed 64-bit number; its bits are the seed.
fn take_seed(fields: &mut Fields<'_>) -> Result<Option<u64>, RequestError> {
    match fields.take::<serde_json::Number>("seed")? {
        None => Ok(None),
        Some(n) => n
            .as_u64()
            .or_else(|| n.as_i64().map(i64::cast_unsigned))
            .map(Some)
            .ok_or_else(|| RequestError::invalid("seed", format!("seed must be a 64-bit integer, got {n}"))),
    }
}
