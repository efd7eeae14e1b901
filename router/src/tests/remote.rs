//! Requests over two workers, and failures of one of them.

use crate::recovery::ProbationLimits;
use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::{DecodeCall, Fake, PrefillCall};
use crate::testing::text::{byte_bundle, tokens};
use crate::testing::two::either;
use baton_proto::convert::status::from_error;
use baton_proto::v1::{self, FinishReason, decode_request};
use baton_types::{ErrorKind, RequestError, Role};
use std::sync::atomic::Ordering;
use std::time::Duration;
use tonic::Status;

/// A request whose prompt runs on `p`, with a claim on `d`.
async fn begin(cluster: &Cluster, p: &Fake, d: &Fake) -> (Reader, DecodeCall, PrefillCall) {
    let answer = cluster.generate(ask("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    (answer, decode, p.prefill().await)
}

#[tokio::test]
async fn the_first_token_does_not_wait_for_the_transfer() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(v1::GenerateRequest { request_id: "mine".into(), ..ask("Hello") }).await;
    let decode = d.decode().await;
    let source = match decode.request.prefill {
        Some(decode_request::Prefill::AwaitKv(v1::AwaitKv { source: Some(ref source) })) => source.clone(),
        ref other => panic!("{other:?}"),
    };
    assert_eq!(source, p.record.party.clone().into());
    assert!(decode.metadata.get("grpc-timeout").is_some(), "the deadline travels on");
    decode.claimed().await;
    let prefill = p.prefill().await;
    assert!(prefill.metadata.get("grpc-timeout").is_some());
    assert_eq!(prefill.request.sink, Some(d.record.party.clone().into()));
    assert_eq!(&prefill.request.sink_address[..], b"address");
    let sequence = prefill.request.sequence.as_ref().unwrap();
    assert_eq!((sequence.tokens.as_slice(), sequence.prompt_len), (&tokens("Hello")[..], 5));
    assert_eq!(decode.request.sequence.as_ref(), Some(sequence), "both workers get one sequence");
    prefill.started().await;
    prefill.token(u32::from(b'a'), None).await;
    let first = answer.next().await;
    assert_eq!((first.text.as_str(), first.token_ids.as_slice()), ("a", &[97][..]));
    assert_eq!((first.request_id.as_str(), first.model.as_str()), ("mine", "m"));
    assert_eq!(first.seed, sequence.sampling.as_ref().unwrap().seed);
    decode.adopted().await;
    prefill.done().await;
    decode.token(u32::from(b'b')).await;
    assert_eq!(answer.next().await.text, "b");
    decode.last(256, FinishReason::Stop).await;
    let (token, end) = (answer.next().await, answer.next().await);
    assert_eq!((token.text.as_str(), token.token_ids.as_slice()), ("", &[256][..]), "the end token has no text");
    assert_eq!(end.finish_reason(), FinishReason::Stop);
    let usage = end.usage.unwrap();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens), (5, 3, 0));
    let timings = end.timings.unwrap();
    assert_eq!((timings.prefill_us, timings.transfer_us, timings.exposed_us), (Some(900), Some(80), Some(8)));
    assert!(timings.queue_us >= Some(7) && timings.ttft_us.is_some());
}

#[tokio::test]
async fn a_decode_token_that_overtakes_the_first_one_waits() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let (mut answer, decode, prefill) = begin(&cluster, &p, &d).await;
    decode.adopted().await;
    decode.token(u32::from(b'2')).await;
    decode.last(u32::from(b'3'), FinishReason::Length).await;
    prefill.token(u32::from(b'1'), None).await;
    assert_eq!(answer.rest().await, ("123".into(), FinishReason::Length));
}

#[tokio::test]
async fn an_answer_may_end_with_the_first_token() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    p.prefill().await.token(u32::from(b'1'), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await, ("1".into(), FinishReason::Length));
    decode.cancelled().await;
}

#[tokio::test]
async fn a_last_token_counts_although_the_decode_worker_hears_first_that_nothing_comes() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(remote("x")).await;
    let mut decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    let given_up =
        RequestError::new(ErrorKind::Cancelled, "aborted by the peer: the sequence ended with its first token");
    decode.fail(from_error(&given_up)).await;
    // Long enough for the decode worker's event to arrive first; it comes on another stream.
    tokio::time::sleep(Duration::from_millis(50)).await;
    prefill.token(u32::from(b'1'), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await, ("1".into(), FinishReason::Length));
}

#[tokio::test]
async fn a_full_prefill_worker_leaves_the_prompt_to_the_decode_worker() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let waiting = d.decode().await;
    waiting.claimed().await;
    p.prefill().await.fail(Status::resource_exhausted("full")).await;
    waiting.cancelled().await;
    let local = d.decode().await;
    assert!(matches!(local.request.prefill, Some(decode_request::Prefill::Local(_))));
    let id = |c: &crate::testing::fake::DecodeCall| c.request.sequence.as_ref().unwrap().request_id.clone();
    assert_ne!(id(&waiting), id(&local), "an attempt does not meet its predecessor");
    local.claimed().await;
    local.last(u32::from(b'1'), FinishReason::Stop).await;
    // The stop token is not shown.
    assert_eq!(answer.rest().await, (String::new(), FinishReason::Stop));
}

#[tokio::test]
async fn a_prompt_whose_handoff_fails_is_prefilled_where_it_decodes() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    // Refused for lack of room, lost, abandoned by the prefill worker, damaged.
    for kind in [ErrorKind::Overloaded, ErrorKind::Unavailable, ErrorKind::Cancelled, ErrorKind::Internal] {
        let (mut answer, mut decode, prefill) = begin(&cluster, &p, &d).await;
        decode.fail(from_error(&RequestError::new(kind, "the handoff failed"))).await;
        prefill.cancelled().await;
        let local = d.decode().await;
        assert!(matches!(local.request.prefill, Some(decode_request::Prefill::Local(_))), "{kind:?}");
        local.claimed().await;
        local.last(u32::from(b'1'), FinishReason::Length).await;
        assert_eq!(answer.rest().await, ("1".into(), FinishReason::Length));
    }
}

/// Waits until the router's view of a worker shows this many free blocks.
async fn has_free(cluster: &Cluster, worker: &Fake, free: u64) {
    let heard = async {
        loop {
            let all = cluster.router.core().workers.all();
            let of_it = all.iter().find(|known| *known.party() == worker.record.party);
            let report = of_it.and_then(|known| known.load.last_report()).map(|heard| heard.report);
            if report.is_some_and(|report| report.blocks.is_some_and(|blocks| blocks.free == free)) {
                return;
            }
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), heard).await.expect("the router hears of it");
}

/// A decode worker reports that it has no room yet, and the router lets the request wait there; `otherwise` if it does
/// not.
async fn waits_on(cluster: &Cluster, call: &DecodeCall, otherwise: &str) {
    let stays = || cluster.router.core().stays.load(Ordering::Relaxed);
    let before = stays();
    call.waits().await;
    let decided = async {
        while stays() == before {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_secs(20), decided).await.is_ok(), "{otherwise}");
}

#[tokio::test]
async fn kv_without_room_waits_until_another_decode_worker_has_some() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, full) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let waiting = full.decode().await;
    waiting.claimed().await;
    let prefill = p.prefill().await;
    prefill.token(u32::from(b'1'), None).await;
    assert_eq!(answer.next().await.text, "1");
    // There is no other worker; then none with room.
    waiting.waits().await;
    let other = cluster.worker(Role::Decode, "other").await;
    let blocks = |free: u64| {
        move |load: &mut v1::LoadReport| {
            // Other sequences reference the rest: a worker without referenced blocks keeps no watermark.
            let counts = load.blocks.as_mut().unwrap();
            (counts.free, counts.referenced) = (free, counts.total.saturating_sub(free));
        }
    };
    // One block for the prompt, and three of the four of its watermark.
    other.report(blocks(4));
    has_free(&cluster, &other, 4).await;
    waits_on(&cluster, &waiting, "it goes to a worker that has no room either").await;
    // Room on the other worker counts once this router knows of it and the full worker reports again.
    other.report(blocks(1000));
    let moves = async {
        loop {
            waiting.waits().await;
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let goes_on = tokio::select! {
        call = other.decode() => call,
        () = moves => unreachable!("it never ends"),
    };
    waiting.cancelled().await;
    prefill.cancelled().await;
    let sequence = goes_on.request.sequence.as_ref().unwrap();
    assert_eq!((sequence.tokens.as_slice(), sequence.prompt_len), (&[tokens("x"), vec![49]].concat()[..], 1));
    goes_on.claimed().await;
    // It moves once, whichever worker has room now.
    full.report(blocks(1000));
    has_free(&cluster, &full, 1000).await;
    waits_on(&cluster, &goes_on, "it goes to and fro").await;
    p.prefill().await.token(u32::from(b'2'), None).await;
    goes_on.adopted().await;
    goes_on.last(u32::from(b'3'), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("23".into(), FinishReason::Length));
}

#[tokio::test]
async fn a_refused_claim_goes_to_another_decode_worker() {
    let cluster = Cluster::start(|_| ()).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut first, _, other) = either(&d).await;
    first.fail(Status::unavailable("starting")).await;
    let second = other.decode().await;
    second.claimed().await;
    second.last(u32::from(b'1'), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("1".into(), FinishReason::Length));
}

#[tokio::test]
async fn a_decode_worker_that_dies_is_an_error_never_an_end() {
    let cluster = Cluster::start(|c| c.retry.attempts_max = 1).await;
    let (p, d) = cluster.pair().await;
    for silent in [true, false] {
        let (mut answer, mut decode, prefill) = begin(&cluster, &p, &d).await;
        prefill.token(u32::from(b'1'), None).await;
        assert_eq!(answer.next().await.text, "1");
        if silent {
            decode.end();
        } else {
            decode.fail(Status::unavailable("broken")).await;
        }
        let error = answer.error().await;
        assert_eq!(error.code(), tonic::Code::Unavailable, "{error:?}");
        assert!(error.message().contains("decode worker d"), "{error:?}");
        prefill.cancelled().await;
    }
}

#[tokio::test]
async fn a_prefill_worker_that_dies_during_the_transfer_is_an_error() {
    let cluster = Cluster::start(|c| c.retry.attempts_max = 1).await;
    let (p, d) = cluster.pair().await;
    let (mut answer, decode, mut prefill) = begin(&cluster, &p, &d).await;
    prefill.token(u32::from(b'1'), None).await;
    assert_eq!(answer.next().await.text, "1");
    prefill.fail(Status::unavailable("gone")).await;
    let error = answer.error().await;
    assert!(error.message().contains("prefill worker p"), "{error:?}");
    decode.cancelled().await;
}

#[tokio::test]
async fn a_prefill_failure_after_the_adoption_does_no_harm() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let (mut answer, decode, mut prefill) = begin(&cluster, &p, &d).await;
    prefill.token(u32::from(b'1'), None).await;
    prefill.fail(Status::unavailable("gone")).await;
    decode.adopted().await;
    decode.last(u32::from(b'2'), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("12".into(), FinishReason::Length));
}

#[tokio::test]
async fn two_models_behind_one_router() {
    let cluster = Cluster::start(|_| ()).await;
    let m = cluster.worker(Role::Decode, "d-m").await;
    let n = Fake::start(cluster.router.cluster_addr, (Role::Decode, "d-n"), byte_bundle("N:"), |record| {
        record.card.id = "n".into();
        record.card.served_names = vec!["n".into(), "other".into()];
        record.card.fingerprint = baton_types::Digest([2; 32]);
    })
    .await;
    let chat = |model: &str| {
        let message = v1::ChatMessage { role: "user".into(), content: "hi".into(), name: String::new() };
        let segment = v1::Segment { kind: Some(v1::segment::Kind::Message(message)) };
        v1::GenerateRequest { model: model.into(), prompt: vec![segment], ..Default::default() }
    };
    let mut end = tokens("[user]hi");
    end.push(256);
    for (model, worker, start) in [("m", &m, ""), ("n", &n, "N:"), ("other", &n, "N:")] {
        let mut answer = cluster.generate(chat(model)).await;
        let decode = worker.decode().await;
        let expected: Vec<u32> = tokens(start).into_iter().chain(end.clone()).collect();
        assert_eq!(decode.request.sequence.as_ref().unwrap().tokens, expected, "each model has its own template");
        decode.claimed().await;
        decode.last(u32::from(b'!'), FinishReason::Length).await;
        assert_eq!(answer.rest().await, ("!".into(), FinishReason::Length));
    }
    let error = cluster.generate_within(chat("unknown"), None).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::NotFound);
    let error = cluster.generate_within(chat(""), None).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "two models: one must be named");
}

#[tokio::test]
async fn kv_without_room_waits_rather_than_move_to_a_worker_that_just_failed() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, full) = cluster.pair().await;
    let mut answer = cluster.generate(ask("x")).await;
    let waiting = full.decode().await;
    waiting.claimed().await;
    let prefill = p.prefill().await;
    prefill.token(u32::from(b'1'), None).await;
    assert_eq!(answer.next().await.text, "1");
    let other = cluster.worker(Role::Decode, "other").await;
    other.report(|load| load.blocks.as_mut().unwrap().free = 1000);
    has_free(&cluster, &other, 1000).await;
    let known = cluster.router.core().workers.all();
    let known = known.iter().find(|known| *known.party() == other.record.party).unwrap();
    let long = Duration::from_secs(600);
    known.probation.failed(std::time::Instant::now(), &ProbationLimits { min: long, max: long });
    waits_on(&cluster, &waiting, "it goes to a worker on probation").await;
    known.probation.served();
    waiting.waits().await;
    let goes_on = tokio::time::timeout(Duration::from_secs(20), other.decode()).await.expect("it moves");
    let sequence = goes_on.request.sequence.as_ref().unwrap();
    assert_eq!((sequence.tokens.as_slice(), sequence.prompt_len), (&[tokens("x"), vec![49]].concat()[..], 1));
}
