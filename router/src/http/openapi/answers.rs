//! Schemas of answers. A test compares their members with answers.

use serde_json::{Map, Value, json};

/// Members of each answer. Those with `?` are not in each.
const ANSWERS: &[(&str, &[&str])] = &[
    (
        "ChatCompletion",
        &[
            "id",
            "object",
            "created",
            "model",
            "choices",
            "usage",
            "seed",
            "timings?",
            "crossed_classes?",
            "prompt_token_ids?",
            "prompt_logprobs?",
        ],
    ),
    ("Completion", &["id", "object", "created", "model", "choices", "usage", "seed", "timings?", "crossed_classes?"]),
    (
        "Response",
        &[
            "id",
            "object",
            "created_at",
            "status",
            "background",
            "error",
            "incomplete_details",
            "instructions",
            "max_output_tokens",
            "metadata",
            "model",
            "output",
            "parallel_tool_calls",
            "previous_response_id",
            "store",
            "temperature",
            "tool_choice",
            "tools",
            "top_p",
            "truncation",
            "usage",
            "seed",
            "timings?",
            "crossed_classes?",
        ],
    ),
    (
        "Message",
        &[
            "id",
            "type",
            "role",
            "model",
            "content",
            "stop_reason",
            "stop_sequence",
            "usage",
            "seed",
            "timings?",
            "crossed_classes?",
        ],
    ),
    ("TokenCount", &["input_tokens"]),
    ("Tokens", &["count", "max_model_len", "tokens", "token_strs?"]),
    ("Text", &["prompt"]),
    ("Models", &["object", "data", "has_more", "first_id", "last_id"]),
    (
        "Model",
        &[
            "id",
            "object",
            "created",
            "owned_by",
            "root",
            "parent",
            "max_model_len",
            "type",
            "display_name",
            "created_at",
            "max_input_tokens",
            "max_tokens",
        ],
    ),
    ("Version", &["version"]),
    ("Error", &["error"]),
    ("AnthropicError", &["type", "error"]),
];

/// What members are, where more than their name is to be said. The first that fits counts.
fn member(answer: &str, name: &str) -> Value {
    let list = json!({"type": "array", "items": {"type": "object"}});
    match (answer, name) {
        ("Error", "error") => json!({"type": "object", "properties": {
            "message": {"type": "string"}, "type": {"type": "string"}, "param": {"type": ["string", "null"]},
            "code": {"type": ["string", "null"]}}}),
        ("AnthropicError", "error") => {
            json!({"type": "object", "properties": {"type": {"type": "string"}, "message": {"type": "string"}}})
        }
        (_, "choices" | "output" | "content" | "data" | "tools") => list,
        (_, "usage" | "timings" | "metadata") => json!({"type": "object"}),
        (_, "created" | "seed" | "input_tokens" | "count" | "max_model_len" | "max_input_tokens" | "max_tokens") => {
            json!({"type": "integer"})
        }
        (_, "tokens" | "prompt_token_ids") => json!({"type": "array", "items": {"type": "integer"}}),
        (_, "prompt_logprobs") => json!({"type": "array", "items": {"type": ["object", "null"]}}),
        (_, "crossed_classes" | "token_strs") => json!({"type": "array", "items": {"type": "string"}}),
        ("Response", "created_at") => json!({"type": "integer"}),
        (
            _,
            "id" | "object" | "model" | "type" | "role" | "status" | "version" | "prompt" | "display_name"
            | "created_at",
        ) => {
            json!({"type": "string"})
        }
        _ => json!({}),
    }
}

pub(super) fn schemas() -> Map<String, Value> {
    let schema = |(answer, members): &(&str, &[&str])| {
        let name = |member: &&str| member.trim_end_matches('?').to_owned();
        let properties: Map<String, Value> = members.iter().map(|m| (name(m), member(answer, &name(m)))).collect();
        let required: Vec<String> = members.iter().filter(|m| !m.ends_with('?')).map(name).collect();
        let schema = json!({"type": "object", "properties": properties, "required": required});
        ((*answer).to_owned(), schema)
    };
    ANSWERS.iter().map(schema).collect()
}
