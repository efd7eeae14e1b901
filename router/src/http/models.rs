//! `/v1/models`, in the shapes of OpenAI's and Anthropic's APIs at once.

use super::HttpState;
use super::error::Shape;
use crate::models::{Named, lookup};
use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use chrono::{DateTime, SecondsFormat};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Instant;

/// A model or an adapter under one of its names. The model was created when this router first served it; an adapter's entry names its model as
/// `parent`, as vLLM's does.
fn entry(name: &str, Named { model, adapter }: &Named, state: &HttpState) -> Value {
    let (instant, unix) = state.wall;
    let since = unix + model.since.saturating_duration_since(instant);
    let since = DateTime::from_timestamp(since.as_secs().cast_signed(), 0).unwrap_or_default();
    let model_name = model.card.public_names().next();
    let (root, parent) = if adapter.is_some() { (Some(name), model_name) } else { (model_name, None) };
    json!({
        "id": name, "object": "model", "created": since.timestamp(), "owned_by": "baton",
        "root": root, "parent": parent, "max_model_len": model.tokens_max,
        "type": "model", "display_name": name, "created_at": since.to_rfc3339_opts(SecondsFormat::Secs, true),
        "max_input_tokens": model.tokens_max, "max_tokens": model.tokens_max,
    })
}

/// Every public name of a model or an adapter for which a request would be served now, on one page.
pub(super) async fn list(State(state): State<HttpState>) -> Json<Value> {
    let models = state.core.workers.models(Instant::now());
    let mut names: BTreeSet<&str> = models.iter().flat_map(|m| m.card.public_names()).collect();
    names.extend(models.iter().flat_map(|m| m.adapters.keys().map(String::as_str)));
    let entry = |name: &&str| lookup(&models, name).ok().map(|m| entry(name, &m, &state));
    let data: Vec<Value> = names.iter().filter_map(entry).collect();
    let id = |model: Option<&Value>| model.map(|model| model["id"].clone());
    let (first, last) = (id(data.first()), id(data.last()));
    Json(json!({"object": "list", "data": data, "has_more": false, "first_id": first, "last_id": last}))
}

/// One model; ids may contain slashes.
pub(super) async fn one(State(state): State<HttpState>, Path(name): Path<String>) -> Response {
    match lookup(&state.core.workers.models(Instant::now()), &name) {
        Ok(model) => Json(entry(&name, &model, &state)).into_response(),
        Err(e) => Shape::OpenAi.response(&e),
    }
}
