//! `GenerateRequest` to the request, and events to `GenerateResponse`.

use crate::cache_scope::CacheOptions;
use crate::flow::Prepared;
use crate::openai::chat::ending;
use crate::output::{Event, Total};
use crate::request::{
    AskedGrammar, BadWords, MESSAGES_MAX, Parameters, PrefillPolicy, Prompt, Sampling, Segment, Truncate, request_id,
};
use crate::wire::json::kwargs;
use baton_node::grpc::{TIMEOUT_HEADER, parse_timeout};
use baton_proto::convert::{finish_reason_code, grammar, logit_bias};
use baton_proto::v1;
use baton_text::{Ending, Message, Role, StopMatcher};
use baton_types::{RequestError, RequestId};
use serde_json::{Map, Value};
use std::sync::Arc;
use std::time::Duration;
use tonic::metadata::MetadataMap;

/// Most segments of one prompt.
pub(super) const SEGMENTS_MAX: usize = MESSAGES_MAX;

/// The id in the message, else in the metadata, see [`request_id`].
pub(super) fn id(message: &v1::GenerateRequest, headers: &http::HeaderMap) -> (RequestId, Result<(), RequestError>) {
    let from_header = headers.get("x-request-id").and_then(|v| v.to_str().ok());
    request_id(Some(message.request_id.as_str()).filter(|id| !id.is_empty()).or(from_header), "request_id")
}

/// `grpc-timeout`, where a call states one.
pub(super) fn timeout(metadata: &MetadataMap) -> Result<Option<Duration>, RequestError> {
    let Some(value) = metadata.get(TIMEOUT_HEADER) else { return Ok(None) };
    let timeout = value.to_str().ok().and_then(parse_timeout);
    let message = "grpc-timeout must be at most 8 digits and a unit, e.g. 1500m or 30S";
    timeout.map(Some).ok_or_else(|| RequestError::invalid(TIMEOUT_HEADER, message))
}

/// Converts a message to a request.
pub(super) fn request(message: v1::GenerateRequest) -> Result<(Parameters, Prompt), RequestError> {
    let policy = v1::PrefillPolicy::try_from(message.prefill_policy).map_err(|_| {
        RequestError::invalid("prefill_policy", "prefill_policy is unknown; take a PREFILL_POLICY_ value")
    })?;
    let ending = ending(message.add_generation_prompt, message.continue_final_message)?;
    let prompt = prompt(message.prompt, &message.chat_template_kwargs, ending)?;
    let grammar = message.grammar.map(grammar).transpose()?;
    let grammar = grammar.map(|grammar| AskedGrammar { grammar: Arc::new(grammar), param: "grammar" });
    let parameters = Parameters {
        model: message.model,
        sampling: Sampling { grammar, ..sampling(message.sampling.unwrap_or_default())? },
        samples: message.n.unwrap_or(1),
        stops: StopMatcher::new(&message.stop)?,
        prefill_policy: match policy {
            v1::PrefillPolicy::Unspecified => None,
            v1::PrefillPolicy::Auto => Some(PrefillPolicy::Auto),
            v1::PrefillPolicy::Remote => Some(PrefillPolicy::Remote),
            v1::PrefillPolicy::Local => Some(PrefillPolicy::Local),
        },
        priority: message.priority,
        cache: cache(message.cache_salt, message.cache.unwrap_or_default()),
        tools: None,
        spellings: Vec::new(),
        truncate: message.truncate_prompt_tokens.map(Truncate::try_new).transpose()?,
        echo: false,
    };
    Ok((parameters, prompt))
}

/// An event as a message; the first one of an answer names trace, model and seed.
pub(super) fn response(event: Event, request: &Prepared, trace_id: Option<String>) -> v1::GenerateResponse {
    let mut message = match event {
        Event::Delta(delta) => v1::GenerateResponse {
            index: delta.sample,
            text: delta.text,
            token_ids: delta.token_ids,
            logprobs: delta.logprobs.into_iter().map(Into::into).collect(),
            prompt_logprobs: delta.prompt.into_iter().map(Into::into).collect(),
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
    request.id.as_str().clone_into(&mut message.request_id);
    if let Some(trace_id) = trace_id {
        message.trace_id = trace_id;
        request.served_name().clone_into(&mut message.model);
        message.seed = request.sampling.seed;
    }
    message
}

fn usage(total: &Total) -> v1::Usage {
    v1::Usage { cost: total.cost.as_ref().map(|cost| cost.amount), ..total.usage.into() }
}

fn cache(salt: Option<String>, options: v1::CacheOptions) -> CacheOptions {
    let v1::CacheOptions { ttl_ms, pin_ms, off, cold } = options;
    CacheOptions { salt, ttl_ms, pin_ms, off, cold, ..CacheOptions::default() }
}

fn prompt(segments: Vec<v1::Segment>, kwargs: &str, ending: Ending) -> Result<Prompt, RequestError> {
    use v1::segment::Kind;
    if segments.is_empty() || segments.len() > SEGMENTS_MAX {
        return Err(RequestError::invalid(
            "prompt",
            format!("prompt takes 1 to {SEGMENTS_MAX} segments, got {}", segments.len()),
        ));
    }
    let (mut messages, mut plain) = (Vec::new(), Vec::new());
    for (i, segment) in segments.into_iter().enumerate() {
        match segment.kind {
            Some(Kind::Message(m)) => messages.push(chat_message(i, m)?),
            Some(Kind::Text(text)) => plain.push(Segment::Text(text)),
            Some(Kind::Tokens(tokens)) => plain.push(Segment::Tokens(tokens.ids)),
            None => {
                return Err(RequestError::invalid(format!("prompt[{i}]"), "a segment is text, tokens or a message"));
            }
        }
    }
    match (messages.is_empty(), plain.is_empty()) {
        (false, true) => Ok(Prompt::Chat { messages, tools: None, template_kwargs: object(kwargs)?, ending }),
        (true, false) if ending != Ending::Answer => {
            let message = "add_generation_prompt and continue_final_message need chat messages";
            Err(RequestError::invalid("add_generation_prompt", message))
        }
        (true, false) if kwargs.is_empty() => Ok(Prompt::Segments(plain)),
        (true, false) => Err(RequestError::invalid("chat_template_kwargs", "chat_template_kwargs needs chat messages")),
        _ => Err(RequestError::invalid("prompt", "segments are all messages, or text and tokens")),
    }
}

fn chat_message(i: usize, message: v1::ChatMessage) -> Result<Message, RequestError> {
    let role = Role::from_name(&message.role).ok_or_else(|| {
        RequestError::invalid(
            format!("prompt[{i}].message.role"),
            "role must be system, developer, user, assistant or tool",
        )
    })?;
    let mut converted = Message::text(role, message.content);
    if !message.name.is_empty() {
        converted.extra.insert("name".into(), Value::String(message.name));
    }
    Ok(converted)
}

fn object(json: &str) -> Result<Map<String, Value>, RequestError> {
    if json.is_empty() {
        return Ok(Map::new());
    }
    kwargs(json).map_err(|e| RequestError::invalid("chat_template_kwargs", e))
}

fn sampling(s: v1::Sampling) -> Result<Sampling, RequestError> {
    Ok(Sampling {
        temperature: s.temperature,
        top_p: s.top_p,
        top_k: s.top_k,
        min_p: s.min_p,
        typical_p: s.typical_p,
        bad_words: BadWords::try_new(s.bad_words)?,
        presence_penalty: s.presence_penalty,
        frequency_penalty: s.frequency_penalty,
        repetition_penalty: s.repetition_penalty,
        seed: s.seed,
        max_tokens: s.max_tokens,
        max_tokens_default: None,
        ignore_eos: s.ignore_eos,
        stop_token_ids: s.stop_token_ids,
        logprobs: s.logprobs,
        prompt_logprobs: s.prompt_logprobs,
        may_be_empty: s.prompt_logprobs.is_some(),
        min_tokens: s.min_tokens,
        logit_bias: logit_bias(s.logit_bias),
        allowed_token_ids: s.allowed_token_ids,
        grammar: None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use v1::segment::Kind;

    fn check(kinds: Vec<Option<Kind>>, kwargs: &str) -> Result<Prompt, Option<String>> {
        prompt(kinds.into_iter().map(|kind| v1::Segment { kind }).collect(), kwargs, Ending::Answer)
            .map_err(|e| e.param)
    }

    fn message(role: &str) -> Option<Kind> {
        Some(Kind::Message(v1::ChatMessage { role: role.into(), content: "c".into(), name: "n".into() }))
    }

    #[test]
    fn segments_are_of_one_kind() {
        let text = || Some(Kind::Text("t".into()));
        let tokens = || Some(Kind::Tokens(v1::TokenIds { ids: vec![1, 2] }));
        let mixed = Prompt::Segments(vec![Segment::Text("t".into()), Segment::Tokens(vec![1, 2])]);
        assert_eq!(check(vec![text(), tokens()], ""), Ok(mixed));
        let chat = check(vec![message("system"), message("user")], r#"{"a": 1}"#);
        assert!(
            matches!(chat, Ok(Prompt::Chat { messages, template_kwargs, tools: None, ending: Ending::Answer }) if messages.len() == 2 && template_kwargs["a"] == 1)
        );
        let refused = [
            (vec![], "", "prompt"),
            (vec![text(), message("user")], "", "prompt"),
            (vec![text(), None], "", "prompt[1]"),
            (vec![message("user"), message("king")], "", "prompt[1].message.role"),
            (vec![message("user")], "[]", "chat_template_kwargs"),
            (vec![text()], "{}", "chat_template_kwargs"),
        ];
        for (kinds, kwargs, param) in refused {
            assert_eq!(check(kinds, kwargs), Err(Some(param.to_owned())));
        }
    }
}
