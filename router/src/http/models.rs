//! `/v1/models`.

use super::HttpState;
use super::error::Shape;
use crate::models::lookup;
use crate::workers::ServedModel;
use axum::Json;
use axum::extract::{Path, State};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::Instant;

fn entry(name: &str, model: &ServedModel) -> Value {
    json!({
        "id": name, "object": "model", "created": 0, "owned_by": "baton", "root": model.card.public_names().next(),
        "max_model_len": model.tokens_max,
    })
}

/// Every public model name for which a request would be served now.
pub(super) async fn list(State(state): State<HttpState>) -> Json<Value> {
    let models = state.core.workers.models(Instant::now());
    let names: BTreeSet<&str> = models.iter().flat_map(|m| m.card.public_names()).collect();
    let entry = |name: &str| lookup(&models, name).ok().map(|m| entry(name, &m));
    let data: Vec<Value> = names.into_iter().filter_map(entry).collect();
    Json(json!({"object": "list", "data": data}))
}

/// One model; ids may contain slashes.
pub(super) async fn one(State(state): State<HttpState>, Path(name): Path<String>) -> Response {
    match lookup(&state.core.workers.models(Instant::now()), &name) {
        Ok(model) => Json(entry(&name, &model)).into_response(),
        Err(e) => Shape::OpenAi.response(&e),
    }
}
