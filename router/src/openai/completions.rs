//! `POST /v1/completions`: the request.

use super::common::{COMMON, Common, take_common};
use super::fields::{Fields, Policy, Row, only_false, only_null};
use crate::request::{Prompt, Segment};
use baton_types::{ErrorKind, RequestError, TokenId};
use serde::Deserialize;
use serde_json::Value;

const COMPLETIONS: &[Row] = &[
    ("prompt", Policy::Supported),
    ("echo", only_false()),
    ("suffix", only_null()),
    ("add_special_tokens", Policy::Only { accepts: |v| v == &Value::Bool(true), values: "true" }),
];

/// OpenAI's default for this endpoint.
const MAX_TOKENS_DEFAULT: u32 = 16;

#[derive(Deserialize)]
#[serde(untagged)]
enum PromptValue {
    Text(String),
    Tokens(Vec<TokenId>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<TokenId>>),
}

/// The parsed request.
pub(crate) fn parse(body: &[u8]) -> Result<(Prompt, Common), RequestError> {
    let table: Vec<Row> = COMPLETIONS.iter().chain(COMMON).copied().collect();
    let mut fields = Fields::parse(body, &table)?;
    let mut common = take_common(&mut fields)?;
    common.sampling.max_tokens_default = Some(MAX_TOKENS_DEFAULT);
    common.sampling.logprobs = fields.take("logprobs")?;
    let shape =
        |_| RequestError::invalid("prompt", "prompt must be a string, a list of one string or a list of token ids");
    let segment = match fields.take::<PromptValue>("prompt").map_err(shape)? {
        None => return Err(RequestError::invalid("prompt", "prompt is required")),
        Some(PromptValue::Text(text)) => Segment::Text(text),
        Some(PromptValue::Tokens(tokens)) => Segment::Tokens(tokens),
        Some(PromptValue::Texts(mut texts)) if texts.len() == 1 => Segment::Text(texts.remove(0)),
        Some(PromptValue::TokenLists(mut lists)) if lists.len() == 1 => Segment::Tokens(lists.remove(0)),
        Some(PromptValue::Texts(_) | PromptValue::TokenLists(_)) => {
            let message = "several prompts in one request are not supported: send one request for each";
            return Err(RequestError {
                param: Some("prompt".into()),
                ..RequestError::new(ErrorKind::Unsupported, message)
            });
        }
    };
    if matches!(&segment, Segment::Tokens(t) if t.is_empty()) {
        return Err(RequestError::invalid("prompt", "the prompt is empty; give at least one token"));
    }
    Ok((Prompt::Segments(vec![segment]), common))
}
