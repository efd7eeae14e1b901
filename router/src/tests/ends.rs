//! How answers end before the workers end them: stop strings, cancel, deadline, stalled readers, drain.

use crate::testing::cluster::{Cluster, ask};
use baton_proto::v1::{self, FinishReason};
use std::time::Duration;

#[tokio::test]
async fn stop_strings_match_across_tokens_and_cancel_both_workers() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(v1::GenerateRequest { stop: vec!["END".into()], ..ask("x") }).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    prefill.token(u32::from(b'a'), None).await;
    decode.adopted().await;
    for byte in b"bENcEND" {
        decode.token(u32::from(*byte)).await;
    }
    let mut shown = String::new();
    let mut tokens = 0;
    let end = loop {
        let message = answer.next().await;
        shown += &message.text;
        tokens += message.token_ids.len();
        assert!(!shown.contains("END"));
        if message.finish_reason != 0 {
            break message;
        }
    };
    assert_eq!((shown.as_str(), end.finish_reason()), ("abENc", FinishReason::Stop));
    assert_eq!((tokens, end.usage.unwrap().completion_tokens), (8, 8), "tokens of the stop string count");
    decode.cancelled().await;
    prefill.cancelled().await;
}

#[tokio::test]
async fn text_held_back_for_a_stop_string_comes_with_the_end() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(v1::GenerateRequest { stop: vec!["END".into()], ..ask("x") }).await;
    let decode = d.decode().await;
    decode.claimed().await;
    p.prefill().await.token(u32::from(b'E'), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await, ("E".into(), FinishReason::Length));
}

#[tokio::test]
async fn a_client_that_goes_cancels_both_workers() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    for tokens_before in [0, 1] {
        let mut answer = cluster.generate(ask("x")).await;
        let decode = d.decode().await;
        decode.claimed().await;
        let prefill = p.prefill().await;
        for _ in 0..tokens_before {
            prefill.token(u32::from(b'a'), None).await;
            answer.next().await;
        }
        drop(answer);
        decode.cancelled().await;
        prefill.cancelled().await;
    }
}

#[tokio::test]
async fn the_deadline_ends_a_request_wherever_it_is() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    // Over gRPC the client's own timer may end the call first; the workers are freed in any case.
    let answer = cluster.generate_within(ask("x"), Some(Duration::from_secs(3))).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    if let Ok(mut answer) = answer {
        assert_eq!(answer.error().await.code(), tonic::Code::DeadlineExceeded);
    }
    decode.cancelled().await;
    prefill.cancelled().await;
}

#[tokio::test]
async fn a_reader_that_stalls_is_cancelled() {
    let change = |c: &mut crate::RouterConfig| (c.limits.client_events_max, c.limits.client_stall_ms_max) = (1, 1_000);
    let mut cluster = Cluster::start(change).await;
    // A window that a few events fill.
    let to = tonic::transport::Endpoint::from_shared(format!("http://{}", cluster.router.grpc_addr)).unwrap();
    let narrow = to.initial_stream_window_size(1024).connect().await.unwrap();
    cluster.client = baton_proto::v1::inference_client::InferenceClient::new(narrow);
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    prefill.token(u32::from(b'a'), None).await;
    answer.next().await;
    decode.adopted().await;
    // The client holds the stream and reads nothing. Once the windows are full the worker pauses; then the request is
    // cancelled, before max_tokens.
    let mut taken = 0;
    while decode.token(u32::from(b'b')).await {
        taken += 1;
        assert!(taken < 8000, "the worker was never paused");
    }
    decode.cancelled().await;
    prefill.cancelled().await;
    // A client that reads on after all receives the reason for the end.
    let end = answer.error().await;
    assert_eq!((end.code(), end.message().contains("read nothing")), (tonic::Code::Cancelled, true), "{end}");
}

#[tokio::test]
async fn a_drain_refuses_new_requests_and_lets_others_end() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let Cluster { mut router, mut client } = cluster;
    let mut drain = std::pin::pin!(router.drain());
    assert!(futures::poll!(&mut drain).is_pending());
    let refused = client.generate(ask("x")).await.unwrap_err();
    assert_eq!(refused.code(), tonic::Code::Unavailable);
    p.prefill().await.token(u32::from(b'1'), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await.0, "1");
    tokio::time::timeout(Duration::from_secs(20), drain).await.expect("it is drained");
}

#[tokio::test]
async fn a_stop_ends_running_requests_with_an_error() {
    let cluster = Cluster::start(|_| ()).await;
    let (_p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let decode = d.decode().await;
    let ((), error) = tokio::join!(cluster.router.stop(), answer.error());
    assert_eq!(error.code(), tonic::Code::Unavailable);
    decode.cancelled().await;
}
