//! Several prompts in one call, each with scripted workers of its own.

use crate::testing::cluster::Cluster;
use crate::testing::fake::{DecodeCall, Fake, first, token};
use crate::testing::http::{post, send};
use baton_proto::v1::{FinishReason::Length, Logprobs};
use baton_types::{Role, SAMPLING_BAD_WORDS, SAMPLING_TYPICAL_P};
use futures::FutureExt as _;
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// The calls for the answers of these prompts, by prompt and sample.
async fn calls(d: &Fake, prompts: &[&[u32]], n: u32) -> Vec<DecodeCall> {
    let mut calls = Vec::new();
    for _ in 0..prompts.len() * n as usize {
        calls.push(d.decode().await);
    }
    let prompt = |call: &DecodeCall| prompts.iter().position(|prompt| *prompt == call.sequence().tokens).unwrap();
    calls.sort_by_key(|call| (prompt(call), call.sequence().sample_index));
    calls
}

const PROMPTS: [&[u32]; 2] = [&[7, 8, 9], &[4, 5, 6, 7, 8]];

#[tokio::test]
async fn answers_are_ordered_by_prompt_and_usage_is_summed() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let workers = async {
        for (at, call) in calls(&d, &PROMPTS, 2).await.iter().enumerate() {
            assert_eq!(
                call.sequence().sample_index as usize,
                at % 2,
                "the random numbers of a call with this prompt alone"
            );
            call.claimed().await;
            // Of each prompt, the second sample finds all but the last token.
            let cached = if at % 2 == 1 { PROMPTS[at / 2].len() as u32 - 1 } else { at as u32 / 2 };
            call.send_token(first(u32::from(b'a') + at as u32, (cached, 1), None)).await;
            call.last(u32::from(b'z'), Length).await;
        }
    };
    let body = json!({"prompt": PROMPTS, "n": 2, "max_tokens": 2, "return_token_ids": true, "seed": 3});
    let (answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &body), workers);
    assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (200, Some("12")));
    let answer = answer.json().await;
    let shown: Vec<_> = answer["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|c| (&c["index"], &c["text"], &c["prompt_token_ids"]))
        .collect();
    let (one, two) = (json!(PROMPTS[0]), json!(PROMPTS[1]));
    let expected = [
        (json!(0), json!("az"), &one),
        (json!(1), json!("bz"), &one),
        (json!(2), json!("cz"), &two),
        (json!(3), json!("dz"), &two),
    ];
    assert!(expected.iter().map(|(index, text, prompt)| (index, text, *prompt)).eq(shown), "{answer}");
    let usage = &answer["usage"];
    assert_eq!(
        (&usage["prompt_tokens"], &usage["completion_tokens"], &usage["total_tokens"]),
        (&json!(8), &json!(8), &json!(16))
    );
    let details = &usage["prompt_tokens_details"];
    assert_eq!((&details["cached_tokens"], &details["cache_write_tokens"]), (&json!(1), &json!(2)));
    assert!(answer["choices"][3]["timings"].is_object() && answer.get("timings").is_none());
}

#[tokio::test]
async fn a_stream_has_the_choices_of_all_prompts() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let workers = async {
        let calls = calls(&d, &PROMPTS, 1).await;
        for (at, call) in calls.iter().enumerate().rev() {
            call.claimed().await;
            call.send_token(first(u32::from(b'a') + at as u32, (at as u32, 0), None)).await;
        }
        for call in &calls {
            call.last(u32::from(b'z'), Length).await;
        }
    };
    let usage = json!({"include_usage": true, "continuous_usage_stats": true});
    let body = json!({"prompt": PROMPTS, "max_tokens": 2, "stream": true, "stream_options": usage});
    let (mut answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &body), workers);
    assert_eq!((answer.status, answer.header("x-baton-cache-hit")), (200, Some("12")), "1 of 8 tokens");
    let (mut texts, mut prompts, mut ends, mut total) =
        (BTreeMap::<u64, String>::new(), BTreeMap::new(), 0, Value::Null);
    while let Some(line) = answer.line().await {
        let Ok(chunk) = serde_json::from_str::<Value>(line.strip_prefix("data: ").unwrap()) else { continue };
        let Some(choice) = chunk["choices"].get(0) else {
            total = chunk["usage"].clone();
            continue;
        };
        let index = choice["index"].as_u64().unwrap();
        *texts.entry(index).or_default() += choice["text"].as_str().unwrap();
        prompts.insert(index, chunk["usage"]["prompt_tokens"].clone());
        ends += usize::from(choice["finish_reason"].is_string());
    }
    assert_eq!((texts, ends), (BTreeMap::from([(0, "az".to_owned()), (1, "bz".to_owned())]), 2));
    assert_eq!((prompts, &total["prompt_tokens"]), (BTreeMap::from([(0, json!(3)), (1, json!(5))]), &json!(8)));
}

#[tokio::test]
async fn one_bad_prompt_refuses_the_call_and_reaches_no_worker() {
    let cluster = Cluster::start(|config| config.limits.queued_max = 4).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let long = "x".repeat(9000);
    for (body, param, says) in [
        (json!({"prompt": ["fine", long]}), "prompt[1]", "maximum context length"),
        (json!({"prompt": ["fine", ""]}), "prompt[1]", "the prompt is empty"),
        (json!({"prompt": [[1], [2], [1000]]}), "prompt[2]", "outside the vocabulary"),
        (json!({"prompt": ["a", "b"], "max_tokens": 9000}), "max_tokens", "maximum context length"),
        (json!({"prompt": vec!["a"; 33], "n": 32}), "prompt", "at most 1024"),
        (json!({"prompt": vec!["a"; 257]}), "prompt", "at most 256 prompts"),
    ] {
        let answer = post(cluster.router.http_addr, "/v1/completions", &body).await;
        assert_eq!(answer.status, 400);
        let error = answer.json().await["error"].clone();
        assert_eq!(error["param"], param, "{error}");
        assert!(error["message"].as_str().unwrap().contains(says), "{error}");
    }
    let answer = post(cluster.router.http_addr, "/tokenize", &json!({"prompt": ["a", "b"]})).await;
    assert_eq!((answer.status, &answer.json().await["error"]["param"]), (400, &json!("prompt")));
    assert_eq!(cluster.router.requests(), 0);
    assert!(d.decode().now_or_never().is_none());
}

#[tokio::test]
async fn a_client_that_goes_cancels_all_its_prompts() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let body = json!({"prompt": PROMPTS, "max_tokens": 9}).to_string();
    let to = cluster.router.http_addr;
    let client = tokio::spawn(async move { send(to, "POST /v1/completions", "", &body).await });
    let mut calls = calls(&d, &PROMPTS, 1).await;
    for call in &calls {
        call.claimed().await;
    }
    calls[1].token(u32::from(b'a')).await;
    client.abort();
    for call in &mut calls {
        call.cancelled().await;
    }
}

#[tokio::test]
async fn the_best_answers_of_each_prompt_are_shown() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    // By the mean of two tokens, not by the sum: of the first prompt 2, then 0; of the second 0, then 1, which is as good as 2.
    let means = [[-1.0, -3.0, -0.5], [-0.1, -0.2, -0.2]];
    let workers = async {
        for (at, call) in calls(&d, &PROMPTS, 3).await.iter().enumerate() {
            assert_eq!(call.sequence().sampling.as_ref().unwrap().logprobs, Some(0), "workers report what is compared");
            call.claimed().await;
            let logprobs = |chosen| Some(Logprobs { chosen, ..Default::default() });
            let mean: f32 = means[at / 3][at % 3];
            let begin = first(u32::from(b'a') + at as u32, (0, 0), None);
            call.send_token(baton_proto::v1::Token { logprobs: logprobs(2.0 * mean), ..begin }).await;
            call.send_token(baton_proto::v1::Token { logprobs: logprobs(0.0), ..token(u32::from(b'z'), Some(Length)) })
                .await;
        }
    };
    let body = json!({"prompt": PROMPTS, "n": 2, "best_of": 3, "max_tokens": 2, "return_token_ids": true});
    let (answer, ()) = tokio::join!(post(cluster.router.http_addr, "/v1/completions", &body), workers);
    let answer = answer.json().await;
    let choices = answer["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["cz", "az", "dz", "ez"]);
    for (at, choice) in choices.iter().enumerate() {
        assert_eq!((&choice["index"], &choice["logprobs"]), (&json!(at), &Value::Null));
        assert_eq!(choice["prompt_token_ids"], json!(PROMPTS[at / 2]));
    }
    assert_eq!(answer["usage"]["completion_tokens"], 12, "what was not shown was computed, too");
}

#[tokio::test]
async fn a_long_prompt_is_cut_to_its_end() {
    let cluster = Cluster::start(|_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    let to = cluster.router.http_addr;
    let long = format!("{}end", "x".repeat(20_000));
    for (truncate, max_tokens, kept) in [(3, 1, 3), (-1, 100, 8092), (8191, 1, 8191)] {
        let body = json!({"prompt": long, "max_tokens": max_tokens, "truncate_prompt_tokens": truncate});
        let worker = async {
            let call = d.decode().await;
            assert!(call.sequence().tokens.len() == kept && call.sequence().tokens.ends_with(&[101, 110, 100]));
            call.claimed().await;
            call.last(u32::from(b'z'), Length).await;
        };
        let (answer, ()) = tokio::join!(post(to, "/v1/completions", &body), worker);
        assert_eq!(answer.json().await["usage"]["prompt_tokens"], kept);
        let tokens = post(to, "/tokenize", &body).await.json().await;
        assert_eq!(tokens["count"], kept);
    }
    let body = json!({"prompt": long, "truncate_prompt_tokens": 9000});
    let answer = post(to, "/v1/completions", &body).await;
    assert_eq!((answer.status, &answer.json().await["error"]["code"]), (400, &json!("context_length_exceeded")));
}

#[tokio::test]
async fn a_chat_ends_with_an_answer_begun_or_not() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let messages = json!([{"role": "user", "content": "hi"}, {"role": "assistant", "content": "so "}]);
    let text = async |more: Value| {
        let mut body = json!({"messages": messages});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let tokens = post(cluster.router.http_addr, "/tokenize", &body).await.json().await["tokens"].clone();
        let text = post(cluster.router.http_addr, "/detokenize", &json!({"tokens": tokens})).await.json().await;
        text["prompt"].as_str().unwrap().to_owned()
    };
    assert_eq!(text(json!({"add_generation_prompt": false})).await, "[user]hi<|end|>[assistant]so <|end|>");
    assert_eq!(text(json!({"continue_final_message": true})).await, "[user]hi<|end|>[assistant]so ");
}

#[tokio::test]
async fn words_and_typical_tokens_go_to_workers_whose_device_knows_them() {
    let cluster = Cluster::start(|_| ()).await;
    let of_gpu = |name: &String| ![SAMPLING_TYPICAL_P, SAMPLING_BAD_WORDS].contains(&&**name);
    let _gpu = cluster.worker_with(Role::Decode, "gpu", |record| record.capabilities.retain(of_gpu)).await;
    let to = cluster.router.http_addr;
    let asked = [("typical_p", json!(0.5), SAMPLING_TYPICAL_P), ("bad_words", json!(["ab"]), SAMPLING_BAD_WORDS)];
    for (field, value, capability) in &asked {
        let answer = post(to, "/v1/completions", &json!({"prompt": "x", "max_tokens": 1, *field: value})).await;
        assert_eq!(answer.status, 503);
        let error = answer.json().await["error"].take();
        assert!(error["message"].as_str().is_some_and(|message| message.contains(capability)), "{error}");
    }
    let cpu = cluster.worker(Role::Decode, "cpu").await;
    for _ in 0..3 {
        let worker = async {
            let call = cpu.decode().await;
            call.claimed().await;
            call.last(u32::from(b'O'), Length).await;
            call.sequence().sampling.clone().unwrap()
        };
        let body = json!({"prompt": "x", "max_tokens": 1, "typical_p": 0.5, "bad_words": ["ab"]});
        let (answer, sampling) = tokio::join!(post(to, "/v1/completions", &body), worker);
        let words: Vec<_> = sampling.bad_words.into_iter().map(|word| word.ids).collect();
        assert_eq!((answer.status, sampling.typical_p, words), (200, Some(0.5), vec![vec![97, 98], vec![32, 97, 98]]));
    }
}
