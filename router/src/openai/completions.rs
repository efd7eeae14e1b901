//! `POST /v1/completions`: the request.

use super::common::{COMMON, Common, SHARED, take_common};
use crate::request::{Prompt, Segment};
use crate::wire::fields::{Fields, Policy, Row, only_false, only_null};
use crate::wire::json;
use baton_types::{ErrorKind, RequestError};
use serde_json::Value;

pub(crate) const COMPLETIONS: &[Row] = &[
    ("prompt", Policy::Supported),
    ("echo", only_false()),
    ("suffix", only_null()),
    ("add_special_tokens", Policy::Only { accepts: |v| v == &Value::Bool(true), values: "true" }),
];

/// OpenAI's default for this endpoint.
const MAX_TOKENS_DEFAULT: u32 = 16;

pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = COMPLETIONS.iter().chain(COMMON).chain(SHARED).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    common.parameters.sampling.max_tokens_default = Some(MAX_TOKENS_DEFAULT);
    common.parameters.sampling.logprobs = fields.take("logprobs")?;
    let prompt = fields.take_raw("prompt").ok_or_else(|| RequestError::invalid("prompt", "prompt is required"))?;
    let segment = segment(prompt.get())?;
    if matches!(&segment, Segment::Tokens(t) if t.is_empty()) {
        return Err(RequestError::invalid("prompt", "the prompt is empty; give at least one token"));
    }
    Ok((Prompt::Segments(vec![segment]), common))
}

/// A string, a list of token ids, or a list of one of these. The first character decides the type, so a long list is
/// parsed once.
fn segment(prompt: &str) -> Result<Segment, RequestError> {
    let shape =
        || RequestError::invalid("prompt", "prompt must be a string, a list of one string or a list of token ids");
    let first = |list: &str| list.strip_prefix('[').and_then(|items| items.trim_ascii_start().chars().next());
    let (prompt, several) = match first(prompt) {
        Some('"' | '[') => match json::items(prompt, 1).map_err(|_| shape())?.as_deref() {
            Some([one]) => (one.get(), false),
            _ => (prompt, true),
        },
        _ => (prompt, false),
    };
    if several {
        let message = "several prompts in one request are not supported: send one request for each";
        return Err(RequestError::new(ErrorKind::Unsupported, message).param("prompt"));
    }
    match first(prompt) {
        None if prompt.starts_with('"') => serde_json::from_str(prompt).map(Segment::Text).map_err(|_| shape()),
        // The error message would repeat a text among the numbers.
        Some(_) if !prompt.contains('"') => serde_json::from_str(prompt).map(Segment::Tokens).map_err(|_| shape()),
        _ => Err(shape()),
    }
}
