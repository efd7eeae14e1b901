//! One request is one trace across three processes, and every process tells its numbers.

use anyhow::{Context, ensure};
use baton_node::testing::{CollectedSpan, Collector};
use baton_proto::v1::{self, inference_client::InferenceClient};
use baton_tests::critical_path::critical_path;
use baton_tests::eventually::eventually;
use baton_tests::http::Api;
use baton_tests::processes::{Up, baton};
use baton_tests::scrape::{Scrape, find};
use serde_json::json;
use std::time::{Duration, Instant};

/// 2 layers of keys and values, 4 heads of 16 dimensions in 2 bytes: 512 bytes a token.
const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";
const KV_BYTES: u64 = 512;
const PROMPT_TOKENS: u64 = 300;
const ANSWER_TOKENS: u64 = 12;
/// Longest way of a span from its end to the collector.
const EXPORT_MAX: Duration = Duration::from_secs(60);
/// A caller's own trace, as the W3C writes it.
const CALLER: (&str, &str) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");

const REMOTE: [&str; 14] = [
    "baton-decode-worker: claim > decode.await_kv",
    "baton-decode-worker: claim > decode.generate",
    "baton-prefill-worker: generate > decode.reserve",
    "baton-prefill-worker: generate > kv.commit",
    "baton-prefill-worker: generate > kv.exposed",
    "baton-prefill-worker: generate > kv.transfer",
    "baton-prefill-worker: prefill > prefill.compute",
    "baton-prefill-worker: prefill > prefill.queue",
    "baton-router: (caller) > generate",
    "baton-router: generate > claim",
    "baton-router: generate > place",
    "baton-router: generate > prefill",
    "baton-router: generate > stream",
    "baton-router: generate > tokenize",
];
const LOCAL: [&str; 8] = [
    "baton-decode-worker: claim > decode.generate",
    "baton-decode-worker: generate > prefill.compute",
    "baton-decode-worker: generate > prefill.queue",
    "baton-router: (none) > generate",
    "baton-router: generate > claim",
    "baton-router: generate > place",
    "baton-router: generate > stream",
    "baton-router: generate > tokenize",
];

async fn ask(api: &Api, policy: &str, headers: &[(&str, &str)]) -> anyhow::Result<String> {
    // One of its own for each policy, so that nothing of it is cached.
    let first = policy.len() as u64;
    let prompt: Vec<u64> = (first..first + PROMPT_TOKENS).map(|i| i % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": ANSWER_TOKENS, "temperature": 0, "ignore_eos": true,
        "prefill_policy": policy});
    let answer = api.post_with("completions", body, headers).await?;
    ensure!(answer.status == 200, "{answer:?}");
    Ok(answer.header("x-trace-id").to_owned())
}

/// The spans of one trace as `service: parent > name`, in order of the alphabet.
fn tree(spans: &[CollectedSpan], trace: &str) -> Vec<String> {
    let of_trace = || spans.iter().filter(move |s| s.trace_id == trace);
    let line = |span: &CollectedSpan| {
        let parent = match &span.parent_id {
            None => "(none)",
            Some(id) if id == CALLER.1 => "(caller)",
            Some(id) => of_trace().find(|s| s.span_id == *id).map_or("(lost)", |s| s.name.as_str()),
        };
        format!("{}: {parent} > {}", span.service, span.name)
    };
    let mut lines: Vec<String> = of_trace().map(line).collect();
    lines.sort();
    lines
}

fn number(span: &CollectedSpan, key: &str) -> anyhow::Result<f64> {
    let text =
        span.attributes.get(key).with_context(|| format!("{} has no {key}: {:?}", span.name, span.attributes))?;
    Ok(text.parse()?)
}

fn check_remote(spans: &[CollectedSpan], trace: &str) -> anyhow::Result<()> {
    let span = |name: &str| spans.iter().find(|s| s.trace_id == trace && s.name == name).context(name.to_owned());
    let transfer = span("kv.transfer")?;
    ensure!(number(transfer, "baton.kv.bytes")? == (PROMPT_TOKENS * KV_BYTES) as f64, "{transfer:?}");
    ensure!(transfer.attributes.get("baton.kv.transport").is_some_and(|t| t == "ucx"), "{transfer:?}");
    ensure!(
        number(transfer, "baton.kv.gb_per_s")? > 0.0 && number(transfer, "baton.kv.exposed_ms")? > 0.0,
        "{transfer:?}"
    );
    let (moving, whole) = (number(transfer, "baton.kv.moving_ms")?, transfer.time_ns.end - transfer.time_ns.start);
    ensure!(moving > 0.0 && moving * 1e6 <= whole as f64 + 1.0, "bytes moved within the transfer: {transfer:?}");
    let rate = (PROMPT_TOKENS * KV_BYTES) as f64 / moving / 1e6;
    ensure!(
        (number(transfer, "baton.kv.gb_per_s")? / rate - 1.0).abs() < 0.01,
        "the rate is over that time: {transfer:?}"
    );
    ensure!(transfer.time_ns.end == span("kv.commit")?.time_ns.start, "a commit follows the flush");
    let exposed = span("kv.exposed")?;
    ensure!(exposed.time_ns.start == span("prefill.compute")?.time_ns.end, "it begins where no compute hides it");
    ensure!(exposed.time_ns.end == span("kv.commit")?.time_ns.end, "it ends with the acknowledgement");
    ensure!(span("prefill")?.time_ns.end <= span("stream")?.time_ns.start, "prefill ends with the first token");
    ensure!(number(span("decode.await_kv")?, "baton.kv.bytes")? == (PROMPT_TOKENS * KV_BYTES) as f64);
    // The first token came from the prefill worker.
    ensure!(number(span("decode.generate")?, "gen_ai.usage.output_tokens")? == (ANSWER_TOKENS - 1) as f64);
    let generate = span("generate")?;
    ensure!(number(generate, "gen_ai.usage.input_tokens")? == PROMPT_TOKENS as f64, "{generate:?}");
    ensure!(number(generate, "gen_ai.usage.output_tokens")? == ANSWER_TOKENS as f64, "{generate:?}");
    ensure!(number(generate, "baton.cached_tokens")? == 0.0, "{generate:?}");
    for key in ["gen_ai.response.model", "baton.placement.reason", "baton.ttft_ms", "baton.queue_ms"] {
        ensure!(generate.attributes.contains_key(key), "{key} is missing: {generate:?}");
    }
    Ok(())
}

/// One request was prefilled here and shipped, and one was prefilled where it decodes.
fn check_phases(worker: &Scrape, process: &str) -> anyhow::Result<()> {
    let ships = process == "prefill-0";
    let phases = [
        ("prefill.queue", 1.0),
        ("prefill.compute", 1.0),
        ("decode.reserve", f64::from(u8::from(ships))),
        ("kv.transfer", f64::from(u8::from(ships))),
        ("kv.commit", f64::from(u8::from(ships))),
        ("decode.await_kv", f64::from(u8::from(!ships))),
        ("decode.generate", f64::from(2 * u8::from(!ships))),
    ];
    for (phase, expected) in phases {
        let of = [&format!("phase=\"{phase}\""), "pool=\"default\"", "model=\"random:"];
        let count = worker.find("baton_worker_phase_seconds_count", &of)?;
        ensure!(count == expected, "{phase} was over {count} times");
    }
    let shipped = phases[3].1;
    ensure!(worker.find("baton_kv_exposed_seconds_count", &[])? == shipped);
    ensure!(worker.find("baton_kv_transfer_rate_bytes_per_second_count", &[])? <= shipped);
    // Both prompts were computed, one on each worker, and every token but the first of a prompt took a row.
    ensure!(worker.find("baton_engine_rows_total", &["kind=\"prefill\""])? == PROMPT_TOKENS as f64);
    let decoded = if ships { 0.0 } else { 2.0 * (ANSWER_TOKENS - 1) as f64 };
    ensure!(worker.find("baton_engine_rows_total", &["kind=\"decode\""])? == decoded);
    ensure!(worker.find("baton_kv_used_ratio", &[])? == 0.0 && worker.find("baton_ready", &[])? == 1.0);
    Ok(())
}

async fn check_metrics(up: &Up) -> anyhow::Result<()> {
    let get = async |process: &str| {
        let scrape = Scrape::of(&up.metrics(process)?).await?;
        let text = scrape.text();
        ensure!(text.trim_end().ends_with("# EOF"), "{process}: not whole:\n{text}");
        Ok(scrape)
    };
    let pool = "pool=\"default\"";
    let router = get("router").await?;
    ensure!(router.find("baton_build_info", &["service=\"baton-router\""])? == 1.0);
    ensure!(router.find("baton_router_requests_total", &["outcome=\"ok\"", pool, "model=\"random:"])? == 2.0);
    ensure!(router.find("baton_router_time_to_first_token_seconds_count", &[pool, "model=\"random:"])? == 2.0);
    ensure!(router.find("baton_router_membership_up", &[])? == 1.0 && router.find("baton_ready", &[])? == 1.0);
    for role in ["role=\"prefill\"", "role=\"decode\""] {
        for change in ["joined", "admitted"] {
            let of = [role, &format!("change=\"{change}\""), pool, "model=\"random:"];
            ensure!(router.find("baton_router_membership_changes_total", &of)? == 1.0, "{role} {change}");
        }
    }
    for (process, direction) in [("prefill-0", "sent"), ("decode-0", "adopted")] {
        let worker = get(process).await?;
        check_phases(&worker, process).with_context(|| process.to_owned())?;
        let mut blocks = 0.0;
        for state in ["free", "referenced", "cached", "quarantined"] {
            blocks += worker.find("baton_kv_blocks", &[&format!("state=\"{state}\""), pool, "model=\"random:"])?;
        }
        // 1 MiB in blocks of 16 tokens.
        ensure!(blocks == ((1u64 << 20) / (16 * KV_BYTES)) as f64, "{process} has {blocks} blocks");
        let moved = worker.find("baton_kv_transfer_bytes_total", &[&format!("direction=\"{direction}\""), pool])?;
        ensure!(moved == (PROMPT_TOKENS * KV_BYTES) as f64, "{process} {direction} {moved} bytes");
        let (peer, way) = if process == "decode-0" { ("prefill-0", "received") } else { ("decode-0", "sent") };
        let of = [&format!("peer=\"{peer}\""), &format!("direction=\"{way}\""), "outcome=\"adopted\"", pool];
        ensure!(worker.find("baton_kv_peer_handoffs_total", &of)? == 1.0, "{process} and {peer}");
        ensure!(worker.find("baton_build_info", &[&format!("baton-{}-worker", &process[..process.len() - 2])])? == 1.0);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn one_request_is_one_trace() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let (model, otlp) = (format!("--model={MODEL}"), format!("--otlp={}", collector.url()));
    let up = Up::start(&[&model, &otlp, "--kv-cache-bytes=1MiB"])?;
    let api = Api::new(up.openai()?);
    let traceparent = format!("00-{}-{}-01", CALLER.0, CALLER.1);
    let remote = ask(&api, "remote", &[("traceparent", &traceparent)]).await?;
    ensure!(remote == CALLER.0, "the answer names trace {remote}");
    let local = ask(&api, "local", &[]).await?;
    // A worker counts the end of a phase a moment after the answer.
    eventually(async || check_metrics(&up).await).await?;

    let arrived = |spans: &[CollectedSpan]| {
        tree(spans, &remote).len() >= REMOTE.len() && tree(spans, &local).len() >= LOCAL.len()
    };
    let spans = collector.wait(EXPORT_MAX, arrived).await.unwrap_or_else(|came| came);
    ensure!(tree(&spans, &remote) == REMOTE, "remote: {:#?}", tree(&spans, &remote));
    ensure!(tree(&spans, &local) == LOCAL, "local: {:#?}", tree(&spans, &local));
    check_remote(&spans, &remote)?;
    up.stop()?;
    // The flush at the end brought nothing that belongs to no request.
    let strange: Vec<_> =
        collector.spans().into_iter().filter(|s| s.trace_id != remote && s.trace_id != local).collect();
    ensure!(strange.is_empty(), "{strange:#?}");
    Ok(())
}

/// A prompt that takes its time.
const SLOW_MODEL: &str = "random:vocab=300,context=2048,layers=6,hidden=256,heads=4,seed=3";
const POD: &str = "k8s.pod.name=worker-7,k8s.namespace.name=serving";

/// A transfer of which nobody waits may end in the moment between the first token and its arrival at the router, and then looks as if the
/// stream had waited for it. One that is waited for looks like that each time. So many attempts, since a busy machine lengthens that moment.
const ATTEMPTS: u64 = 20;

async fn first_token_lies_on_compute(
    api: &Api,
    collector: &Collector,
    policy: &str,
    whole: usize,
    attempt: u64,
) -> anyhow::Result<()> {
    let prompt: Vec<u64> = (0..1_500).map(|i| (i + whole as u64 + 17 * attempt) % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": true,
        "prefill_policy": policy});
    let answer = api.post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let trace = answer.header("x-trace-id").to_owned();
    let arrived = |spans: &[CollectedSpan]| tree(spans, &trace).len() >= whole;
    let spans = collector.wait(EXPORT_MAX, arrived).await.unwrap_or_else(|came| came);
    let spans: Vec<CollectedSpan> = spans.into_iter().filter(|span| span.trace_id == trace).collect();
    let path = critical_path(&spans)?;
    let stream = spans.iter().find(|span| span.name == "stream").context("stream")?.time_ns.start / 1_000;
    let until_first = |name: &str| -> u64 {
        let of = path.iter().filter(|section| name.is_empty() || section.span == name);
        of.map(|section| section.time_us.end.min(stream).saturating_sub(section.time_us.start)).sum()
    };
    let (compute, all) = (until_first("prefill.compute"), until_first(""));
    ensure!(2 * compute > all, "{policy}: {compute} of {all} us to the first token: {path:#?}");
    for waits in ["claim", "decode.await_kv", "kv.transfer"] {
        ensure!(until_first(waits) == 0, "{policy}: {waits} is on the path to the first token: {path:#?}");
    }
    for span in &spans {
        let told = ["k8s.pod.name", "k8s.namespace.name"].map(|key| span.resource.get(key).map(String::as_str));
        ensure!(told == [Some("worker-7"), Some("serving")], "{} of {}: {told:?}", span.name, span.service);
    }
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn the_critical_path_of_a_first_token_lies_on_its_compute() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let (model, otlp) = (format!("--model={SLOW_MODEL}"), format!("--otlp={}", collector.url()));
    let up = Up::start_with(&[&model, &otlp, "--kv-cache-bytes=64MiB"], &[("OTEL_RESOURCE_ATTRIBUTES", POD)])?;
    let api = Api::new(up.openai()?);
    for (policy, whole) in [("remote", REMOTE.len()), ("local", LOCAL.len())] {
        let mut attempt = 0;
        while let Err(error) = first_token_lies_on_compute(&api, &collector, policy, whole, attempt).await {
            attempt += 1;
            ensure!(attempt < ATTEMPTS, "never, and last: {error:#}");
        }
    }
    up.stop()
}

/// What `baton trace` prints of a request once all of it has ended: phases whose end comes after the answer's take a moment.
async fn shown(up: &Up, id: &str, rows: usize) -> anyhow::Result<String> {
    let (server, until) = (format!("--router=http://{}", up.grpc()?), Instant::now() + EXPORT_MAX);
    loop {
        let output = baton(&["trace", id, &server])?;
        let text = String::from_utf8(output.stdout)?;
        if output.status.success() && text.lines().filter(|line| line.contains('█')).count() >= rows {
            return Ok(text);
        }
        ensure!(Instant::now() < until, "{id}:\n{text}{}", String::from_utf8_lossy(&output.stderr));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

/// Fails unless the row of `name` says all of this.
fn row_says(text: &str, name: &str, says: &[&str]) -> anyhow::Result<()> {
    let row = text.lines().find(|line| line.trim_start().starts_with(&format!("{name} ")));
    let row = row.with_context(|| format!("no {name} in:\n{text}"))?;
    ensure!(says.iter().all(|word| row.contains(word)), "not all of {says:?} in {row:?}");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_is_shown_where_the_collector_is_dead() -> anyhow::Result<()> {
    let unused = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    let dead = format!("--otlp=http://{}", unused.local_addr()?);
    drop(unused);
    let up = Up::start(&[&format!("--model={MODEL}"), &dead, "--kv-cache-bytes=1MiB"])?;
    let api = Api::new(up.openai()?);
    let trace = ask(&api, "remote", &[("x-request-id", "shown-1")]).await?;
    ask(&api, "local", &[("x-request-id", "shown-2")]).await?;
    let text = shown(&up, "shown-1", REMOTE.len()).await?;
    ensure!(text.starts_with(&format!("request shown-1, trace {trace}, model random:")), "{text}");
    ensure!(text.contains("300 tokens in (0 cached), 12 out, first token after "), "{text}");
    row_says(&text, "generate", &["router", " 0.00 "])?;
    row_says(&text, "claim", &["router", "-> decode-0"])?;
    row_says(&text, "decode.await_kv", &["decode-0", "153.6 kB"])?;
    row_says(&text, "decode.generate", &["decode-0", "11 tokens out"])?;
    row_says(&text, "prefill", &["router", "-> prefill-0"])?;
    for phase in ["prefill.queue", "prefill.compute", "decode.reserve", "kv.commit", "kv.exposed"] {
        row_says(&text, phase, &["prefill-0"])?;
    }
    row_says(&text, "kv.transfer", &["prefill-0", "153.6 kB, ucx, ", " GB/s over ", " ms, exposed ", " ms"])?;
    let local = shown(&up, "shown-2", LOCAL.len()).await?;
    row_says(&local, "prefill.compute", &["decode-0", "300 tokens in"])?;
    ensure!(!local.contains("kv.transfer"), "{local}");
    let by_trace = shown(&up, &trace, REMOTE.len()).await?;
    ensure!(by_trace == text, "the trace's id names the same:\n{by_trace}{text}");

    let folder = tempfile::tempdir()?;
    let (file, server) = (folder.path().join("trace.html"), format!("--server=http://{}", up.grpc()?));
    let output = baton(&["trace", "shown-1", &server, "--html", file.to_str().context("a path of text")?])?;
    ensure!(output.status.success(), "{output:?}");
    let page = std::fs::read_to_string(&file)?;
    ensure!(
        page.matches("<details").count() == REMOTE.len() && page.contains("<td>baton.kv.bytes</td><td>153600</td>")
    );
    for process in ["router", "prefill-0", "decode-0"] {
        let until = Instant::now() + EXPORT_MAX;
        loop {
            let scrape = Scrape::of(&up.metrics(process)?).await?;
            ensure!(scrape.find("baton_spans_exported_total", &[])? == 0.0);
            // All that is held was to be exported.
            if scrape.find("baton_spans_lost_total", &["reason=\"export_failed\""])?
                == scrape.find("baton_spans_held", &[])?
            {
                break;
            }
            ensure!(Instant::now() < until, "{process} does not count what it lost:\n{}", scrape.text());
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
    let unknown = baton(&["trace", "never", &server])?;
    let error = String::from_utf8(unknown.stderr)?;
    ensure!(!unknown.status.success() && error.contains("no request or trace \"never\" among the last 2"), "{error}");
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_request_is_kept_by_every_process_although_the_head_left_it_out() -> anyhow::Result<()> {
    let collector = Collector::start().await?;
    let (model, otlp) = (format!("--model={MODEL}"), format!("--otlp={}", collector.url()));
    let flags = ["--grpc-port=0", "--http-port=0", &model, &otlp, "--kv-cache-bytes=1MiB"];
    let variables = [("BATON_TELEMETRY__TRACE_SAMPLE_RATIO", "0"), ("BATON_TELEMETRY__SLOW_FIRST_TOKEN_MS", "1")];
    let mut up = Up::spawn(&flags, &variables)?;
    up.wait_serving()?;
    let trace = ask(&Api::new(up.openai()?), "remote", &[]).await?;
    let expected: Vec<_> = REMOTE.map(|line| line.replace("(caller)", "(none)")).into();
    let arrived = |spans: &[CollectedSpan]| tree(spans, &trace).len() >= expected.len();
    let spans = collector.wait(EXPORT_MAX, arrived).await.unwrap_or_else(|came| came);
    ensure!(tree(&spans, &trace) == expected, "{:#?}", tree(&spans, &trace));
    let root = spans.iter().find(|span| span.name == "generate").context("generate")?;
    ensure!(root.attributes.get("baton.slow").is_some_and(|slow| slow == "true"), "{root:?}");
    let metrics = up.metrics("router")?;
    eventually(async || {
        let kept = find(&metrics, "baton_router_traces_kept_slow_total", &[]).await?;
        ensure!(kept == 1.0, "{kept} traces are kept");
        Ok(())
    })
    .await?;
    up.stop()
}

#[tokio::test(flavor = "multi_thread")]
async fn log_lines_of_every_process_name_the_request_and_its_trace() -> anyhow::Result<()> {
    // An answer that is not over before the client has gone.
    let model = format!("--model={}", MODEL.replace("context=1024", "context=100000"));
    let log = "--log=info,baton_router=debug,baton_decode_worker=debug";
    let flags = ["--grpc-port=0", "--http-port=0", &model, "--kv-cache-bytes=64MiB", log];
    let mut up = Up::spawn(&flags, &[("BATON_TELEMETRY__LOG_FORMAT", "json")])?;
    up.wait_serving()?;
    let mut client = InferenceClient::connect(format!("http://{}", up.grpc()?)).await?;
    let tokens = v1::TokenIds { ids: (0..PROMPT_TOKENS as u32).map(|i| i % 250).collect() };
    let request = v1::GenerateRequest {
        prompt: vec![v1::Segment { kind: Some(v1::segment::Kind::Tokens(tokens)) }],
        sampling: Some(v1::Sampling { ignore_eos: true, ..Default::default() }),
        request_id: "logged-1".into(),
        ..Default::default()
    };
    let mut answer = client.generate(request).await?.into_inner();
    let trace = answer.message().await?.context("a first message")?.trace_id;
    // A client that goes away is told of by all who worked for it.
    drop(answer);
    let tells = |log: &str, target: &str| {
        let lines = log.lines().filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
        let mut spans = lines.filter(|line| line["target"] == target).flat_map(|line| {
            let spans = line["spans"].as_array().cloned().unwrap_or_default();
            spans.into_iter().filter(|span| span["trace_id"] == trace.as_str())
        });
        spans.any(|span| span["request_id"].as_str().is_some_and(|id| id.starts_with("logged-1")))
    };
    let until = Instant::now() + EXPORT_MAX;
    while !["baton_router::flow::end", "baton_decode_worker::service"].iter().all(|t| tells(&up.stderr(), t)) {
        ensure!(Instant::now() < until, "not all lines name {trace}:\n{}", up.stderr());
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    up.stop()
}
