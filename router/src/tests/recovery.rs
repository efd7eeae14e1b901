//! Workers that fail in every phase: the answer continues elsewhere, and no token is lost or repeated.

use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::{DecodeCall, Fake};
use crate::testing::http;
use crate::testing::text::tokens;
use crate::testing::two::{Two, either};
use baton_proto::convert::status::from_error;
use baton_proto::v1::{self, FinishReason, decode_request};
use baton_types::{ErrorKind, RequestError};
use tonic::Status;

/// Checks that an attempt continues after `text`, of which `prompt_len` tokens are prompt.
fn goes_on(call: &DecodeCall, before: &DecodeCall, text: &str, prompt_len: u32) {
    let (now, then) = (call.sequence(), before.sequence());
    assert_eq!((&now.tokens, now.prompt_len), (&tokens(text), prompt_len));
    assert_eq!((&now.sampling, now.sample_index), (&then.sampling, then.sample_index), "one seed, one stream");
    assert_ne!(now.request_id, then.request_id, "an attempt does not meet its predecessor");
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
    first.say("bEN").await;
    answer.reads("ab").await;
    first.fail(Status::unknown("h2 protocol error: the connection broke")).await;
    let second = other.decode().await;
    // Text held back for a stop string was also generated.
    goes_on(&second, &first, "helloabEN", 5);
    second.claimed().await;
    let (p, _) = two.prefill().await;
    assert_eq!(p.request.sequence.as_ref(), Some(second.sequence()));
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
    first.say("ab").await;
    answer.reads("ab").await;
    first.end();
    let second = other.decode().await;
    goes_on(&second, &first, "helloab", 5);
    assert!(matches!(second.request.prefill, Some(decode_request::Prefill::Local(_))));
    second.claimed().await;
    second.last(b'c'.into(), FinishReason::Length).await;
    let (rest, usage) = end(&mut answer).await;
    assert_eq!((rest.as_str(), usage.prompt_tokens, usage.completion_tokens), ("c", 5, 3));
}

/// Far longer than a scripted worker takes to adopt, on a busy machine too.
const ADOPTED_MS_MAX: u64 = 2_000;

/// As if another process took the KV in the decode worker's name, and acknowledged it.
#[tokio::test]
async fn kv_that_was_handed_over_is_adopted_in_time_or_sent_again() {
    let two = Two::start(|c| c.retry.adopted_ms_max = ADOPTED_MS_MAX).await;
    let mut answer = two.cluster.generate(remote("hello")).await;
    let (first, _) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'a'.into(), None).await;
    prefill.done().await;
    answer.reads("a").await;
    first.cancelled().await;
    let (second, _) = two.claim().await;
    goes_on(&second, &first, "helloa", 5);
    let (prefill, _) = two.prefill().await;
    prefill.token(b'b'.into(), None).await;
    prefill.done().await;
    second.adopted().await;
    // Longer than the bound: no failure is suspected any more.
    tokio::time::sleep(std::time::Duration::from_millis(ADOPTED_MS_MAX + 200)).await;
    second.last(b'c'.into(), FinishReason::Length).await;
    let (rest, usage) = end(&mut answer).await;
    assert_eq!((rest.as_str(), usage.prompt_tokens, usage.completion_tokens), ("bc", 5, 3));
}

#[tokio::test]
async fn a_prefill_worker_dies_before_its_token() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(remote("hello")).await;
    let (first, _) = two.claim().await;
    let (mut prefill, other) = two.prefill().await;
    // All KV was transferred and the decode worker is ahead; only the token was lost.
    first.adopted().await;
    first.say("b").await;
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
        answer.reads("a").await;
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
        answer.reads("a").await;
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
    answer.reads("a").await;
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
    let (mut first, _, other) = either(&two.d).await;
    first.fail(Status::unavailable("starting")).await;
    let mut second = other.decode().await;
    second.claimed().await;
    let (prefill, _) = two.prefill().await;
    prefill.token(b'1'.into(), None).await;
    second.adopted().await;
    second.say("2").await;
    answer.reads("12").await;
    second.fail(from_error(&RequestError::new(ErrorKind::Unavailable, "stopping"))).await;
    // Both decode workers failed it: the better one is called again.
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
