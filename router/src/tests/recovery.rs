//! Workers that fail in every phase: the answer goes on elsewhere, without a token lost or doubled.

use crate::testing::cluster::{Cluster, Reader, ask};
use crate::testing::fake::{DecodeCall, Fake, PrefillCall};
use crate::testing::http;
use crate::testing::text::tokens;
use baton_proto::convert::status::from_error;
use baton_proto::v1::{self, FinishReason, PrefillPolicy, decode_request};
use baton_types::{ErrorKind, RequestError, Role};
use std::time::Duration;
use tonic::{Code, Status};

/// Two workers of each role.
struct Two {
    cluster: Cluster,
    p: [Fake; 2],
    d: [Fake; 2],
}

async fn either(d: &[Fake; 2]) -> (DecodeCall, &Fake) {
    tokio::select! {
        call = d[0].decode() => (call, &d[1]),
        call = d[1].decode() => (call, &d[0]),
    }
}

impl Two {
    async fn start(change: impl FnOnce(&mut crate::RouterConfig)) -> Self {
        let cluster = Cluster::start(change).await;
        let p = [cluster.worker(Role::Prefill, "p0").await, cluster.worker(Role::Prefill, "p1").await];
        let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
        Self { cluster, p, d }
    }

    /// The next claim, taken, and the other decode worker.
    async fn claim(&self) -> (DecodeCall, &Fake) {
        let (call, other) = either(&self.d).await;
        call.claimed().await;
        (call, other)
    }

    /// The next prefill, and the other prefill worker.
    async fn prefill(&self) -> (PrefillCall, &Fake) {
        tokio::select! {
            call = self.p[0].prefill() => (call, &self.p[1]),
            call = self.p[1].prefill() => (call, &self.p[0]),
        }
    }
}

fn remote(text: &str) -> v1::GenerateRequest {
    v1::GenerateRequest { prefill_policy: PrefillPolicy::Remote.into(), ..ask(text) }
}

fn sequence(call: &DecodeCall) -> &v1::Sequence {
    call.request.sequence.as_ref().unwrap()
}

/// Checks that an attempt goes on behind `text`, of which `prompt_len` tokens are prompt.
fn goes_on(call: &DecodeCall, before: &DecodeCall, text: &str, prompt_len: u32) {
    let (now, then) = (sequence(call), sequence(before));
    assert_eq!((&now.tokens, now.prompt_len), (&tokens(text), prompt_len));
    assert_eq!((&now.sampling, now.sample_index), (&then.sampling, then.sample_index), "one seed, one stream");
    assert_ne!(now.request_id, then.request_id, "an attempt does not meet its predecessor");
}

async fn say(call: &DecodeCall, text: &str) {
    for byte in text.bytes() {
        call.token(byte.into()).await;
    }
}

/// Text of the next messages, until it is `text`.
async fn reads(answer: &mut Reader, text: &str) {
    let mut got = String::new();
    while got.len() < text.len() {
        got += &answer.next().await.text;
    }
    assert_eq!(got, text);
}

/// Text and usage of the rest.
async fn end(answer: &mut Reader) -> (String, v1::Usage) {
    let mut text = String::new();
    loop {
        let message = answer.next().await;
        text += &message.text;
        if let Some(usage) = message.usage {
            return (text, usage);
        }
    }
}

#[tokio::test]
async fn a_decode_worker_dies_in_mid_answer() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(v1::GenerateRequest { stop: vec!["END".into()], ..remote("hello") }).await;
    let (mut first, other) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'a'.into(), None).await;
    first.adopted().await;
    prefill.done().await;
    say(&first, "bEN").await;
    reads(&mut answer, "ab").await;
    first.fail(Status::unknown("h2 protocol error: the connection broke")).await;
    let second = other.decode().await;
    // What is held back for a stop string was generated too.
    goes_on(&second, &first, "helloabEN", 5);
    second.claimed().await;
    let (p, _) = two.prefill().await;
    assert_eq!(p.request.sequence.as_ref(), Some(sequence(&second)));
    p.token(b'D'.into(), None).await;
    let (rest, usage) = end(&mut answer).await;
    assert_eq!((rest.as_str(), usage.prompt_tokens, usage.completion_tokens), ("", 5, 5));
    second.cancelled().await;
}

#[tokio::test]
async fn a_decode_worker_dies_that_prefills_itself() {
    let two = Two::start(|c| c.placement.prefill_policy = crate::PrefillPolicy::Local).await;
    let mut answer = two.cluster.generate(ask("hello")).await;
    let (mut first, other) = two.claim().await;
    say(&first, "ab").await;
    reads(&mut answer, "ab").await;
    first.end();
    let second = other.decode().await;
    goes_on(&second, &first, "helloab", 5);
    assert!(matches!(second.request.prefill, Some(decode_request::Prefill::Local(_))));
    second.claimed().await;
    second.last(b'c'.into(), FinishReason::Length).await;
    let (rest, usage) = end(&mut answer).await;
    assert_eq!((rest.as_str(), usage.prompt_tokens, usage.completion_tokens), ("c", 5, 3));
}

#[tokio::test]
async fn a_prefill_worker_dies_before_its_token() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(remote("hello")).await;
    let (first, _) = two.claim().await;
    let (mut prefill, other) = two.prefill().await;
    // All KV came over and the decode worker is ahead; only the token was lost.
    first.adopted().await;
    say(&first, "b").await;
    prefill.end();
    first.cancelled().await;
    let (second, _) = two.claim().await;
    goes_on(&second, &first, "hello", 5);
    let prefill = other.prefill().await;
    prefill.token(b'a'.into(), None).await;
    second.adopted().await;
    second.last(b'b'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("ab".into(), FinishReason::Length));
}

#[tokio::test]
async fn a_prefill_worker_dies_after_its_token() {
    for silent in [true, false] {
        let two = Two::start(|_| ()).await;
        let mut answer = two.cluster.generate(remote("hello")).await;
        let (first, _) = two.claim().await;
        let (mut prefill, other) = two.prefill().await;
        prefill.token(b'a'.into(), None).await;
        reads(&mut answer, "a").await;
        if silent {
            prefill.end();
        } else {
            prefill.fail(Status::unavailable("gone")).await;
        }
        first.cancelled().await;
        let (second, _) = two.claim().await;
        goes_on(&second, &first, "helloa", 5);
        let prefill = other.prefill().await;
        prefill.token(b'b'.into(), None).await;
        second.adopted().await;
        second.last(b'c'.into(), FinishReason::Length).await;
        let (rest, usage) = end(&mut answer).await;
        assert_eq!((rest.as_str(), usage.prompt_tokens, usage.completion_tokens), ("bc", 5, 3));
    }
}

#[tokio::test]
async fn a_handoff_fails_after_the_first_token() {
    let two = Two::start(|_| ()).await;
    for kind in [ErrorKind::Overloaded, ErrorKind::Unavailable, ErrorKind::Cancelled, ErrorKind::Internal] {
        let mut answer = two.cluster.generate(remote("hello")).await;
        let (mut first, other) = two.claim().await;
        let (prefill, other_prefill) = two.prefill().await;
        prefill.token(b'a'.into(), None).await;
        reads(&mut answer, "a").await;
        first.fail(from_error(&RequestError::new(kind, "the handoff failed"))).await;
        prefill.cancelled().await;
        let second = other.decode().await;
        goes_on(&second, &first, "helloa", 5);
        second.claimed().await;
        let prefill = other_prefill.prefill().await;
        prefill.token(b'b'.into(), None).await;
        second.adopted().await;
        second.last(b'c'.into(), FinishReason::Length).await;
        assert_eq!(answer.rest().await, ("bc".into(), FinishReason::Length), "{kind:?}");
    }
}

#[tokio::test]
async fn without_another_prefill_worker_the_decode_worker_prefills() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut answer = cluster.generate(ask("hello")).await;
    let first = d.decode().await;
    first.claimed().await;
    let mut prefill = p.prefill().await;
    prefill.token(b'a'.into(), None).await;
    reads(&mut answer, "a").await;
    prefill.fail(Status::unavailable("gone")).await;
    let second = d.decode().await;
    goes_on(&second, &first, "helloa", 5);
    assert!(matches!(second.request.prefill, Some(decode_request::Prefill::Local(_))));
    second.claimed().await;
    second.last(b'b'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await, ("b".into(), FinishReason::Length));
}

#[tokio::test]
async fn every_pair_is_tried_before_one_is_tried_again() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let index = |workers: &[Fake; 2], other: &Fake| usize::from(std::ptr::eq(other, &workers[0]));
    let mut tried = Vec::new();
    for attempt in 0..4 {
        let (decode, other) = two.claim().await;
        let (mut prefill, other_prefill) = two.prefill().await;
        tried.push((index(&two.p, other_prefill), index(&two.d, other)));
        if attempt < 3 {
            prefill.fail(from_error(&RequestError::new(ErrorKind::Unavailable, "no link between the two"))).await;
            decode.cancelled().await;
            continue;
        }
        prefill.token(b'1'.into(), None).await;
        decode.adopted().await;
        decode.last(b'2'.into(), FinishReason::Length).await;
        assert_eq!(answer.rest().await, ("12".into(), FinishReason::Length));
    }
    assert_ne!(tried[0].0, tried[1].0, "{tried:?}: the prefill worker was the first to be suspected");
    tried.sort_unstable();
    assert_eq!(tried, [(0, 0), (0, 1), (1, 0), (1, 1)]);
}

#[tokio::test]
async fn workers_may_fail_one_after_the_other() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (mut first, other) = either(&two.d).await;
    first.fail(Status::unavailable("starting")).await;
    let mut second = other.decode().await;
    second.claimed().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'1'.into(), None).await;
    second.adopted().await;
    say(&second, "2").await;
    reads(&mut answer, "12").await;
    second.fail(from_error(&RequestError::new(ErrorKind::Unavailable, "stopping"))).await;
    // Both decode workers failed it: the better one of them is asked again.
    let (third, _) = two.claim().await;
    goes_on(&third, &first, "x12", 1);
    let (prefill, _) = two.prefill().await;
    prefill.token(b'3'.into(), Some(FinishReason::Length)).await;
    assert_eq!(answer.rest().await, ("3".into(), FinishReason::Length));
    let metrics = http::send(two.cluster.router.http_addr, "GET /metrics", "", "").await.text().await;
    let value = |name: &str, reason: &str| {
        let mut lines = metrics.lines().filter(|l| l.starts_with(name) && l.contains(reason));
        lines.next().and_then(|l| l.rsplit(' ').next()?.parse::<u64>().ok())
    };
    let retries = |phase: &str| value("baton_router_retries_total", &format!("reason=\"{phase}\""));
    assert_eq!((retries("claim"), retries("decode"), retries("prefill")), (Some(1), Some(1), None), "{metrics}");
    assert_eq!(value("baton_router_given_up_total", ""), None, "it ended well");
    assert_eq!(value("baton_router_replayed_tokens_total", "pool=\"default\""), Some(2));
}

#[tokio::test]
async fn what_cannot_succeed_is_not_tried_again() {
    let two = Two::start(|_| ()).await;
    for kind in [ErrorKind::InvalidRequest, ErrorKind::ContextLengthExceeded, ErrorKind::Unsupported] {
        let mut answer = two.cluster.generate(remote("x")).await;
        let (mut first, _) = either(&two.d).await;
        first.fail(from_error(&RequestError::new(kind, "never"))).await;
        assert_eq!(answer.error().await.code(), Code::from_i32(kind.grpc_code()));
    }
    // Nor is a request that breaks what serves it carried through the whole cluster.
    let mut answer = two.cluster.generate(remote("x")).await;
    for _ in 0..2 {
        let (mut call, _) = either(&two.d).await;
        call.fail(from_error(&RequestError::new(ErrorKind::Internal, "the engine broke"))).await;
    }
    assert_eq!(answer.error().await.code(), Code::Internal);
}

#[tokio::test]
async fn attempts_and_the_budget_of_all_requests_are_bounded() {
    // (attempts of one request, retries of all, attempts seen)
    for (attempts_max, burst_max, attempts) in [(3, 100, 3), (5, 1, 2), (5, 0, 1)] {
        let bounds = |c: &mut crate::RouterConfig| {
            (c.retry.attempts_max, c.retry.burst_max, c.retry.per_s) = (attempts_max, burst_max, 0.0);
        };
        let two = Two::start(bounds).await;
        let mut answer = two.cluster.generate(remote("x")).await;
        for _ in 0..attempts {
            let (mut call, _) = two.claim().await;
            call.fail(Status::unavailable("broken")).await;
        }
        let error = answer.error().await;
        assert_eq!(error.code(), Code::Unavailable);
        assert!(error.message().contains("broken"), "{error:?}");
    }
}

/// A worker of another class than those of [`Cluster::worker`].
async fn of_another_class(cluster: &Cluster, name: &str) -> Fake {
    cluster.worker_with(Role::Decode, name, |r| r.class.kernel_revision += 1).await
}

/// The classes that the end of an answer names.
async fn crossed(answer: &mut Reader) -> Vec<String> {
    loop {
        let message = answer.next().await;
        if message.finish_reason() != FinishReason::Unspecified {
            return message.crossed_classes;
        }
    }
}

#[tokio::test]
async fn an_answer_stays_with_the_numerics_class_that_began_it() {
    let cluster = Cluster::start(|_| ()).await;
    let d = [cluster.worker(Role::Decode, "d0").await, cluster.worker(Role::Decode, "d1").await];
    let mut answer = cluster.generate(ask("x")).await;
    let (mut call, other) = either(&d).await;
    let _of_another = of_another_class(&cluster, "other").await;
    call.claimed().await;
    say(&call, "1").await;
    reads(&mut answer, "1").await;
    call.fail(Status::unavailable("broken")).await;
    let call = other.decode().await;
    call.claimed().await;
    call.last(b'2'.into(), FinishReason::Length).await;
    assert!(crossed(&mut answer).await.is_empty(), "one of its own class is asked");
}

#[tokio::test]
async fn an_answer_whose_class_is_gone_goes_on_and_says_so() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let mut answer = cluster.generate(ask("x")).await;
    let mut call = d.decode().await;
    let other = of_another_class(&cluster, "other").await;
    call.claimed().await;
    say(&call, "1").await;
    reads(&mut answer, "1").await;
    d.report(|load| load.draining = true);
    // Until that report is there, the same worker may be asked again.
    let call = loop {
        call.fail(Status::unavailable("broken")).await;
        tokio::select! {
            again = d.decode() => call = again,
            elsewhere = other.decode() => break elsewhere,
        }
    };
    call.claimed().await;
    assert_eq!(sequence(&call).tokens, [tokens("x"), tokens("1")].concat());
    call.last(b'2'.into(), FinishReason::Length).await;
    assert_eq!(crossed(&mut answer).await, ["test/w-f32/kv-f32/r1", "test/w-f32/kv-f32/r2"]);
    // An answer that begins there is not marked.
    let mut answer = cluster.generate(ask("x")).await;
    let call = other.decode().await;
    call.claimed().await;
    call.last(b'1'.into(), FinishReason::Length).await;
    assert!(crossed(&mut answer).await.is_empty());
}

#[tokio::test]
async fn a_worker_that_failed_is_avoided_for_a_while() {
    let two = Two::start(|c| (c.retry.probation_ms_min, c.retry.probation_ms_max) = (60_000, 60_000)).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (mut first, other) = either(&two.d).await;
    first.fail(Status::unavailable("broken")).await;
    for n in 0..8 {
        if n > 0 {
            answer = two.cluster.generate(remote("x")).await;
        }
        let call = other.decode().await;
        call.claimed().await;
        let (prefill, _) = two.prefill().await;
        prefill.token(b'1'.into(), Some(FinishReason::Length)).await;
        assert_eq!(answer.rest().await.0, "1");
    }
}

#[tokio::test]
async fn a_client_that_goes_while_the_router_waits_ends_the_request() {
    let two = Two::start(|c| (c.retry.backoff_ms_min, c.retry.backoff_ms_max) = (60_000, 60_000)).await;
    let mut answer = two.cluster.generate(remote("x")).await;
    let (mut first, _) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'1'.into(), None).await;
    reads(&mut answer, "1").await;
    first.fail(Status::unavailable("broken")).await;
    prefill.cancelled().await;
    drop(answer);
    let gone = async {
        while two.cluster.router.requests() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), gone).await.expect("the request ends");
}
