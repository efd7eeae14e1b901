//! The HTTP front: the APIs of OpenAI and Anthropic over the flow.

pub(crate) mod access;
mod body;
mod calls;
mod cors;
pub(crate) mod error;
mod generate;
mod headers;
mod long;
mod models;
mod openapi;
mod parse;
mod received;
mod sse;
mod tokenize;
mod whole;

use crate::deadline::Deadlines;
use crate::flow::Core;
pub(crate) use access::Admitted;
use axum::http::StatusCode;
use axum::middleware::{from_fn_with_state, map_response};
use axum::routing::{get, post};
use axum::{Json, Router};
use baton_node::calls::Meter;
pub(crate) use body::BodyLimits;
pub(crate) use cors::{cors, is_origin};
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower_http::cors::CorsLayer;

/// State that all handlers of HTTP requests share.
#[derive(Clone, Debug)]
pub(crate) struct HttpState {
    pub(crate) core: Arc<Core>,
    pub(crate) admitted: Admitted,
    /// Default and longest deadline.
    pub(crate) deadlines: Deadlines,
    pub(crate) body: BodyLimits,
    /// Keepalive interval of streams.
    pub(crate) sse_keepalive: Duration,
    /// Whether fields that the API does not have are refused.
    pub(crate) strict_fields: bool,
    /// The start of the router, and its Unix time.
    pub(crate) wall: (Instant, Duration),
    /// Whose pages may read answers; `None`: of no other origin.
    pub(crate) cors: Option<CorsLayer>,
}

/// All routes. Those of the API need a key if keys are configured. `admin` (health, and metrics unless they have their
/// own port) is open to every client of the port. `meter` counts all calls, also those of unknown paths.
pub(crate) fn routes(state: HttpState, meter: Meter, admin: Router) -> Router {
    // What other servers answer without a key, too.
    let open = Router::new()
        .route("/openapi.json", get(openapi::json))
        .route("/docs", get(openapi::docs))
        .route("/version", get(async || Json(json!({"version": env!("CARGO_PKG_VERSION")}))))
        .route("/ping", get(async || StatusCode::OK).post(async || StatusCode::OK));
    let keyed = from_fn_with_state(state.admitted.clone(), access::admit);
    let messages = Router::new()
        .route("/v1/messages", post(generate::messages))
        .route("/v1/messages/count_tokens", post(tokenize::count))
        .route_layer(keyed.clone())
        .route_layer(map_response(headers::request_id_of_anthropic))
        .with_state(state.clone());
    let cors = state.cors.clone();
    let api = Router::new()
        .route("/v1/chat/completions", post(generate::chat))
        .route("/v1/completions", post(generate::completions))
        .route("/v1/responses", post(generate::responses))
        .route("/tokenize", post(tokenize::tokenize))
        .route("/detokenize", post(tokenize::detokenize))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*model}", get(models::one))
        .route_layer(keyed)
        .with_state(state)
        .merge(messages)
        .merge(open)
        .method_not_allowed_fallback(error::wrong_method);
    // Outside of the keys: preflights carry none, and pages may read refusals too. What operators read is not for pages of other origins.
    let api = match cors {
        Some(cors) => api.layer(cors),
        None => api,
    };
    Router::new()
        .merge(api)
        .merge(admin)
        .fallback(error::no_route)
        .method_not_allowed_fallback(error::wrong_method)
        .layer(from_fn_with_state(meter, calls::count))
}
