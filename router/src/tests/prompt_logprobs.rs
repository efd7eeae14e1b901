//! Log-probabilities of prompts, and prompts that nothing is generated for, over scripted workers.

use crate::testing::cluster::{Cluster, Reader, remote};
use crate::testing::fake::{DecodeCall, first, token};
use crate::testing::http::post;
use crate::testing::two::Two;
use baton_proto::v1::{self, FinishReason, FinishReason::Length};
use baton_types::{PROMPT_LOGPROBS, Role};
use serde_json::{Value, json};
use tonic::Status;

fn asked(text: &str) -> v1::GenerateRequest {
    let sampling = v1::Sampling { prompt_logprobs: Some(2), max_tokens: Some(3), ..Default::default() };
    v1::GenerateRequest { sampling: Some(sampling), ..remote(text) }
}

/// Of a call's sequence.
fn asks(sequence: &Option<v1::Sequence>) -> Option<u32> {
    sequence.as_ref().unwrap().sampling.as_ref().unwrap().prompt_logprobs
}

/// Tokens of the prompt that a client was told of, and the text of the answer, with its usage.
async fn all(answer: &mut Reader) -> (Vec<u32>, String, v1::Usage) {
    let (mut prompt, mut text) = (Vec::new(), String::new());
    loop {
        let message = answer.next().await;
        let scored = &message.prompt_logprobs;
        assert!(scored.is_empty() || text.is_empty() && message.token_ids.is_empty(), "the prompt comes first");
        assert!(scored.iter().all(|token| token.logprobs.as_ref().unwrap().chosen == -(token.token_id as f32)));
        prompt.extend(scored.iter().map(|token| token.token_id));
        text += &message.text;
        if let Some(usage) = message.usage {
            return (prompt, text, usage);
        }
    }
}

#[tokio::test]
async fn another_prefill_worker_reports_what_one_that_failed_did_not() {
    let two = Two::start(|_| ()).await;
    let mut answer = two.cluster.generate(asked("hello")).await;
    let (decode, _) = two.claim().await;
    let (mut prefill, _) = two.prefill().await;
    assert_eq!(asks(&prefill.request.sequence), Some(2));
    prefill.started().await;
    prefill.scored(1, b"el".map(u32::from).as_slice()).await;
    let begin: Vec<u32> = answer.next().await.prompt_logprobs.iter().map(|token| token.token_id).collect();
    assert_eq!(begin, b"el".map(u32::from));
    prefill.fail(Status::unavailable("killed")).await;
    // The claim was of that attempt.
    decode.cancelled().await;
    let (mut decode, _) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    assert_eq!(asks(&prefill.request.sequence), Some(2), "the rest is still to come");
    // It has no memory of the first attempt: the client gets the rest alone.
    prefill.scored(1, b"ell".map(u32::from).as_slice()).await;
    prefill.scored(4, &[u32::from(b'o')]).await;
    prefill.token(b'a'.into(), None).await;
    let mut prompt = Vec::new();
    loop {
        let message = answer.next().await;
        prompt.extend(message.prompt_logprobs.iter().map(|token| token.token_id));
        if !message.text.is_empty() {
            assert_eq!((&prompt[..], message.text.as_str()), (&b"lo".map(u32::from)[..], "a"), "each token once");
            break;
        }
    }
    decode.adopted().await;
    prefill.done().await;
    decode.fail(Status::unavailable("killed")).await;
    // The prompt was reported whole: the answer goes on without it.
    let (decode, _) = two.claim().await;
    let (prefill, _) = two.prefill().await;
    assert_eq!((asks(&prefill.request.sequence), asks(&decode.request.sequence)), (None, None));
    prefill.token(b'c'.into(), Some(Length)).await;
    let (prompt, text, _) = all(&mut answer).await;
    assert_eq!((prompt, text.as_str()), (vec![], "c"));
}

#[tokio::test]
async fn a_local_prefill_reports_the_prompt_and_finds_nothing_cached() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let policy = v1::PrefillPolicy::Local as i32;
    let mut answer = cluster.generate(v1::GenerateRequest { prefill_policy: policy, ..asked("hello") }).await;
    let call = d.decode().await;
    assert_eq!(asks(&call.request.sequence), Some(2));
    call.claimed().await;
    call.scored(1, b"el".map(u32::from).as_slice()).await;
    call.scored(3, b"lo".map(u32::from).as_slice()).await;
    call.send_token(first(b'a'.into(), (0, 5), None)).await;
    call.last(b'b'.into(), Length).await;
    let (prompt, text, usage) = all(&mut answer).await;
    assert_eq!((prompt, text.as_str(), usage.cached_tokens), (b"ello".map(u32::from).to_vec(), "ab", 0));
}

#[tokio::test]
async fn what_a_worker_should_not_report_ends_the_request() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let policy = v1::PrefillPolicy::Local as i32;
    // Nothing at all, a gap, other tokens, more than the prompt has.
    let wrong: [&[(u32, &[u8])]; 4] = [&[], &[(2, b"llo")], &[(1, b"elxo")], &[(1, b"ello!")]];
    for parts in wrong {
        let mut answer = cluster.generate(v1::GenerateRequest { prefill_policy: policy, ..asked("hello") }).await;
        let call = d.decode().await;
        call.claimed().await;
        for (first, tokens) in parts {
            call.scored(*first, &tokens.iter().copied().map(u32::from).collect::<Vec<_>>()).await;
        }
        call.send_token(token(b'a'.into(), None)).await;
        assert_eq!(answer.error().await.code(), tonic::Code::Internal, "{parts:?}");
    }
}

/// A claimed call that reports the prompt "abc", where it is asked to, and answers with a token.
async fn answers(call: &DecodeCall, cached: u32) {
    call.claimed().await;
    if asks(&call.request.sequence).is_some() {
        call.scored(1, &[98, 99]).await;
    }
    call.send_token(first(b'x'.into(), (cached, 0), Some(Length))).await;
}

#[tokio::test]
async fn of_several_samples_the_first_reports_the_prompt_for_all() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    let body = json!({"prompt": "abc", "n": 3, "max_tokens": 1, "echo": true, "logprobs": 0, "prompt_logprobs": 1});
    let workers = async || {
        let call = d.decode().await;
        let is_first = call.sequence().sample_index == 0;
        assert!(is_first && asks(&call.request.sequence).is_some(), "the others wait for its first token");
        answers_with_logprobs(&call).await;
        for _ in 0..2 {
            let call = d.decode().await;
            assert_eq!((asks(&call.request.sequence), call.sequence().sample_index > 0), (None, true));
            answers_with_logprobs(&call).await;
        }
    };
    let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), workers());
    assert_eq!(answer.header("x-baton-cache-hit"), Some("0"));
    let answer = answer.json().await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    for choice in answer["choices"].as_array().unwrap() {
        assert_eq!(
            (&choice["text"], &choice["logprobs"]["token_logprobs"]),
            (&json!("abcx"), &json!([null, -98.0, -99.0, -0.5]))
        );
        assert_eq!(choice["prompt_logprobs"][2]["99"], json!({"logprob": -99.0, "rank": 1, "decoded_token": "c"}));
    }
    let body = json!({"prompt": "abc", "n": 3, "max_tokens": 1, "echo": true, "logprobs": 0, "stream": true});
    let read = async {
        let mut answer = post(to, "/v1/completions", &body).await;
        let mut texts = vec![String::new(); 3];
        while let Some(line) = answer.line().await {
            let Some(chunk) = line.strip_prefix("data: {") else { continue };
            let chunk: Value = serde_json::from_str(&format!("{{{chunk}")).unwrap();
            let choice = &chunk["choices"][0];
            texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
        }
        texts
    };
    let (texts, ()) = tokio::join!(read, workers());
    assert_eq!(texts, ["abcx"; 3]);
}

/// As [`answers`], with log-probabilities of the token, and nothing but the last token of the prompt computed by later samples.
async fn answers_with_logprobs(call: &DecodeCall) {
    call.claimed().await;
    let mut cached = 2;
    if asks(&call.request.sequence).is_some() {
        call.scored(1, &[98, 99]).await;
        cached = 0;
    }
    let logprobs = Some(v1::Logprobs { chosen: -0.5, ..Default::default() });
    call.send_token(v1::Token { logprobs, ..first(b'x'.into(), (cached, 0), Some(Length)) }).await;
}

#[tokio::test]
async fn nothing_is_generated_for_a_prompt_alone() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    for (more, logprobs) in [(json!({"echo": true}), false), (json!({"prompt_logprobs": 0}), true)] {
        let mut body = json!({"prompt": [97, 98, 99], "max_tokens": 0, "return_token_ids": true});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let worker = async {
            let call = d.decode().await;
            // A worker samples one in any case.
            assert_eq!(call.sequence().sampling.as_ref().unwrap().max_tokens, 1);
            answers(&call, 0).await;
        };
        let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), worker);
        assert_eq!(answer.status, 200);
        let answer = answer.json().await;
        let choice = &answer["choices"][0];
        assert_eq!(choice["text"], if logprobs { "" } else { "abc" });
        assert_eq!((&choice["finish_reason"], &choice["token_ids"]), (&json!("length"), &json!([])));
        assert_eq!(choice["prompt_logprobs"].is_array(), logprobs);
        assert_eq!((&answer["usage"]["completion_tokens"], &answer["usage"]["prompt_tokens"]), (&json!(0), &json!(3)));
    }
    // The token that the worker sampled would have been the end.
    let sampling = v1::Sampling { prompt_logprobs: Some(0), max_tokens: Some(0), ..Default::default() };
    let policy = v1::PrefillPolicy::Local as i32;
    let request = v1::GenerateRequest { sampling: Some(sampling), prefill_policy: policy, ..remote("abc") };
    let mut answer = cluster.generate(request).await;
    let call = d.decode().await;
    call.claimed().await;
    call.scored(1, &[98, 99]).await;
    call.last(256, FinishReason::Stop).await;
    let (mut prompt, mut end) = (0, None);
    while let Some(message) = answer.0.message().await.unwrap() {
        assert!(message.text.is_empty() && message.token_ids.is_empty());
        prompt += message.prompt_logprobs.len();
        end = message.usage.as_ref().map(|usage| (message.finish_reason(), usage.completion_tokens));
    }
    assert_eq!((prompt, end), (2, Some((Length, 0))));
}

#[tokio::test]
async fn workers_that_do_not_know_it_are_not_asked() {
    let cluster = Cluster::start(|_| ()).await;
    let without = |name: &String| name != PROMPT_LOGPROBS;
    let _old = cluster.worker_with(Role::Decode, "old", |record| record.capabilities.retain(without)).await;
    let to = cluster.router.http_addr;
    let body = json!({"prompt": "abc", "max_tokens": 0, "prompt_logprobs": 0});
    let refused = post(to, "/v1/completions", &body).await;
    assert_eq!(refused.status, 503);
    let error = refused.json().await;
    assert!(error["error"]["message"].as_str().is_some_and(|message| message.contains(PROMPT_LOGPROBS)), "{error}");
    let new = cluster.worker(Role::Decode, "new").await;
    let worker = async { answers(&new.decode().await, 0).await };
    let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), worker);
    assert_eq!(answer.status, 200);
}
