//! Workers that drain: no request is lost for it, however many do.

use crate::testing::cluster::{Cluster, ask};
use crate::testing::http;
use baton_proto::v1::FinishReason;
use baton_types::Role;
use std::time::Duration;
use tonic::Status;

/// Waits until so many decode workers are placed on.
async fn ready(cluster: &Cluster, count: usize) {
    let line = format!("baton_router_ready_workers{{role=\"decode\"}} {count}");
    let wait = async {
        while !http::send(cluster.router.http_addr, "GET /metrics", "", "").await.text().await.contains(&line) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("the router hears of it");
}

#[tokio::test]
async fn a_request_goes_on_through_more_drains_than_it_has_attempts() {
    let cluster = Cluster::start(|c| (c.retry.attempts_max, c.retry.burst_max, c.retry.per_s) = (1, 0, 0.0)).await;
    let mut d = cluster.worker(Role::Decode, "d0").await;
    let mut answer = cluster.generate(ask("x")).await;
    for n in 1..4u8 {
        let mut call = d.decode().await;
        call.claimed().await;
        assert!(call.token((b'0' + n).into()).await);
        let next = cluster.worker(Role::Decode, &format!("d{n}")).await;
        ready(&cluster, 2).await;
        d.report(|load| load.draining = true);
        ready(&cluster, 1).await;
        call.fail(Status::unavailable("it drained before the request was finished")).await;
        d = next;
    }
    let call = d.decode().await;
    call.claimed().await;
    call.last(b'4'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("1234".into(), FinishReason::Length));
}
