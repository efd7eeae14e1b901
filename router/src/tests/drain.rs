//! Workers that drain: no request is lost by it, however many drain.

use crate::testing::cluster::{Cluster, ask};
use crate::testing::fake::Fake;
use crate::testing::http;
use baton_proto::v1::inference_client::InferenceClient;
use baton_proto::v1::{FinishReason, GenerateResponse};
use baton_types::Role;
use std::pin::pin;
use std::time::Duration;
use tokio::time::timeout;
use tonic::transport::Endpoint;
use tonic::{Status, Streaming};

/// Waits until the router places requests on this many decode workers.
async fn ready(cluster: &Cluster, count: usize) {
    let line = format!("baton_router_ready_workers{{model=\"m\",pool=\"default\",role=\"decode\"}} {count}");
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

/// An answer that has ended but is entirely unread, and its tokens: its client receives little at a time.
async fn ended_unread(cluster: &Cluster, d: &Fake) -> (Streaming<GenerateResponse>, u32) {
    const TOKENS: u32 = 60;
    let endpoint = Endpoint::from_shared(format!("http://{}", cluster.router.grpc_addr)).unwrap();
    let channel = endpoint.initial_stream_window_size(64).connect().await.unwrap();
    let answer = InferenceClient::new(channel).generate(ask("x")).await.unwrap().into_inner();
    let call = d.decode().await;
    call.claimed().await;
    for _ in 1..TOKENS {
        assert!(call.token(b'a'.into()).await);
    }
    call.last(b'z'.into(), FinishReason::Length).await;
    let ended = async {
        while cluster.router.requests() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(Duration::from_secs(20), ended).await.expect("the request ends");
    (answer, TOKENS)
}

#[tokio::test]
async fn a_client_that_never_reads_holds_up_no_drain() {
    let mut cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let (answer, _) = ended_unread(&cluster, &d).await;
    timeout(Duration::from_secs(20), cluster.router.drain()).await.expect("bounded");
    drop(answer);
}

#[tokio::test]
async fn a_router_drains_no_sooner_than_its_answers_are_read() {
    let mut cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let (mut answer, tokens) = ended_unread(&cluster, &d).await;
    let mut drain = pin!(cluster.router.drain());
    let mut read = 0;
    // Message by message: before each one it checks whether the drain is over.
    while read < tokens {
        let message = tokio::select! {
            biased;
            () = &mut drain => panic!("drained, with {} tokens unread", tokens - read),
            message = answer.message() => message.unwrap().expect("the answer goes on"),
        };
        read += message.token_ids.len() as u32;
    }
    while let Some(message) = answer.message().await.unwrap() {
        read += message.token_ids.len() as u32;
    }
    assert_eq!(read, tokens);
    timeout(Duration::from_secs(20), drain).await.expect("nothing is left to read");
}
