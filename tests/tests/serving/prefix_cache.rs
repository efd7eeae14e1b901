//! What a client is told of prefix caches is what the workers' engines counted, over a real cluster.

use anyhow::{Context, ensure};
use baton_tests::eventually::eventually;
use baton_tests::http::Api;
use baton_tests::processes::Up;
use baton_tests::scrape;
use serde_json::{Value, json};

const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=5";
/// Whole blocks of 16, but for the last one: it holds the token that the first of the answer comes from.
const PROMPT_TOKENS: u64 = 200;
const CACHED_TOKENS: u64 = 192;

fn body(salt: u64, policy: &str, more: &Value) -> Value {
    let prompt: Vec<u64> = (0..PROMPT_TOKENS).map(|i| (i * 7 + salt * 13) % 290).collect();
    let mut body = json!({
        "prompt": prompt, "max_tokens": 8, "ignore_eos": true, "temperature": 0, "prefill_policy": policy, "return_token_ids": true,
    });
    body.as_object_mut().into_iter().for_each(|body| body.extend(more.as_object().cloned().unwrap_or_default()));
    body
}

fn details(body: &Value) -> anyhow::Result<(u64, u64)> {
    let details = &body["usage"]["prompt_tokens_details"];
    let count = |name: &str| details[name].as_u64().with_context(|| format!("no {name} in {body}"));
    Ok((count("cached_tokens")?, count("cache_write_tokens")?))
}

/// The usage with which a stream ends.
fn last_usage(stream: &str) -> anyhow::Result<Value> {
    let mut chunks = stream.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
    chunks.rfind(|chunk| chunk["usage"].is_object()).context("no usage")
}

#[tokio::test(flavor = "multi_thread")]
async fn what_clients_are_told_is_what_engines_counted() -> anyhow::Result<()> {
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=8MiB"])?;
    let api = Api::new(up.openai()?);
    for (salt, policy, process) in [(1, "remote", "prefill-0"), (2, "local", "decode-0")] {
        let metrics = up.metrics(process)?;
        let count = async || scrape::sum(&metrics, "baton_engine_cached_tokens_total", &[]).await;
        let counted = async |expected: f64| {
            eventually(async || {
                let count = count().await?;
                ensure!(count == expected, "{policy}: the engine counted {count} tokens, not {expected}");
                Ok(())
            })
            .await
        };
        let nothing = json!({});
        let before = count().await?;
        let first = api.post("completions", body(salt, policy, &nothing)).await?;
        ensure!(first.status == 200 && first.header("x-baton-cache-hit") == "0", "{policy}: {first:?}");
        ensure!(details(&first.body)? == (0, CACHED_TOKENS), "{policy}: {first:?}");
        counted(before).await?;

        let second = api.post("completions", body(salt, policy, &nothing)).await?;
        ensure!(second.tokens() == first.tokens() && second.tokens().len() == 8, "{policy}: {first:?} {second:?}");
        let (cached, written) = details(&second.body)?;
        ensure!((cached, written) == (CACHED_TOKENS, 0), "{policy}: {second:?}");
        counted(before + cached as f64).await?;
        ensure!(second.header("x-baton-cache-hit") == "96", "{policy}: {second:?}");

        let stream = json!({"stream": true, "stream_options": {"include_usage": true}});
        let streamed = api.post("completions", body(salt, policy, &stream)).await?;
        ensure!(streamed.header("x-baton-cache-hit") == "96", "{policy}: {streamed:?}");
        let usage = last_usage(streamed.body.as_str().context("no stream")?)?;
        ensure!(details(&usage)? == (CACHED_TOKENS, 0), "{policy}: {usage}");
        counted(before + 2.0 * cached as f64).await?;

        // Neither who asks for a salt of its own, nor who asks for no cache, is told of what others left; and the latter leaves nothing.
        for (more, kept) in [(json!({"cache_salt": "mine"}), CACHED_TOKENS), (json!({"cache": {"off": true}}), 0)] {
            let apart = api.post("completions", body(salt, policy, &more)).await?;
            ensure!(apart.tokens() == first.tokens(), "{policy}: {first:?} {apart:?}");
            ensure!(details(&apart.body)? == (0, kept), "{policy} {more}: {apart:?}");
        }
    }
    let told = async |name| scrape::sum(&up.metrics("router")?, name, &["tenant=\"default\""]).await;
    ensure!(told("baton_cached_tokens_total").await? == 4.0 * CACHED_TOKENS as f64);
    ensure!(told("baton_prompt_tokens_total").await? == 10.0 * PROMPT_TOKENS as f64);
    ensure!(told("baton_cache_hit_ratio").await? == 4.0 * CACHED_TOKENS as f64 / (10.0 * PROMPT_TOKENS as f64));
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn samples_share_the_prompt_and_draw_for_themselves() -> anyhow::Result<()> {
    const SAMPLES: u64 = 4;
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=8MiB"])?;
    let api = Api::new(up.openai()?);
    let choices = |body: &Value| -> Vec<Vec<Value>> {
        let choices = body["choices"].as_array().into_iter().flatten();
        choices.map(|choice| choice["token_ids"].as_array().cloned().unwrap_or_default()).collect()
    };
    for (salt, policy, process) in [(3, "remote", "prefill-0"), (4, "local", "decode-0")] {
        // They are counted before their tokens are sent.
        let rows = async || scrape::sum(&up.metrics(process)?, "baton_engine_rows_total", &["kind=\"prefill\""]).await;
        let before = rows().await?;
        let ask = async |n: u64, off: bool| {
            let more = json!({"n": n, "temperature": 1, "seed": 11, "cache": {"off": off}});
            let answer = api.post("completions", body(salt, policy, &more)).await?;
            ensure!(answer.status == 200, "{policy}: {answer:?}");
            Ok(answer)
        };
        let together = ask(SAMPLES, false).await?;
        let computed = (rows().await? - before) as u64;
        let samples = choices(&together.body);
        ensure!(samples.len() as u64 == SAMPLES && samples.iter().all(|tokens| tokens.len() == 8), "{together:?}");
        ensure!(
            (1..samples.len()).all(|i| !samples[..i].contains(&samples[i])),
            "{policy}: they are alike: {samples:?}"
        );
        let usage = &together.body["usage"];
        ensure!(
            usage["prompt_tokens"] == PROMPT_TOKENS && usage["completion_tokens"] == 8 * SAMPLES,
            "{policy}: {usage}"
        );
        ensure!(details(&together.body)? == (0, CACHED_TOKENS), "{policy}: {usage}");
        // The prompt once, and for each of the others its last token, or all behind the last whole block where it came later.
        let others = |rows: u64| PROMPT_TOKENS + (SAMPLES - 1) * rows;
        let possible = others(1)..=others(PROMPT_TOKENS - CACHED_TOKENS);
        ensure!(possible.contains(&computed), "{policy}: {computed} rows");
        ensure!(choices(&ask(SAMPLES, true).await?.body) == samples, "{policy}: other tokens without caches");
        ensure!(choices(&ask(1, false).await?.body) == samples[..1], "{policy}: the first is not the only one's");
    }
    up.stop()
}
