//! Health and metrics over HTTP: `/startupz`, `/healthz` = `/health`, `/readyz`, `/metrics`.
//!
//! Started: slow one-time work, such as loading a model, is done. Healthy: this process works, and a restart would not
//! help. Ready: it would serve a request now. All answer 200 or 503 with a reason.

use crate::config::{Check, Checker};
use crate::listen::{BindError, Listener, serve_probes};
use crate::metrics::Metrics;
use axum::Router;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// Few clients send probes and scrapes, but often.
const CONNECTIONS_MAX: u32 = 256;
/// Longer than Prometheus's interval between two scrapes.
const IDLE_MAX: Duration = Duration::from_secs(360);

/// Settings in the section `admin`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct AdminConfig {
    /// Where health and metrics are served. Unset: routers serve both on their HTTP port (otherwise only health is
    /// there); workers take a free port.
    pub listen: Option<SocketAddr>,
}

impl Check for AdminConfig {
    fn check(&self, _: &mut Checker) {}
}

/// Path of the metrics.
pub const METRICS: &str = "/metrics";
const PROBES: [&str; 4] = ["/startupz", "/healthz", "/health", "/readyz"];

/// Whether this is a path of [`probes`].
pub fn is_probe(path: &str) -> bool {
    PROBES.contains(&path)
}

type Probe = dyn Fn() -> Result<(), String> + Send + Sync;

/// Answers of a process to probes. They must return at once: they only read the process's state.
#[derive(Clone)]
pub struct Health {
    started: Arc<Probe>,
    live: Arc<Probe>,
    ready: Arc<Probe>,
}

impl fmt::Debug for Health {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Health").field("live", &(self.live)()).field("ready", &(self.ready)()).finish()
    }
}

impl Health {
    /// `live` and `ready` return `Ok`, or the reason why not.
    pub fn new(
        live: impl Fn() -> Result<(), String> + Send + Sync + 'static,
        ready: impl Fn() -> Result<(), String> + Send + Sync + 'static,
    ) -> Self {
        Self { started: Arc::new(|| Ok(())), live: Arc::new(live), ready: Arc::new(ready) }
    }

    /// The same for a process that starts slowly: `started` returns `Ok` once the start is complete.
    #[must_use]
    pub fn once(self, started: impl Fn() -> Result<(), String> + Send + Sync + 'static) -> Self {
        Self { started: Arc::new(started), ..self }
    }

    pub(crate) fn is_live(&self) -> bool {
        (self.live)().is_ok()
    }

    pub(crate) fn is_ready(&self) -> bool {
        (self.ready)().is_ok()
    }
}

/// All routes, to be merged into a server or served by [`serve`].
pub fn routes(health: Health, metrics: Metrics) -> Router {
    let metrics = move |headers: HeaderMap| {
        let accept = headers.get(header::ACCEPT).and_then(|accept| accept.to_str().ok()).unwrap_or_default();
        let (content_type, text) = metrics.encode_for(accept);
        std::future::ready(([(header::CONTENT_TYPE, content_type)], text).into_response())
    };
    probes(health).route(METRICS, get(metrics))
}

/// Routes of health only: for a port that more clients reach than may read metrics.
pub fn probes(health: Health) -> Router {
    fn answer(result: Result<(), String>) -> (StatusCode, String) {
        match result {
            Ok(()) => (StatusCode::OK, "ok\n".into()),
            Err(reason) => (StatusCode::SERVICE_UNAVAILABLE, format!("{reason}\n")),
        }
    }
    let live = {
        let health = health.clone();
        move || std::future::ready(answer((health.live)()))
    };
    let started = {
        let health = health.clone();
        move || std::future::ready(answer((health.started)()))
    };
    let ready = move || std::future::ready(answer((health.ready)()));
    let [at_startup, at_live, at_live_too, at_ready] = PROBES;
    Router::new()
        .route(at_startup, get(started))
        .route(at_live, get(live.clone()))
        .route(at_live_too, get(live))
        .route(at_ready, get(ready))
}

/// Listens at `address` for [`serve`].
pub async fn bind(address: SocketAddr) -> Result<Listener, BindError> {
    Listener::bind(address, CONNECTIONS_MAX).await
}

/// Serves `routes` until `stop` is cancelled; requests in flight end first. When all places are taken, the client with
/// the most connections loses its oldest one: other clients cannot keep a probe out.
pub async fn serve(listener: Listener, routes: Router, stop: CancellationToken) {
    serve_probes(listener, routes, IDLE_MAX, stop).await;
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::body::{Body, to_bytes};
    use std::sync::atomic::{AtomicBool, Ordering};
    use tonic::codegen::Service;

    #[tokio::test]
    async fn probes_answer_with_their_reason_and_metrics_in_the_format_asked_for() {
        let ready = Arc::new(AtomicBool::new(false));
        let health = Health::new(|| Ok(()), {
            let ready = ready.clone();
            move || {
                if ready.load(Ordering::Relaxed) { Ok(()) } else { Err("no router has admitted this worker".into()) }
            }
        });
        let metrics = Metrics::new("baton-decode-worker");
        metrics.counter("things", "Things").inc_by(3);
        metrics.register_health(&health);
        let mut routes = routes(health, metrics);
        let mut get = async |path: &str, accept: &str| {
            let request = axum::http::Request::get(path).header(header::ACCEPT, accept).body(Body::empty()).unwrap();
            let response = routes.call(request).await.unwrap();
            let (parts, body) = response.into_parts();
            let content_type = parts.headers.get(header::CONTENT_TYPE).map(|v| v.to_str().unwrap().to_owned());
            let body = to_bytes(body, 1 << 20).await.unwrap();
            (parts.status.as_u16(), content_type.unwrap_or_default(), String::from_utf8(body.to_vec()).unwrap())
        };
        assert_eq!(get("/startupz", "*/*").await.0, 200);
        assert_eq!(get("/healthz", "*/*").await.0, 200);
        assert_eq!(get("/health", "*/*").await.0, 200);
        let (status, _, reason) = get("/readyz", "*/*").await;
        assert_eq!((status, reason.trim()), (503, "no router has admitted this worker"));
        assert!(get("/metrics", "*/*").await.2.contains("\nbaton_ready 0\n"));
        ready.store(true, Ordering::Relaxed);
        assert_eq!(get("/readyz", "*/*").await.0, 200);
        let (status, content_type, text) = get("/metrics", "*/*").await;
        assert_eq!((status, content_type.as_str()), (200, "text/plain; version=0.0.4; charset=utf-8"));
        assert!(text.contains("\n# TYPE baton_things_total counter\nbaton_things_total 3\n"), "{text}");
        assert!(!text.contains("EOF"), "{text}");
        let (status, content_type, text) = get("/metrics", "application/openmetrics-text; version=1.0.0").await;
        let open_metrics = "application/openmetrics-text; version=1.0.0; charset=utf-8";
        assert_eq!((status, content_type.as_str()), (200, open_metrics));
        assert!(text.contains("\nbaton_things_total 3\n"), "{text}");
        assert!(text.contains("\nbaton_live 1\n") && text.contains("\nbaton_ready 1\n"), "{text}");
        assert!(text.contains("baton_build_info{service=\"baton-decode-worker\""), "{text}");
        assert!(text.contains("baton_process_start_time_seconds 1") && text.ends_with("# EOF\n"), "{text}");
        assert_eq!(get("/nothing", "*/*").await.0, 404);
    }
}
