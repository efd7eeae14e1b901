//! A tenant whose requests fill the queues, and another one's requests.

use super::auth::KeysFile;
use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::{DecodeCall, Fake};
use baton_proto::v1::{self, FinishReason};
use baton_types::Role;
use std::time::Duration;
use tokio::time::timeout;
use tonic::{Code, Request, Status};

/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);

fn keys() -> KeysFile {
    KeysFile::new(&[("sk-flood", "flood"), ("sk-other", "other")])
}

/// Starts a request of the tenant with this key.
async fn generate(cluster: &Cluster, key: &str, request: v1::GenerateRequest) -> Result<Reader, Status> {
    let mut request = Request::new(request);
    request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    cluster.client.clone().generate(request).await.map(|answer| Reader(answer.into_inner()))
}

/// Sends requests of the flood until one is refused for lack of room; the claims of the others are accepted.
async fn flood_until_refused(cluster: &Cluster, d: &Fake, request: fn(&str) -> v1::GenerateRequest) {
    let refused = async {
        loop {
            // Until the report has arrived, the worker is called.
            let mut probe = generate(cluster, "sk-flood", request("x")).await.unwrap();
            tokio::select! {
                error = probe.error() => return error,
                call = d.decode() => call.claimed().await,
            }
        }
    };
    let error = tokio::time::timeout(LONG, refused).await.expect("the flood is refused");
    assert_eq!(error.code(), Code::ResourceExhausted, "{error:?}");
}

/// The other tenant's request is placed on the worker while the flood's are refused.
async fn other_is_served(cluster: &Cluster, d: &Fake) {
    let mut other = generate(cluster, "sk-other", ask("x")).await.unwrap();
    let call = tokio::select! {
        call = d.decode() => call,
        error = other.error() => panic!("{error:?}"),
    };
    call.claimed().await;
    call.last(b'1'.into(), FinishReason::Length).await;
    assert_eq!(other.rest().await, ("1".into(), FinishReason::Length));
    flood_until_refused(cluster, d, ask).await;
}

#[tokio::test]
async fn a_flood_in_the_workers_queues_keeps_no_other_tenant_out() {
    let keys = keys();
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let d = cluster.worker_with(Role::Decode, "d", |r| r.waiting_max = 4).await;
    cluster.router.ready().await;
    let mut flood: Vec<(Reader, DecodeCall)> = Vec::new();
    for _ in 0..4 {
        let answer = generate(&cluster, "sk-flood", ask("x")).await.unwrap();
        let call = d.decode().await;
        call.claimed().await;
        flood.push((answer, call));
    }
    // No place in the queue.
    d.report(|load| load.waiting = 4);
    flood_until_refused(&cluster, &d, ask).await;
    other_is_served(&cluster, &d).await;
    // A wait that is longer than the deadline.
    d.report(|load| (load.waiting, load.waiting_tokens, load.prefill_tokens_per_s) = (3, 1 << 40, 1000.0));
    flood_until_refused(&cluster, &d, ask).await;
    other_is_served(&cluster, &d).await;
    // Of the prefill workers too.
    let p = cluster.worker_with(Role::Prefill, "p", |r| r.waiting_max = 4).await;
    d.report(|load| (load.waiting, load.waiting_tokens) = (0, 0));
    p.report(|load| load.waiting = 4);
    flood_until_refused(&cluster, &d, remote).await;
    let _other = generate(&cluster, "sk-other", remote("other")).await.unwrap();
    let call = d.decode().await;
    call.claimed().await;
    // Calls of the flood may have come before the report.
    let others = async { while p.prefill().await.request.sequence.unwrap().tokens.len() != 5 {} };
    timeout(Duration::from_secs(30), others).await.expect("the other's prompt is sent to the prefill worker");
}

#[tokio::test]
async fn a_tenant_fills_no_more_than_its_share_of_a_full_queue() {
    let keys = keys();
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let d = cluster.worker_with(Role::Decode, "d", |r| r.waiting_max = 4).await;
    cluster.router.ready().await;
    let called = async |key: &str| {
        let answer = generate(&cluster, key, ask("x")).await.unwrap();
        let call = d.decode().await;
        call.claimed().await;
        (answer, call)
    };
    let _flood =
        [called("sk-flood").await, called("sk-flood").await, called("sk-flood").await, called("sk-flood").await];
    d.report(|load| load.waiting = 4);
    flood_until_refused(&cluster, &d, ask).await;
    let (mut answer, call) = called("sk-other").await;
    let _second = called("sk-other").await;
    let mut third = generate(&cluster, "sk-other", ask("x")).await.unwrap();
    assert_eq!(third.error().await.code(), Code::ResourceExhausted, "its share is two of four");
    call.token(b'1'.into()).await;
    assert_eq!(answer.next().await.text, "1");
    let _third = called("sk-other").await;
}

#[tokio::test]
async fn a_flood_in_the_routers_queue_keeps_no_other_tenant_out() {
    let keys = keys();
    let set = |c: &mut crate::RouterConfig| (c.limits.running_max, c.limits.queued_max) = (1, 2);
    let cluster = Cluster::with_keys(keys.path(), set).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let mut flood = generate(&cluster, "sk-flood", ask("x")).await.unwrap();
    let first = d.decode().await;
    let _queued = [
        generate(&cluster, "sk-flood", ask("x")).await.unwrap(),
        generate(&cluster, "sk-flood", ask("x")).await.unwrap(),
    ];
    let refused = generate(&cluster, "sk-flood", ask("x")).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted);
    let mut other = generate(&cluster, "sk-other", ask("other")).await.unwrap();
    first.claimed().await;
    first.last(b'1'.into(), FinishReason::Length).await;
    assert_eq!(flood.rest().await.0, "1");
    let next = d.decode().await;
    assert_eq!(next.request.sequence.as_ref().unwrap().tokens.len(), 5, "the other's turn comes before the flood's");
    next.claimed().await;
    next.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(other.rest().await.0, "2");
}
