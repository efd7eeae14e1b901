//! Which budget a call is charged to.

use baton_node::calls::Meter;
use baton_node::intake::{Client, Intake};
use http::request::Parts;
use std::sync::Arc;

/// Services that gRPC defines: health, whose watches never end, and reflection.
const STANDARD: &str = "/grpc.";

/// Charges calls to `requests`, those of gRPC's standard services to `standard` if there is one.
pub(crate) fn meter(
    requests: Intake,
    standard: Option<Intake>,
    client: impl Fn(&Parts) -> Client + Send + Sync + 'static,
) -> Meter {
    Arc::new(move |call| {
        let standard = standard.as_ref().filter(|_| call.uri.path().starts_with(STANDARD));
        standard.unwrap_or(&requests).hold(client(call))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::RouterConfig;
    use baton_node::calls::enter;
    use http::{HeaderValue, Request};
    use std::net::Ipv4Addr;

    /// Without keys, callers of health are told from others only by their address, which a proxy hides.
    #[test]
    fn watches_of_health_leave_the_budget_of_requests_alone() {
        let config = RouterConfig::default();
        let requests = config.intake();
        let meter = meter(requests.clone(), config.standard_intake(), |_| Client::at(Ipv4Addr::LOCALHOST.into()));
        let call = |path: &str| {
            let (mut parts, ()) = Request::post(path).body(()).unwrap().into_parts();
            parts.headers.insert("x-long", HeaderValue::from_str(&"x".repeat(7 << 10)).unwrap());
            parts
        };
        let (health, generate) = (call("/grpc.health.v1.Health/Watch"), call("/baton.v1.Inference/Generate"));
        let open: Vec<_> = std::iter::from_fn(|| enter(&meter, &health).ok()).collect();
        assert!(open.len() > 100, "{} watches", open.len());
        assert_eq!(requests.used(), 0);
        assert!(enter(&meter, &generate).is_ok());
    }
}
