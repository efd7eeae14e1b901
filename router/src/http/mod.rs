//! The HTTP front: OpenAI's API over the flow.

mod access;
mod body;
mod calls;
pub(crate) mod error;
mod generate;
mod headers;
mod models;
mod received;
mod sse;
mod tokenize;
mod whole;

use crate::auth::Access;
use crate::deadline::Deadlines;
use crate::flow::Core;
use axum::http::StatusCode;
use axum::middleware::from_fn_with_state;
use axum::routing::{get, post};
use axum::{Json, Router};
use baton_node::calls::Meter;
pub(crate) use body::BodyLimits;
use serde_json::json;
use std::sync::Arc;
use std::time::Duration;

/// State that all handlers of HTTP requests share.
#[derive(Clone, Debug)]
pub(crate) struct HttpState {
    pub(crate) core: Arc<Core>,
    pub(crate) access: Access,
    /// Default and longest deadline.
    pub(crate) deadlines: Deadlines,
    pub(crate) body: BodyLimits,
    /// Keepalive interval of streams.
    pub(crate) sse_keepalive: Duration,
    /// Whether fields that the API does not have are refused.
    pub(crate) strict_fields: bool,
}

/// All routes. Those of the API need a key if keys are configured. `admin` (health, and metrics unless they have their
/// own port) is open to every client of the port. No CORS headers are ever sent: pages of other origins cannot read
/// answers. `meter` counts all calls, also those of unknown paths.
pub(crate) fn routes(state: HttpState, meter: Meter, admin: Router) -> Router {
    // What other servers answer without a key, too.
    let open = Router::new()
        .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
        .route("/ping", get(async || StatusCode::OK).post(async || StatusCode::OK));
    Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route_layer(from_fn_with_state(state.access.clone(), access::admit))
        .with_state(state)
        .merge(open)
        .merge(admin)
        .fallback(error::no_route)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(from_fn_with_state(meter, calls::count))
}
