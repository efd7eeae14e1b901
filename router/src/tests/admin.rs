//! Operator calls to a router.

use crate::testing::cluster::Cluster;
use crate::testing::http;
use baton_proto::v1::{self, admin_client::AdminClient};
use baton_types::Role;
use std::time::Duration;
use tonic::Code;

#[tokio::test]
async fn a_drain_is_passed_on_to_the_worker_of_that_name() {
    let cluster = Cluster::start(|_| ()).await;
    let mut admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
    let mut drain = async |worker: &str| {
        let request = v1::DrainWorkerRequest { worker: worker.into(), timeout_ms: Some(1_000) };
        admin.drain(request).await.map(tonic::Response::into_inner)
    };
    let nobody = drain("d").await.unwrap_err();
    assert_eq!(
        (nobody.code(), nobody.message()),
        (Code::NotFound, "no worker \"d\": none is registered at this router")
    );
    let d = cluster.worker(Role::Decode, "d").await;
    let _p = cluster.worker(Role::Prefill, "p").await;
    let other = drain("q").await.unwrap_err();
    assert_eq!(other.code(), Code::NotFound);
    assert!(other.message().ends_with("there are d, p"), "{other:?}");

    let mut events = drain("d").await.unwrap();
    assert_eq!(events.message().await.unwrap().unwrap().running, 1);
    let drained = events.message().await.unwrap().unwrap().drained.unwrap();
    assert!(drained.deregistered && drained.finished == 1, "{drained:?}");
    assert!(events.message().await.unwrap().is_none());

    d.report(|load| load.draining = true);
    let again = drain(&d.record.party.to_string()).await.unwrap_err();
    assert_eq!((again.code(), again.message()), (Code::FailedPrecondition, "it drains already"));
}

#[tokio::test]
async fn the_view_shows_in_metrics() {
    let cluster = Cluster::start(|_| ()).await;
    let shows = async |lines: &[&str]| {
        let mut metrics = String::new();
        for _ in 0..500 {
            metrics = http::send(cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
            if lines.iter().all(|line| metrics.lines().any(|l| l == *line)) {
                return metrics;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("not all of {lines:?} come to be in {metrics}");
    };
    shows(&[
        r#"baton_router_ready_workers{model="",pool="",role="decode"} 0"#,
        r#"baton_router_ready_workers{model="",pool="",role="prefill"} 0"#,
    ])
    .await;
    let d = cluster.worker(Role::Decode, "d").await;
    let metrics = shows(&[
        "baton_router_registered_workers 1",
        "baton_router_doubted_workers 0",
        "baton_router_unconfirmed_workers 0",
        r#"baton_router_ready_workers{model="m",pool="default",role="decode"} 1"#,
        r#"baton_router_ready_workers{model="m",pool="",role="prefill"} 0"#,
    ])
    .await;
    assert!(!metrics.contains(r#"ready_workers{model="""#), "a model is known: {metrics}");
    drop(d);
    shows(&[
        "baton_router_registered_workers 0",
        r#"baton_router_ready_workers{model="m",pool="default",role="decode"} 0"#,
        r#"baton_router_ready_workers{model="m",pool="",role="prefill"} 0"#,
    ])
    .await;
}

#[tokio::test]
async fn metrics_are_read_where_health_has_a_port_of_its_own() {
    let cluster = Cluster::start(|c| c.admin.listen = Some(([127, 0, 0, 1], 0).into())).await;
    let (api, admin) = (cluster.router.http_addr, cluster.router.admin_addr.unwrap());
    let status = async |to, path: &str| http::send(to, &format!("GET {path}"), "", "").await.status;
    assert_eq!((status(admin, "/metrics").await, status(api, "/metrics").await), (200, 404));
    for path in ["/healthz", "/health", "/startupz"] {
        assert_eq!((status(admin, path).await, status(api, path).await), (200, 200), "{path}");
    }
    let without = Cluster::start(|_| ()).await;
    assert_eq!((without.router.admin_addr, status(without.router.http_addr, "/metrics").await), (None, 200));
}

/// Any client may watch, and each report goes to all.
#[tokio::test]
async fn health_over_grpc_is_told_when_it_changes() {
    use tonic_health::pb::{HealthCheckRequest, health_check_response::ServingStatus, health_client::HealthClient};
    let cluster = Cluster::start(|_| ()).await;
    let to = tonic::transport::Endpoint::new(format!("http://{}", cluster.router.grpc_addr)).unwrap();
    let mut health = HealthClient::new(to.connect().await.unwrap());
    let mut watch = health.watch(HealthCheckRequest::default()).await.unwrap().into_inner();
    let next = async |watch: &mut tonic::Streaming<_>| {
        watch.message().await.unwrap().map(|told: tonic_health::pb::HealthCheckResponse| told.status())
    };
    assert_eq!(next(&mut watch).await, Some(ServingStatus::NotServing));
    // It checks ten times a second.
    assert!(tokio::time::timeout(Duration::from_secs(1), next(&mut watch)).await.is_err(), "it is told the same again");
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    assert_eq!(next(&mut watch).await, Some(ServingStatus::Serving));
}
