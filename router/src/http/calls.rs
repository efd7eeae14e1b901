//! Calls count from their heads on: bodies may take long, and clients may take long to read answers.

use super::{error, headers};
use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::Response;
use baton_node::admin::METRICS;
use baton_node::calls::{Counted, Meter, enter};
use baton_node::intake::IntakeFull;

/// Counts a call with its head until its answer has ended.
pub(super) async fn count(State(meter): State<Meter>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    match enter(&meter, &parts) {
        Ok(call) => {
            let response = next.run(Request::from_parts(parts, body)).await;
            response.map(|body| Body::new(Counted::new(body, call)))
        }
        Err(full) => headers::add_id(refused(full), &headers::id(&parts.headers).0),
    }
}

/// The same for metrics, with their text, which nobody needs a key for where they have no port of their own. Probes always pass: a router
/// that is full works.
pub(super) async fn count_scrape(State(meter): State<Meter>, request: Request, next: Next) -> Response {
    if request.uri().path() != METRICS {
        return next.run(request).await;
    }
    let (parts, body) = request.into_parts();
    let mut call = match enter(&meter, &parts) {
        Ok(call) => call,
        Err(full) => return refused(full),
    };
    let response = next.run(Request::from_parts(parts, body)).await;
    match call.grow(response.body().size_hint().lower()) {
        Ok(()) => response.map(|body| Body::new(Counted::new(body, call))),
        Err(full) => refused(full),
    }
}

fn refused(full: IntakeFull) -> Response {
    error::response(&full.into())
}
