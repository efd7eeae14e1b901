//! The page at `/`: a chat, the live cluster, and recent requests.
//!
//! ```text
//!  ui/*  <── assets: GET /, /ui/*        open to all, holds nothing of the cluster
//!            access: operators alone
//!              ├─ GET /cluster           its status, as `baton status --json`
//!              ├─ GET /cluster/events    the same as it changes, and handoffs of KV as they end
//!              └─ GET /cluster/requests  recent requests; one of them as a waterfall, as `baton trace`
//! ```
//!
//! The chat uses `/v1`, like any client. The page has no build step: its files are embedded as they are.

mod access;
mod assets;
mod config;
mod events;
mod requests;

pub use config::PageConfig;

use crate::auth::Access;
use crate::flow::Core;
use crate::grpc::AdminService;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::middleware::from_fn_with_state;
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use events::Watchers;
use std::sync::Arc;
use tokio_util::sync::CancellationToken;

/// What the routes of the page share.
#[derive(Clone, Debug)]
pub(crate) struct Page {
    admin: AdminService,
    core: Arc<Core>,
    access: Access,
    open: bool,
    watchers: Watchers,
    /// Cancelled when the router closes.
    stop: CancellationToken,
}

impl Page {
    pub(crate) fn new(
        admin: AdminService,
        core: Arc<Core>,
        access: Access,
        config: &PageConfig,
        stop: CancellationToken,
    ) -> Self {
        Self { admin, core, access, open: config.open, watchers: Watchers::new(config.watchers_max), stop }
    }
}

/// All routes of the page.
pub(crate) fn routes(page: Page) -> Router {
    Router::new()
        .route("/cluster", get(status))
        .route("/cluster/events", get(events::stream))
        .route("/cluster/requests", get(requests::list))
        .route("/cluster/requests/{id}", get(requests::one))
        .route_layer(from_fn_with_state(page.clone(), access::admit))
        .with_state(page)
        .merge(assets::routes())
}

async fn status(State(page): State<Page>) -> Response {
    fresh(Json(page.admin.cluster()).into_response())
}

/// What is about this moment is stored nowhere.
fn fresh(mut response: Response) -> Response {
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response.headers_mut().insert(header::X_CONTENT_TYPE_OPTIONS, HeaderValue::from_static("nosniff"));
    response
}
