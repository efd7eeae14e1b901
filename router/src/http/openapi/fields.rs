//! Descriptions of fields and headers of requests: what their parsers honour.

use serde_json::{Value, json};

/// A name, and its schema as JSON.
pub(super) type Field = (&'static str, &'static str);

/// The schema of a field: an endpoint's own, else that of all.
pub(super) fn schema(name: &str, own: &[Field]) -> Option<Value> {
    let (_, schema) = own.iter().chain(ALL).find(|(known, _)| *known == name)?;
    serde_json::from_str(schema).ok()
}

/// Headers that requests may have.
pub(super) fn headers() -> Value {
    let header = |name: &str, description: &str| json!({"name": name, "in": "header", "description": description, "schema": {"type": "string"}});
    json!([
        header("x-request-id", "Id of the request: 1 to 128 printable ASCII characters without spaces"),
        header("x-request-timeout", "Deadline: seconds, or a number with ms, s or m"),
        header("traceparent", "W3C trace context"),
    ])
}

/// Numbers over 0 are at least 1e-37: smaller ones may be 0 in 32 bits.
pub(super) const ALL: &[Field] = &[
    ("model", r#"{"type": "string", "description": "Id or served name; may be left out if one model is served"}"#),
    ("stream", r#"{"type": "boolean", "default": false, "description": "Server-sent events in place of one body"}"#),
    (
        "temperature",
        r#"{"type": "number", "minimum": 0, "maximum": 2, "description": "0 takes the likeliest token. Default: the model's, else 1"}"#,
    ),
    (
        "top_p",
        r#"{"type": "number", "minimum": 1e-37, "maximum": 1, "description": "Share of the probability that tokens are drawn from"}"#,
    ),
    (
        "top_k",
        r#"{"type": "integer", "minimum": -1, "description": "Number of tokens that are drawn from; 0 and -1: all"}"#,
    ),
    (
        "presence_penalty",
        r#"{"type": "number", "minimum": -2, "maximum": 2, "default": 0, "description": "Subtracted once for a token that occurred"}"#,
    ),
    (
        "frequency_penalty",
        r#"{"type": "number", "minimum": -2, "maximum": 2, "default": 0, "description": "Subtracted for each time that a token occurred"}"#,
    ),
    (
        "repetition_penalty",
        r#"{"type": "number", "minimum": 1e-37, "maximum": 10, "description": "Divides the logits of tokens that occurred"}"#,
    ),
    (
        "repeat_penalty",
        r#"{"type": "number", "minimum": 1e-37, "maximum": 10, "description": "The same as repetition_penalty"}"#,
    ),
    ("seed", r#"{"type": "integer", "description": "Of the random numbers; drawn and reported if absent"}"#),
    (
        "stop_token_ids",
        r#"{"type": "array", "items": {"type": "integer"}, "maxItems": 64, "description": "Further tokens that end the answer"}"#,
    ),
    ("ignore_eos", r#"{"type": "boolean", "default": false, "description": "Go on after the model's end tokens"}"#),
    (
        "prefill_policy",
        r#"{"enum": ["auto", "remote", "local"], "description": "Where the prompt is prefilled, in place of the router's policy"}"#,
    ),
    (
        "priority",
        r#"{"type": "integer", "minimum": -100, "maximum": 100, "default": 0, "description": "Higher goes first, as far as the key allows"}"#,
    ),
    (
        "cache_salt",
        r#"{"type": "string", "minLength": 1, "maxLength": 256, "description": "Shares cached prefixes only with requests of the same salt"}"#,
    ),
    (
        "cache",
        r#"{"type": "object", "properties": {"ttl_ms": {"type": "integer"}, "pin_ms": {"type": "integer"}, "off": {"type": "boolean"}, "cold": {"type": "boolean"}}, "additionalProperties": false, "description": "How prefix caches are used"}"#,
    ),
    (
        "logit_bias",
        r#"{"type": "object", "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100}, "description": "Added to the logits of these token ids; at most 1,024"}"#,
    ),
    (
        "min_p",
        r#"{"type": "number", "minimum": 0, "maximum": 1, "description": "Tokens less likely than this part of the likeliest one are not drawn"}"#,
    ),
    (
        "typical_p",
        r#"{"type": "number", "minimum": 1e-37, "maximum": 1, "default": 1, "description": "Share of the probability that the tokens nearest to the entropy have, which are drawn from"}"#,
    ),
    (
        "bad_words",
        r#"{"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 127}, "maxItems": 128, "description": "Words that the answer does not have, with and without a space before them"}"#,
    ),
    (
        "min_tokens",
        r#"{"type": "integer", "minimum": 0, "default": 0, "description": "Before so many tokens, none ends the answer"}"#,
    ),
    (
        "allowed_token_ids",
        r#"{"type": "array", "items": {"type": "integer"}, "minItems": 1, "maxItems": 8192, "description": "The only tokens that are drawn"}"#,
    ),
    (
        "stream_options",
        r#"{"type": "object", "properties": {"include_usage": {"type": "boolean"}, "continuous_usage_stats": {"type": "boolean"}, "include_obfuscation": {"const": false}}, "additionalProperties": false, "if": {"properties": {"continuous_usage_stats": {"const": true}}, "required": ["continuous_usage_stats"]}, "then": {"properties": {"include_usage": {"const": true}}, "required": ["include_usage"]}, "description": "Usage in streams"}"#,
    ),
    ("max_tokens", r#"{"type": "integer", "minimum": 1, "description": "Most tokens of the answer"}"#),
    (
        "echo",
        r#"{"type": "boolean", "default": false, "description": "Answers begin with the text of their prompt, and their log-probabilities with those of the prompt"}"#,
    ),
    (
        "prompt_logprobs",
        r#"{"type": "integer", "minimum": 0, "maximum": 20, "description": "Log-probabilities of the prompt's tokens, with so many alternatives; not in streams"}"#,
    ),
    ("n", r#"{"type": "integer", "minimum": 1, "maximum": 128, "default": 1, "description": "Number of samples"}"#),
    (
        "stop",
        r#"{"anyOf": [{"type": "string", "minLength": 1, "maxLength": 256}, {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16}], "description": "Texts that end the answer, which does not have them"}"#,
    ),
    (
        "return_token_ids",
        r#"{"type": "boolean", "default": false, "description": "Token ids of prompt and answer, too"}"#,
    ),
    (
        "truncate_prompt_tokens",
        r#"{"type": "integer", "minimum": -1, "description": "Only so many of the last tokens of a longer prompt are kept; -1: as many as fit"}"#,
    ),
    (
        "best_of",
        r#"{"type": "integer", "minimum": 1, "maximum": 128, "description": "So many answers are generated, and the n best are shown; not in streams"}"#,
    ),
    (
        "add_generation_prompt",
        r#"{"type": "boolean", "default": true, "description": "Whether the prompt ends with the beginning of an answer"}"#,
    ),
    (
        "continue_final_message",
        r#"{"type": "boolean", "default": false, "description": "The answer continues the last message"}"#,
    ),
    (
        "response_format",
        r#"{"type": "object", "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "json_schema": {"type": "object"}}, "required": ["type"], "if": {"properties": {"type": {"const": "json_schema"}}}, "then": {"required": ["json_schema"]}, "description": "Form of the answer: type text, json_object or json_schema"}"#,
    ),
    (
        "structured_outputs",
        r#"{"type": "object", "description": "Form of the answer: one of json, regex, choice, grammar and json_object"}"#,
    ),
    (
        "guided_json",
        r#"{"type": ["object", "string"], "minLength": 1, "description": "JSON schema that the answer follows"}"#,
    ),
    (
        "guided_regex",
        r#"{"type": "string", "minLength": 1, "description": "Regular expression that the answer matches"}"#,
    ),
    (
        "guided_choice",
        r#"{"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1, "maxItems": 4096, "description": "Texts of which the answer is one"}"#,
    ),
    ("guided_grammar", r#"{"type": "string", "minLength": 1, "description": "Lark grammar that the answer follows"}"#),
    (
        "max_completion_tokens",
        r#"{"type": "integer", "minimum": 0, "description": "The same as max_tokens, and wins"}"#,
    ),
    (
        "top_logprobs",
        r#"{"type": "integer", "minimum": 0, "maximum": 20, "description": "Alternatives of each token; needs logprobs"}"#,
    ),
    (
        "chat_template_kwargs",
        r#"{"type": "object", "description": "Further arguments of the chat template, at most 16 KiB"}"#,
    ),
    (
        "reasoning_effort",
        r#"{"enum": ["none", "minimal", "low", "medium", "high", "xhigh"], "description": "An argument of the chat template; ignored where that does not read it"}"#,
    ),
    (
        "parallel_tool_calls",
        r#"{"type": "boolean", "default": true, "description": "Whether a required answer may have several calls"}"#,
    ),
    (
        "prompt",
        r#"{"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}, {"type": "array", "items": {"anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}]}, "minItems": 1, "maxItems": 256}], "description": "A text, token ids, or a list of at most 256 of these"}"#,
    ),
    ("instructions", r#"{"type": "string", "description": "A system message before the input"}"#),
    (
        "input",
        r#"{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}], "description": "A text, or items: messages, calls, their outputs and reasoning"}"#,
    ),
    (
        "max_output_tokens",
        r#"{"type": "integer", "minimum": 1, "description": "Most tokens of the answer. Default: what remains of the context"}"#,
    ),
    (
        "text",
        r#"{"type": "object", "properties": {"format": {"type": "object"}}, "description": "Form of the answer: format of type text, json_object or json_schema"}"#,
    ),
    (
        "reasoning",
        r#"{"type": "object", "properties": {"effort": {"type": "string"}}, "description": "Effort none asks the chat template for an answer without reasoning"}"#,
    ),
    ("previous_response_id", r#"{"type": "null", "description": "Not supported, since nothing is stored"}"#),
    ("conversation", r#"{"type": "null", "description": "Not supported, since nothing is stored"}"#),
    (
        "system",
        r#"{"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "object"}}], "description": "What the operator says: a text or text blocks"}"#,
    ),
    (
        "stop_sequences",
        r#"{"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 256}, "maxItems": 16, "description": "Texts that end the answer, which does not have them"}"#,
    ),
    (
        "thinking",
        r#"{"type": "object", "properties": {"type": {"enum": ["enabled", "adaptive", "disabled"]}}, "required": ["type"], "description": "Whether the chat template asks for reasoning"}"#,
    ),
    (
        "cache_control",
        r#"{"type": "object", "properties": {"type": {"const": "ephemeral"}, "ttl": {"enum": ["5m", "1h"]}}, "required": ["type"], "description": "Pins the prompt, as far as pins are allowed"}"#,
    ),
    (
        "output_config",
        r#"{"type": "object", "properties": {"format": {"type": "object"}}, "description": "Form of the answer: format of type json_schema"}"#,
    ),
    ("return_token_strs", r#"{"type": "boolean", "default": false, "description": "The text of each token, too"}"#),
    ("tokens", r#"{"type": "array", "items": {"type": "integer"}, "description": "Token ids whose text is wanted"}"#),
];

const MESSAGES_OF_CHAT: Field = (
    "messages",
    r#"{"type": "array", "minItems": 1, "maxItems": 4096, "items": {"type": "object", "properties": {"role": {"enum": ["system", "developer", "user", "assistant", "tool"]}, "content": {}, "name": {"type": "string"}, "tool_calls": {"type": "array"}, "tool_call_id": {"type": "string"}, "reasoning_content": {"type": "string"}}, "required": ["role"]}, "description": "The chat, oldest message first; contents are text or text parts"}"#,
);
const TOOL_CHOICE: Field = (
    "tool_choice",
    r#"{"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "properties": {"type": {"const": "function"}, "function": {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}}, "required": ["type", "function"]}], "description": "Whether functions are called, or the one that is"}"#,
);
const FLAT_TOOL_CHOICE: Field = (
    "tool_choice",
    r#"{"anyOf": [{"enum": ["none", "auto", "required"]}, {"type": "object", "properties": {"type": {"const": "function"}, "name": {"type": "string"}}, "required": ["type", "name"]}], "description": "Whether functions are called, or the one that is"}"#,
);
const TOOLS: Field = (
    "tools",
    r#"{"type": "array", "maxItems": 128, "items": {"type": "object", "properties": {"type": {"const": "function"}, "function": {"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}, "description": {"type": "string"}, "parameters": {"type": "object"}, "strict": {"type": "boolean"}}, "required": ["name"]}}, "required": ["type", "function"]}, "description": "Functions that the answer may call"}"#,
);
const FLAT_TOOLS: Field = (
    "tools",
    r#"{"type": "array", "maxItems": 128, "items": {"type": "object", "properties": {"type": {"const": "function"}, "name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}, "description": {"type": "string"}, "parameters": {"type": "object"}, "strict": {"type": "boolean"}}, "required": ["type", "name"]}, "description": "Functions that the answer may call"}"#,
);
const MAX_TOKENS: Field = (
    "max_tokens",
    r#"{"type": "integer", "minimum": 0, "default": 16, "description": "Most tokens of the answer; 0 only with echo or prompt_logprobs"}"#,
);
const MAX_TOKENS_OF_CHAT: Field = (
    "max_tokens",
    r#"{"type": "integer", "minimum": 0, "description": "Most tokens of the answer; 0 only with prompt_logprobs"}"#,
);
const LOGPROBS_OF_CHAT: Field =
    ("logprobs", r#"{"type": "boolean", "default": false, "description": "Log-probabilities of the tokens"}"#);

pub(super) const CHAT: &[Field] = &[MESSAGES_OF_CHAT, TOOLS, TOOL_CHOICE, LOGPROBS_OF_CHAT, MAX_TOKENS_OF_CHAT];
pub(super) const COMPLETIONS: &[Field] = &[
    MAX_TOKENS,
    (
        "logprobs",
        r#"{"type": "integer", "minimum": 0, "maximum": 20, "description": "Log-probabilities of the tokens, with so many alternatives"}"#,
    ),
];
pub(super) const RESPONSES: &[Field] = &[FLAT_TOOLS, FLAT_TOOL_CHOICE];
pub(super) const MESSAGES: &[Field] = &[
    (
        "tools",
        r#"{"type": "array", "maxItems": 128, "items": {"type": "object", "properties": {"name": {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}, "description": {"type": "string"}, "input_schema": {"type": "object"}, "strict": {"type": "boolean"}}, "required": ["name"]}, "description": "Tools that the answer may use"}"#,
    ),
    (
        "messages",
        r#"{"type": "array", "minItems": 1, "maxItems": 4096, "items": {"type": "object", "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": {}}, "required": ["role", "content"]}, "description": "The chat, oldest message first; the answer continues a last one of the assistant. Contents are text or blocks"}"#,
    ),
    (
        "tool_choice",
        r#"{"type": "object", "properties": {"type": {"enum": ["auto", "any", "tool", "none"]}, "name": {"type": "string"}, "disable_parallel_tool_use": {"type": "boolean"}}, "required": ["type"], "description": "Whether tools are used, or the one that is"}"#,
    ),
];
pub(super) const TOKENIZE: &[Field] = CHAT;

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn each_is_json_and_described_once() {
        for list in [ALL, CHAT, COMPLETIONS, RESPONSES, MESSAGES] {
            let mut names = BTreeSet::new();
            for (name, text) in list {
                assert!(serde_json::from_str::<Value>(text).is_ok_and(|schema| schema.is_object()), "{name}");
                assert!(names.insert(name), "{name} is there twice");
            }
        }
    }
}
