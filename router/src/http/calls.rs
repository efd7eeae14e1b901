//! Counts calls from their head on: bodies may arrive slowly, and clients may read answers slowly.

use super::error::Shape;
use super::headers;
use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::http::header::CONTENT_LENGTH;
use axum::http::{Method, Version};
use axum::middleware::Next;
use axum::response::Response;
use baton_node::admin::is_probe;
use baton_node::calls::{Counted, Meter, enter};
use baton_node::intake::IntakeFull;

/// Counts each call from its head until its answer has ended, whatever its path. What is read, such as metrics, counts with
/// its text: reading some of it needs no key. Probes are never refused, since a full router is healthy.
pub(super) async fn count(State(meter): State<Meter>, request: Request, next: Next) -> Response {
    let (parts, body) = request.into_parts();
    let entered = enter(&meter, &parts);
    let (version, shape, path) = (parts.version, Shape::of(&parts.uri), parts.uri.path().to_owned());
    let reads = parts.method == Method::GET;
    let id = (entered.is_err() || reads).then(|| headers::id(&parts.headers).0);
    let refused = |full: IntakeFull| {
        let response = shape.response(&full.into());
        uncounted(id.iter().fold(response, headers::add_id), version)
    };
    match entered {
        Ok(mut call) => {
            let response = next.run(Request::from_parts(parts, body)).await;
            let text = if reads { response.body().size_hint().lower() } else { 0 };
            match call.grow(text) {
                Ok(()) => response.map(|body| Body::new(Counted::new(body, call))),
                Err(_) if is_probe(&path) => uncounted(response, version),
                Err(full) => refused(full),
            }
        }
        Err(_) if is_probe(&path) => uncounted(next.run(Request::from_parts(parts, body)).await, version),
        Err(full) => refused(full),
    }
}

/// An answer that is not charged to the budget while it is unread. HTTP/1 has at most one per connection; over HTTP/2
/// it has headers only.
fn uncounted(mut response: Response, version: Version) -> Response {
    if version == Version::HTTP_2 {
        response.headers_mut().remove(CONTENT_LENGTH);
        *response.body_mut() = Body::empty();
    }
    response
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Router;
    use axum::body::to_bytes;
    use axum::middleware::from_fn_with_state;
    use axum::routing::get;
    use baton_node::intake::{Client, Intake};
    use std::net::Ipv4Addr;
    use std::sync::Arc;
    use tonic::codegen::Service as _;

    const LONG: &str = "/openapi.json";

    /// A client may leave hundreds of answers of an HTTP/2 connection unread.
    #[tokio::test]
    async fn what_nobody_counts_has_no_body_over_http_2() {
        let ask = async |bytes_max: u64, path: &str, version: Version| {
            let intake = Intake::new(bytes_max, bytes_max);
            let meter: Meter = Arc::new(move |_| intake.hold(Client::at(Ipv4Addr::LOCALHOST.into())));
            let mut routes = Router::new()
                .route("/healthz", get(async || "ok"))
                .route("/readyz", get(async || "x".repeat(64 << 10)))
                .route(LONG, get(async || "x".repeat(64 << 10)))
                .fallback(async || "nothing")
                .layer(from_fn_with_state(meter, count));
            let request = Request::get(path).version(version).body(Body::empty()).unwrap();
            let (parts, body) = routes.call(request).await.unwrap().into_parts();
            (parts.status.as_u16(), to_bytes(body, 1 << 20).await.unwrap().len())
        };
        let (room, none) = (1 << 20, 1);
        for version in [Version::HTTP_11, Version::HTTP_2] {
            assert_eq!(ask(room, "/healthz", version).await, (200, 2));
            assert_eq!(ask(room, LONG, version).await, (200, 64 << 10));
            assert_eq!(ask(room, "/nowhere", version).await, (200, 7));
            let is_http_2 = version == Version::HTTP_2;
            assert_eq!(ask(none, "/healthz", version).await, (200, if is_http_2 { 0 } else { 2 }));
            let not_for_its_text = 32 << 10;
            let length = if is_http_2 { 0 } else { 64 << 10 };
            assert_eq!(ask(not_for_its_text, "/readyz", version).await, (200, length));
            for (bytes_max, path) in [(none, "/nowhere"), (none, LONG), (not_for_its_text, LONG)] {
                let (status, length) = ask(bytes_max, path, version).await;
                assert_eq!((status, length == 0), (429, is_http_2), "{path}");
            }
        }
    }
}
