//! Log-probabilities in OpenAI's two shapes.

use crate::output::Delta;
use baton_types::TokenId;
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Bytes of a token; `None` where the model has no text.
pub(crate) type TextOfToken = Arc<dyn Fn(TokenId) -> Option<Vec<u8>> + Send + Sync>;

/// The lowest number that JSON clients are sure to read, as OpenAI writes it; the true value may be minus infinity.
const LOGPROB_MIN: f32 = -9999.0;

fn text(bytes: Option<&[u8]>, token: TokenId) -> String {
    bytes.map_or_else(|| format!("token_id:{token}"), |b| String::from_utf8_lossy(b).into_owned())
}

fn entry(token: TokenId, logprob: f32, token_text: &TextOfToken) -> Value {
    let bytes = token_text(token);
    json!({"token": text(bytes.as_deref(), token), "logprob": logprob.max(LOGPROB_MIN), "bytes": bytes})
}

/// `{content: [{token, logprob, bytes, top_logprobs}]}`.
pub(super) fn chat_logprobs(delta: &Delta, token_text: &TextOfToken) -> Value {
    let content: Vec<Value> = delta
        .token_ids
        .iter()
        .zip(&delta.logprobs)
        .map(|(&token, logprobs)| {
            let mut content = entry(token, logprobs.chosen, token_text);
            content["top_logprobs"] = logprobs.top.iter().map(|&(t, p)| entry(t, p, token_text)).collect();
            content
        })
        .collect();
    json!({"content": content, "refusal": null})
}

/// `{tokens, token_logprobs, top_logprobs, text_offset}`; offsets count characters of the tokens' own texts.
pub(super) fn completion_logprobs(delta: &Delta, token_text: &TextOfToken, offset: &mut usize) -> Value {
    let (mut tokens, mut chosen, mut tops, mut offsets) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for (&token, logprobs) in delta.token_ids.iter().zip(&delta.logprobs) {
        let shown = text(token_text(token).as_deref(), token);
        offsets.push(*offset);
        *offset += shown.chars().count();
        tokens.push(shown);
        chosen.push(logprobs.chosen.max(LOGPROB_MIN));
        let top: Map<String, Value> =
            logprobs.top.iter().map(|&(t, p)| (text(token_text(t).as_deref(), t), json!(p.max(LOGPROB_MIN)))).collect();
        tops.push(top);
    }
    json!({"tokens": tokens, "token_logprobs": chosen, "top_logprobs": tops, "text_offset": offsets})
}
