//! Errors in OpenAI's shape.

use baton_types::RequestError;
use serde_json::{Value, json};

/// `{"error": {message, type, param, code}}`.
pub(crate) fn error_body(error: &RequestError) -> Value {
    let (kind, code) = error.kind.openai();
    json!({"error": {"message": error.message, "type": kind, "param": error.param, "code": code}})
}
