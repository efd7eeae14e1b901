//! What metrics say after requests of which everything is known: values of all that counts requests, tokens and handoffs.

use anyhow::{Context, ensure};
use baton_tests::eventually::eventually;
use baton_tests::http::{Answer, Api};
use baton_tests::processes::Up;
use baton_tests::scrape::Scrape;
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";
/// Bytes of one token's KV: two layers, two planes, as many KV heads as heads, of 64 elements in all, in bf16.
const TOKEN_BYTES: u64 = 2 * 2 * 64 * 2;
/// Longest wait for a cluster to come to rest, and to count all of it.
const REST_MAX: Duration = Duration::from_secs(60);

/// What the processes of a cluster say.
struct Told {
    router: Scrape,
    prefill: Scrape,
    decode: Scrape,
}

impl Told {
    async fn of(up: &Up) -> anyhow::Result<Self> {
        let one = async |process| Scrape::of(&up.metrics(process)?).await;
        Ok(Self { router: one("router").await?, prefill: one("prefill-0").await?, decode: one("decode-0").await? })
    }

    /// Once nothing runs any more, and the router has heard what workers stored: it does a moment later.
    async fn at_rest(up: &Up) -> anyhow::Result<Self> {
        let deadline = Instant::now() + REST_MAX;
        loop {
            let told = Self::of(up).await?;
            let busy = |s: &Scrape| {
                let open = ["sequences_running", "kv_put_sources", "kv_put_sinks", "kv_tickets"];
                let open: f64 = open.iter().map(|name| s.sum(&format!("baton_{name}"), &[])).sum();
                open + s.sum("baton_kv_blocks", &["referenced"]) + s.sum("baton_kv_blocks", &["quarantined"])
            };
            let stored = |s: &Scrape| s.sum("baton_prefix_cache_stored_blocks_total", &[]);
            let heard = told.router.sum("baton_router_index_events_total", &["kind=\"stored\""]);
            let unheard = stored(&told.prefill) + stored(&told.decode) - heard;
            let left = busy(&told.prefill) + busy(&told.decode) + unheard.abs();
            if left + told.router.sum("baton_router_requests_in_flight", &[]) == 0.0 {
                return Ok(told);
            }
            ensure!(Instant::now() < deadline, "{left} things are left to do after {REST_MAX:?}");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Compares values of one process.
fn says(process: &str, scrape: &Scrape, values: &[(&str, &[&str], u64)]) -> anyhow::Result<()> {
    for (name, labels, value) in values {
        let told = scrape.sum(&format!("baton_{name}"), labels);
        ensure!(told == *value as f64, "{process}: {name} with {labels:?} is {told}, not {value}\n{}", scrape.text());
    }
    Ok(())
}

fn body(salt: u64, prompt: u64, answer: u64, policy: &str) -> Value {
    let prompt: Vec<u64> = (0..prompt).map(|i| (i * (7 + salt) + salt) % 251).collect();
    json!({"prompt": prompt, "max_tokens": answer, "ignore_eos": true, "prefill_policy": policy})
}

/// A number of an answer's usage.
fn used(answer: &Answer, name: &str) -> anyhow::Result<u64> {
    let usage = &answer.body["usage"];
    let count = usage[name].as_u64().or(usage["prompt_tokens_details"][name].as_u64());
    count.with_context(|| format!("no {name} in {usage}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_and_their_tokens_are_counted_once_each() -> anyhow::Result<()> {
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=4MiB"])?;
    let api = Api::new(up.openai()?);
    // Prompt, answer, where it is prefilled; the last one finds two blocks of the first one cached.
    let asked: [Asked; 4] = [(1, 100, 8, "remote"), (2, 70, 5, "remote"), (3, 33, 12, "local"), (1, 100, 6, "remote")];
    let (mut cached, mut written) = (0, 0);
    for (salt, prompt, answer, policy) in asked {
        let got = api.post("completions", body(salt, prompt, answer, policy)).await?;
        ensure!(got.status == 200, "{got:?}");
        ensure!((used(&got, "prompt_tokens")?, used(&got, "completion_tokens")?) == (prompt, answer), "{got:?}");
        cached += used(&got, "cached_tokens")?;
        written += used(&got, "cache_write_tokens")?;
    }
    ensure!(cached > 0, "the prompt that was asked twice was not cached");
    let sum = |of: fn(&Asked) -> u64| asked.iter().map(of).sum::<u64>();
    let (n, prompts, answers) = (asked.len() as u64, sum(|a| a.1), sum(|a| a.2));
    let remote = asked.iter().filter(|a| a.3 == "remote").count() as u64;
    let counts = Counts { asked: &asked, cached, written, n, prompts, answers, remote };
    // What ends with the last answer is counted a moment after it.
    eventually(async || counts.are_told(&Told::at_rest(&up).await?)).await?;
    up.stop()
}

type Asked = (u64, u64, u64, &'static str);

/// What was asked and answered.
struct Counts<'a> {
    asked: &'a [Asked],
    cached: u64,
    written: u64,
    n: u64,
    prompts: u64,
    answers: u64,
    remote: u64,
}

impl Counts<'_> {
    fn are_told(&self, told: &Told) -> anyhow::Result<()> {
        let Told { router, prefill, decode } = told;
        let Self { asked, cached, written, n, prompts, answers, remote } = *self;
        says(
            "router",
            router,
            &[
                ("router_requests_total", &["outcome=\"ok\""], n),
                ("router_requests_total", &[], n),
                ("router_time_to_first_token_seconds_count", &[], n),
                ("router_request_duration_seconds_count", &[], n),
                ("router_queue_seconds_count", &[], n),
                ("router_inter_token_seconds_count", &[], answers - n),
                ("router_prompt_tokens_total", &[], prompts),
                ("router_completion_tokens_total", &[], answers),
                ("prompt_tokens_total", &[], prompts),
                ("cached_tokens_total", &[], cached),
                ("cache_write_tokens_total", &[], written),
                ("recomputed_tokens_total", &[], 0),
                ("router_placements_total", &[], n),
                ("router_placements_total", &["reason=\"local_policy\""], n - remote),
                // The last one finds its beginning where it is prefilled.
                ("router_placements_total", &["reason=\"remote_policy\""], remote - 1),
                ("router_placements_total", &["reason=\"remote_cached\""], 1),
                ("router_retries_total", &[], 0),
                ("router_given_up_total", &[], 0),
                ("router_replayed_tokens_total", &[], 0),
                ("router_registered_workers", &[], 2),
                ("router_ready_workers", &["role=\"prefill\""], 1),
                ("router_ready_workers", &["role=\"decode\""], 1),
                ("router_doubted_workers", &[], 0),
                ("router_unpaired_workers", &[], 0),
                ("router_index_workers", &[], 2),
                ("router_index_lost_workers", &[], 0),
                ("router_membership_up", &[], 1),
                ("router_membership_changes_total", &["change=\"joined\""], 2),
                ("router_membership_changes_total", &["change=\"left\""], 0),
                ("router_unconfirmed_workers", &[], 0),
                // The router keeps the membership itself.
                ("router_etcd_clusters", &[], 0),
                ("router_etcd_alarms", &[], 0),
                ("router_auth_keys", &[], 0),
                ("router_auth_refused_total", &[], 0),
                ("router_answers_bytes", &[], 0),
                ("router_index_snapshots_total", &["reason=\"start\""], 2),
                ("router_index_snapshots_total", &[], 2),
                ("router_index_forgotten_total", &[], 0),
                ("router_index_refused_blocks_total", &[], 0),
                ("router_index_events_total", &["kind=\"removed\""], 0),
            ],
        )?;
        // Every token is sampled once: the first of a remote answer where it is prefilled, all others where they are decoded.
        says(
            "prefill",
            prefill,
            &[
                ("generated_tokens_total", &[], remote),
                ("kv_handoffs_total", &["direction=\"sent\"", "outcome=\"adopted\""], remote),
                ("kv_handoffs_total", &[], remote),
                ("kv_peer_handoffs_total", &["peer=\"decode-0\"", "outcome=\"adopted\""], remote),
                ("kv_puts_refused_total", &[], 0),
                ("kv_stale_messages_total", &[], 0),
                ("preemptions_total", &[], 0),
                ("engine_recomputed_tokens_total", &[], 0),
                ("worker_phase_seconds_count", &["phase=\"prefill.compute\""], remote),
                ("worker_phase_seconds_count", &["phase=\"kv.transfer\""], remote),
                ("kv_exposed_seconds_count", &[], remote),
                ("kv_transfer_bytes_total", &["direction=\"adopted\""], 0),
                ("kv_transfer_rate_bytes_per_second_count", &[], remote),
                // Each prompt is one chunk.
                ("engine_steps_total", &[], remote),
            ],
        )?;
        says(
            "decode",
            decode,
            &[
                ("generated_tokens_total", &[], answers - remote),
                ("kv_handoffs_total", &["direction=\"received\"", "outcome=\"adopted\""], remote),
                ("kv_handoffs_total", &[], remote),
                ("kv_refused_total", &[], 0),
                ("preemptions_total", &[], 0),
                ("engine_recomputed_tokens_total", &[], 0),
                ("worker_phase_seconds_count", &["phase=\"decode.generate\""], n),
                ("worker_phase_seconds_count", &["phase=\"decode.await_kv\""], remote),
                // One prompt is computed here, and all answers come one after the other.
                ("engine_steps_total", &[], answers - n + 1),
                ("kv_puts_total", &[], 0),
                ("kv_flushes_total", &[], 0),
                ("kv_slots", &[], 0),
                ("kv_slots_unused", &[], 0),
                ("waiting_tokens", &[], 0),
                ("sequences_waiting", &[], 0),
            ],
        )?;
        let (sent, adopted) = (
            prefill.sum("baton_kv_transfer_bytes_total", &["direction=\"sent\""]),
            decode.sum("baton_kv_transfer_bytes_total", &["direction=\"adopted\""]),
        );
        let most: u64 = asked.iter().filter(|a| a.3 == "remote").map(|a| a.1 * TOKEN_BYTES).sum();
        ensure!(sent == adopted && sent > 0.0 && sent <= most as f64, "sent {sent}, adopted {adopted}, of {most}");
        ensure!((sent as u64).is_multiple_of(TOKEN_BYTES), "{sent} bytes are no whole tokens");
        // A flush serves all layers that asked before it was posted.
        let (puts, flushes) = (prefill.sum("baton_kv_puts_total", &[]), prefill.sum("baton_kv_flushes_total", &[]));
        let (layers, planes) = (2, 2);
        ensure!(puts >= (remote * layers * planes) as f64, "{puts} writes");
        ensure!(flushes >= remote as f64 && flushes <= (remote * layers) as f64, "{flushes} flushes");
        let mut stored_by_all = 0.0;
        for (process, scrape) in [("prefill", prefill), ("decode", decode)] {
            says(
                process,
                scrape,
                &[
                    ("engine_healthy", &[], 1),
                    ("engine_step_age_seconds", &[], 0),
                    ("kv_used_ratio", &[], 0),
                    ("kv_quarantined_blocks", &[], 0),
                    ("kv_peer_lanes", &[], 1),
                    ("prefix_cache_pinned_blocks", &[], 0),
                    ("prefix_cache_unpinned_blocks_total", &[], 0),
                    ("prefix_cache_removed_blocks_total", &[], 0),
                ],
            )?;
            let blocks = |state: &str| scrape.sum("baton_kv_blocks", &[&format!("state=\"{state}\"")]);
            let all = (4 << 20) / (16 * TOKEN_BYTES);
            ensure!(blocks("free") + blocks("cached") == all as f64, "{process}: {}", scrape.text());
            let known = scrape.sum("baton_prefix_cache_blocks", &[]);
            ensure!(
                known == blocks("cached") && known > 0.0,
                "{process}: {known} blocks known, {} cached",
                blocks("cached")
            );
            let stored = scrape.sum("baton_prefix_cache_stored_blocks_total", &[]);
            ensure!(stored == known, "{process}: {stored} were stored, {known} are there, and none was removed");
            let evictable = scrape.sum("baton_prefix_cache_evictable_blocks", &[]);
            ensure!(evictable == known, "{process}: {evictable} of {known} blocks would make room");
            stored_by_all += stored;
        }
        let told = router.sum("baton_router_index_events_total", &["kind=\"stored\""]);
        ensure!(told == stored_by_all, "workers stored {stored_by_all} blocks, and told of {told}");
        // What is handed over is cached on both sides, so the decode worker knows all.
        let (index, all) = (router.sum("baton_router_index_blocks", &[]), decode.sum("baton_prefix_cache_blocks", &[]));
        ensure!(index == all, "{index} blocks are known of {all}");
        // Rows of prefill are the tokens of prompts that were not cached, wherever.
        let rows =
            |kind: &str| [prefill, decode].iter().map(|s| s.sum("baton_engine_rows_total", &[kind])).sum::<f64>();
        let found: f64 = [prefill, decode].iter().map(|s| s.sum("baton_engine_cached_tokens_total", &[])).sum();
        ensure!(
            rows("prefill") == (prompts - cached) as f64,
            "{} rows of {prompts} - {cached} tokens",
            rows("prefill")
        );
        ensure!(found == cached as f64, "engines found {found} tokens, answers tell of {cached}");
        ensure!(rows("decode") == (answers - n) as f64, "{} rows of decode for {answers} tokens", rows("decode"));
        Ok(())
    }
}
