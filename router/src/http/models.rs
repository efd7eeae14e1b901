//! `/v1/models`.

use super::{HttpState, error};
use crate::models::{Named, lookup};
use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Instant;

/// An adapter's entry names its model as `parent`, as vLLM's does.
fn entry(name: &str, Named { model, adapter }: &Named) -> Value {
    let model_name = model.card.public_names().next();
    let (root, parent) = if adapter.is_some() { (Some(name), model_name) } else { (model_name, None) };
    json!({
        "id": name, "object": "model", "created": 0, "owned_by": "baton", "root": root, "parent": parent,
        "max_model_len": model.tokens_max,
    })
}

/// Every public name of a model or an adapter for which a request would be served now.
pub(super) async fn list(State(state): State<HttpState>) -> Json<Value> {
    let models = state.core.workers.models(Instant::now());
    let mut names: BTreeSet<&str> = models.iter().flat_map(|m| m.card.public_names()).collect();
    names.extend(models.iter().flat_map(|m| m.adapters.keys().map(String::as_str)));
    let entry = |name: &str| lookup(&models, name).ok().map(|m| entry(name, &m));
    let data: Vec<Value> = names.into_iter().filter_map(entry).collect();
    Json(json!({"object": "list", "data": data}))
}

/// One model; ids may contain slashes.
pub(super) async fn one(State(state): State<HttpState>, Path(name): Path<String>) -> Response {
    match lookup(&state.core.workers.models(Instant::now()), &name) {
        Ok(model) => Json(entry(&name, &model)).into_response(),
        Err(e) => error::response(&e),
    }
}
