//! Cache options that workers receive, and cached counts that clients receive.

use super::auth::KeysFile;
use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::{DecodeCall, Fake, first, token};
use crate::testing::http::{self, post, send};
use crate::testing::two::Two;
use crate::{PrefillPolicy, Price, RouterConfig};
use baton_proto::v1::{self, FinishReason};
use baton_types::Role;
use serde_json::{Value, json};
use std::time::Duration;
use tonic::Status;

/// The last message.
async fn end(answer: &mut Reader) -> v1::GenerateResponse {
    loop {
        let message = answer.next().await;
        if message.usage.is_some() {
            return message;
        }
    }
}

/// Usage of the rest.
async fn usage(answer: &mut Reader) -> v1::Usage {
    end(answer).await.usage.unwrap()
}

fn told(call: &DecodeCall) -> Option<v1::CacheUse> {
    call.sequence().cache.clone()
}

/// Answers the next request of `d` with two tokens; `of_prompt` is how many prompt tokens were cached and written.
async fn answers(d: &Fake, of_prompt: (u32, u32)) -> Option<v1::CacheUse> {
    let call = d.decode().await;
    call.claimed().await;
    call.send_token(first(b'O'.into(), of_prompt, None)).await;
    call.last(b'K'.into(), FinishReason::Length).await;
    told(&call)
}

#[tokio::test]
async fn tenants_have_salts_of_their_own_whatever_they_ask_for() {
    let keys = KeysFile::new(&[("sk-alice", "alice"), ("sk-alice-2", "alice"), ("sk-bob", "bob")]);
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let (to, d) = (cluster.router.http_addr, &d);
    let salt = async |key: &str, more: Value| {
        let mut body = json!({"prompt": "the same"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let (header, body) = (format!("authorization: Bearer {key}\r\n"), body.to_string());
        let request = send(to, "POST /v1/completions", &header, &body);
        let (answer, told) = tokio::join!(request, answers(d, (0, 0)));
        assert_eq!(answer.status, 200);
        told.unwrap().salt
    };
    let (plain, narrow) = (json!({}), json!({"cache_salt": "s"}));
    let alice = salt("sk-alice", plain.clone()).await;
    assert_eq!(salt("sk-alice-2", plain.clone()).await, alice, "another key of the same tenant");
    // The body does not decide who calls.
    assert_eq!(salt("sk-alice", json!({"user": "bob", "prompt_cache_key": "k"})).await, alice);
    let narrowed = salt("sk-alice", narrow.clone()).await;
    assert_ne!(narrowed, alice);
    for more in [plain, narrow, json!({"cache_salt": "alice"})] {
        let bob = salt("sk-bob", more.clone()).await;
        assert!(bob != alice && bob != narrowed, "{more}");
    }
}

#[tokio::test]
async fn workers_are_told_whose_a_request_is_and_what_that_one_is_due() {
    let keys = KeysFile::new(&[("sk-alice", "alice weight=3"), ("sk-alice-2", "alice"), ("sk-bob", "bob")]);
    let path = Some(keys.path());
    let cluster = Cluster::start(|c| c.auth.keys_file = path).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let mut shares = Vec::new();
    for key in ["sk-alice", "sk-alice-2", "sk-bob"] {
        let (header, body) = (format!("authorization: Bearer {key}\r\n"), json!({"prompt": "x"}).to_string());
        let request = send(cluster.router.http_addr, "POST /v1/completions", &header, &body);
        let told = async {
            let call = d.decode().await;
            call.claimed().await;
            call.last(b'K'.into(), FinishReason::Length).await;
            call.sequence().share.unwrap()
        };
        let (answer, share) = tokio::join!(request, told);
        assert_eq!(answer.status, 200);
        shares.push(share);
    }
    assert_eq!((shares[0], shares[0].weight, shares[2].weight), (shares[1], 3, 1));
    assert_ne!(shares[0].tenant, shares[2].tenant);
}

#[tokio::test]
async fn both_workers_are_told_what_the_request_asks_for() {
    let cluster = Cluster::start(|c| c.cache.pin_ms_max = 1_000).await;
    let (p, d) = cluster.pair().await;
    let options = |ttl_ms, pin_ms, off| Some(v1::CacheOptions { ttl_ms, pin_ms, off, cold: true });
    let cases = [
        (None, Some((None, None))),
        (options(Some(5), Some(7), false), Some((Some(5), Some(7)))),
        (options(None, None, true), None),
    ];
    for (cache, expected) in cases {
        let answer = cluster.generate(v1::GenerateRequest { cache, ..remote("x") }).await;
        let decode = d.decode().await;
        decode.claimed().await;
        let prefill = p.prefill().await;
        assert_eq!(prefill.request.sequence.as_ref().unwrap().cache, told(&decode));
        assert_eq!(prefill.request.sequence.as_ref().unwrap().share, decode.sequence().share);
        assert_eq!(told(&decode).map(|cache| (cache.ttl_ms, cache.pin_ms)), expected);
        assert!(told(&decode).is_none_or(|cache| cache.cold == expected.is_some_and(|times| times.0.is_some())));
        drop(answer);
        decode.cancelled().await;
    }
}

#[tokio::test]
async fn what_is_out_of_bounds_is_refused_by_name() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let cases = [
        (json!({"cache": {"ttl_ms": 3_600_001}}), "cache.ttl_ms", "at most 3600000"),
        (json!({"cache": {"pin_ms": 1}}), "cache.pin_ms", "at most 0"),
        (json!({"cache": {"ttl": 1}}), "cache", "unknown field `ttl`"),
        (json!({"cache": true}), "cache", "cache: "),
        (json!({"cache_salt": ""}), "cache_salt", "1 to 256 bytes"),
        (json!({"cache_salt": 5}), "cache_salt", "cache_salt: "),
    ];
    for (more, param, says) in cases {
        let mut body = json!({"prompt": "x"});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let answer = post(cluster.router.http_addr, "/v1/completions", &body).await;
        assert_eq!(answer.status, 400, "{more}");
        let error = answer.json().await["error"].take();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    let request = v1::GenerateRequest { cache_salt: Some("x".repeat(257)), ..ask("x") };
    let error = cluster.generate_within(request, None).await.unwrap_err();
    assert_eq!(error.code(), tonic::Code::InvalidArgument, "{error:?}");
}

fn priced(config: &mut RouterConfig) {
    let price = Price { input: 2.0, cached_input: Some(1.0), cache_write: Some(3.0), output: 10.0 };
    config.prices.currency = "EUR".into();
    config.prices.models.insert("m".into(), price);
}

#[tokio::test]
async fn an_answer_says_what_was_cached_and_what_it_costs() {
    let cluster = Cluster::start(priced).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    // 6 of 9: 66 percent and a bit.
    for stream in [false, true] {
        let body = json!({"prompt": "123456789", "max_tokens": 2, "stream": stream});
        let (answer, _) = tokio::join!(post(to, "/v1/completions", &body), answers(&d, (6, 2)));
        assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (200, Some("66")), "stream: {stream}");
        if !stream {
            let usage = answer.json().await["usage"].take();
            assert_eq!(usage["prompt_tokens_details"], json!({"cached_tokens": 6, "cache_write_tokens": 2}));
            // 1 * 2 + 6 * 1 + 2 * 3 + 2 * 10, of a million.
            assert_eq!((&usage["cost"], &usage["currency"]), (&json!(0.000_034), &json!("EUR")));
            assert_eq!(usage.get("recomputed_tokens"), None);
        }
    }
    let mut answer = cluster.generate(ask("123456789")).await;
    answers(&d, (6, 2)).await;
    let last = end(&mut answer).await;
    let usage = last.usage.unwrap();
    assert_eq!((usage.cached_tokens, usage.cache_write_tokens, usage.recomputed_tokens), (6, 2, 0));
    assert_eq!((usage.cost, last.currency.as_str()), (Some(0.000_034), "EUR"));
    let text = send(to, "GET /metrics", "", "").await.text().await;
    let tenant = r#"{model="m",tenant="default""#;
    for line in [
        format!("baton_prompt_tokens_total{tenant}}} 27"),
        format!("baton_cached_tokens_total{tenant}}} 18"),
        format!("baton_cost_total{tenant},currency=\"EUR\"}} 0.0001"),
        r#"baton_cache_write_tokens_total{model="m"} 6"#.to_owned(),
        format!("baton_cache_hit_ratio{tenant},window=\"24h\"}} 0.6666"),
    ] {
        assert!(text.contains(&line), "{line}: {text}");
    }
}

#[tokio::test]
async fn a_worker_that_says_nothing_or_too_much_makes_no_share_over_the_whole() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    for (token, expected) in [(token(b'a'.into(), None), (0, 0)), (first(b'a'.into(), (9, 9), None), (5, 0))] {
        let mut answer = cluster.generate(ask("hello")).await;
        let call = d.decode().await;
        call.claimed().await;
        call.send_token(token).await;
        call.last(b'b'.into(), FinishReason::Length).await;
        let usage = usage(&mut answer).await;
        assert_eq!((usage.cached_tokens, usage.cache_write_tokens), expected);
    }
}

#[tokio::test]
async fn what_a_later_attempt_computes_is_counted_apart() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(remote("hello")).await;
    let (mut claim, other) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    prefill.send_token(first(b'a'.into(), (3, 1), None)).await;
    claim.adopted().await;
    prefill.done().await;
    claim.say("b").await;
    answer.reads("ab").await;
    claim.fail(Status::unknown("h2 protocol error: the connection broke")).await;
    let second = other.decode().await;
    second.claimed().await;
    let (again, _) = two.prefill().await;
    // Two tokens of "helloab" are cached there, so five are computed again.
    again.send_token(first(b'c'.into(), (2, 4), None)).await;
    second.adopted().await;
    again.done().await;
    second.last(b'd'.into(), FinishReason::Length).await;
    let usage = usage(&mut answer).await;
    assert_eq!((usage.cached_tokens, usage.cache_write_tokens), (3, 1), "as of its first token");
    assert_eq!(usage.recomputed_tokens, 5);
}

#[tokio::test]
async fn an_attempt_that_failed_before_its_first_token_counts_for_nothing() {
    let two = Two::start(|c| c.placement.prefill_policy = PrefillPolicy::Local).await;
    let mut answer = two.cluster.generate(ask("hello")).await;
    let (mut claim, other) = two.claim().await;
    claim.fail(Status::unknown("h2 protocol error: the connection broke")).await;
    let second = other.decode().await;
    second.claimed().await;
    second.send_token(first(b'a'.into(), (4, 1), Some(FinishReason::Length))).await;
    let usage = usage(&mut answer).await;
    assert_eq!((usage.cached_tokens, usage.cache_write_tokens, usage.recomputed_tokens), (4, 1, 0));
}

#[tokio::test]
async fn the_head_of_a_stream_waits_for_the_first_token() {
    let cluster = Cluster::start(|c| c.limits.head_ms_max = 20_000).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let slow = async || {
        let call = d.decode().await;
        call.claimed().await;
        tokio::time::sleep(Duration::from_millis(50)).await;
        call
    };
    let serves = async || {
        let call = slow().await;
        call.send_token(first(b'a'.into(), (2, 0), None)).await;
        call.last(b'b'.into(), FinishReason::Length).await;
    };
    let refuses = async || slow().await.fail(Status::invalid_argument("it cannot be")).await;
    let (mut client, to) = (cluster.client.clone(), cluster.router.http_addr);
    let body = json!({"prompt": "abcd", "stream": true});
    let (answer, ()) = tokio::join!(client.generate(ask("abcd")), serves());
    let answer = answer.unwrap();
    assert_eq!(answer.metadata().get("x-baton-cache-hit").unwrap(), "50");
    assert!(answer.metadata().contains_key("x-request-id"));
    assert_eq!(Reader(answer.into_inner()).rest().await, ("ab".into(), FinishReason::Length));
    let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), serves());
    assert_eq!(answer.header("x-baton-cache-hit"), Some("50"));
    // An error before the head is not a stream.
    let (answer, ()) = tokio::join!(client.generate(ask("abcd")), refuses());
    let status = answer.unwrap_err();
    assert_eq!(status.code(), tonic::Code::InvalidArgument, "{status:?}");
    assert!(status.metadata().contains_key("x-request-id"));
    let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), refuses());
    assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (400, None));
}

#[tokio::test]
async fn a_stream_that_opens_before_it_is_known_says_nothing_of_it() {
    let cluster = Cluster::start(|c| c.http.sse_keepalive_ms = 20).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let body = json!({"prompt": "x", "stream": true});
    let mut answer: http::Answer = post(cluster.router.http_addr, "/v1/completions", &body).await;
    assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (200, None));
    assert_eq!(answer.line().await.as_deref(), Some(": keepalive"));
    let answer = cluster.client.clone().generate(ask("x")).await.unwrap();
    assert_eq!(answer.metadata().get("x-baton-cache-hit"), None);
    drop(d);
}
