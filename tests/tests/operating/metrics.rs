//! The tables of docs/metrics.md and what the processes export agree: names, types, labels, and who exports them.

use anyhow::{Context, ensure};
use baton_tests::eventually::eventually;
use baton_tests::http::Api;
use baton_tests::label_values;
use baton_tests::processes::Up;
use baton_tests::scrape::Scrape;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";

/// A metric: its type and its labels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Metric {
    kind: String,
    labels: BTreeSet<String>,
    may_never_happen: bool,
}

fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

/// The tables, by heading.
fn told() -> anyhow::Result<BTreeMap<String, BTreeMap<String, Metric>>> {
    let text = fs::read_to_string(root().join("docs/metrics.md"))?;
    let mut tables: BTreeMap<String, BTreeMap<String, Metric>> = BTreeMap::new();
    let mut heading = String::new();
    for line in text.lines() {
        if let Some(next) = line.strip_prefix("## ") {
            heading = next.to_owned();
        }
        let cells: Vec<&str> = line.trim_matches('|').split(" | ").map(str::trim).collect();
        let [name, kind, labels, what] = cells[..] else { continue };
        let Some(name) = name.strip_prefix('`').and_then(|n| n.strip_suffix('`')) else { continue };
        let labels = labels.split(", ").filter(|l| !l.is_empty()).map(str::to_owned).collect();
        let metric = Metric { kind: kind.to_owned(), labels, may_never_happen: what.ends_with('*') };
        let former = tables.entry(heading.clone()).or_default().insert(name.to_owned(), metric);
        ensure!(former.is_none(), "{name} stands twice");
    }
    Ok(tables)
}

/// What a process exports; a family without series has no labels to compare.
fn exported(scrape: &Scrape) -> BTreeMap<String, Metric> {
    let mut found: BTreeMap<String, Metric> = BTreeMap::new();
    for line in scrape.text().lines().filter_map(|l| l.strip_prefix("# TYPE ")) {
        let Some((family, kind)) = line.split_once(' ') else { continue };
        let suffix = match kind {
            "counter" => "_total",
            "info" => "_info",
            _ => "",
        };
        let name = format!("{family}{suffix}");
        let sample = if kind == "histogram" { format!("{family}_count") } else { name.clone() };
        let series = scrape.text().lines().find(|l| l.split(['{', ' ']).next() == Some(sample.as_str()));
        let labels = series.and_then(|s| Some(s.split_once('{')?.1.rsplit_once('}')?.0)).unwrap_or_default();
        // No value holds `",`: labels come from names and fixed sets.
        let labels = labels.split("\",").filter_map(|l| Some(l.split_once('=')?.0.to_owned())).collect();
        found.insert(name, Metric { kind: kind.to_owned(), labels, may_never_happen: series.is_none() });
    }
    found
}

/// Compares the tables with what the processes export now; which metrics have series.
async fn agree(up: &Up, told: &BTreeMap<String, BTreeMap<String, Metric>>) -> anyhow::Result<BTreeSet<String>> {
    let router = Scrape::of(&up.metrics("router")?).await?;
    let index = |what: &str| router.find(&format!("baton_router_index_{what}"), &[]);
    ensure!((index("workers")?, index("lost_workers")?) == (2.0, 0.0), "{}", router.text());
    let table = |name: &str| told.get(name).with_context(|| format!("docs/metrics.md has no table {name:?}"));
    let mut with_series: BTreeSet<String> = BTreeSet::new();
    let of_routers = ["Every process", "Routers", "vLLM's names"].map(table);
    let of_workers = ["Every process", "Workers"].map(table);
    for (processes, tables) in [(&["router"][..], &of_routers[..]), (&["prefill-0", "decode-0"], &of_workers)] {
        let mut expected: BTreeMap<&String, &Metric> = BTreeMap::new();
        for table in tables {
            expected.extend(table.as_ref().map_err(|error| anyhow::anyhow!("{error}"))?.iter());
        }
        for process in processes {
            let exported = exported(&Scrape::of(&up.metrics(process)?).await?);
            for (name, metric) in &exported {
                let told =
                    expected.get(name).with_context(|| format!("{process} exports {name}, which is not told"))?;
                ensure!(told.kind == metric.kind, "{name} is a {}", metric.kind);
                let no_series = metric.may_never_happen;
                ensure!(no_series || told.labels == metric.labels, "{process}: {name} has labels {:?}", metric.labels);
                if !no_series {
                    with_series.insert(name.clone());
                }
            }
            let missing = expected.iter().filter(|(name, m)| !m.may_never_happen && !exported.contains_key(**name));
            let missing: Vec<_> = missing.map(|(name, _)| name).collect();
            ensure!(missing.is_empty(), "{process} does not export {missing:?}");
        }
    }
    Ok(with_series)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_tables_and_the_export_agree() -> anyhow::Result<()> {
    let flags = [&*format!("--model={MODEL}"), "--kv-cache-bytes=1MiB"];
    let up = Up::start_with(&flags, &[("BATON_METRICS__VLLM_NAMES", "true")])?;
    let api = Api::new(up.openai()?);
    let prompt: Vec<u64> = (0..300).map(|i| i % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 4, "ignore_eos": true, "prefill_policy": "remote"});
    let answer = api.post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let told = told()?;
    // What ends with the answer, and what workers tell of their caches, comes a moment after it.
    let with_series = eventually(async || agree(&up, &told).await).await?;
    // What did not happen here must at least be counted somewhere.
    let sources = ["router/src/metrics/mod.rs", "router/src/metrics/cache.rs", "worker/src/metrics.rs"]
        .map(|file| root().join(file));
    let source = sources.iter().map(fs::read_to_string).collect::<Result<String, _>>()?;
    for (name, _) in
        told.values().flatten().filter(|(name, metric)| metric.may_never_happen && !with_series.contains(*name))
    {
        let registered = name.trim_start_matches("baton_").trim_end_matches("_total");
        ensure!(source.contains(&format!("\"{registered}\"")), "nobody registers {name}");
    }
    up.stop()?;
    Ok(())
}

/// Four answers of 900 tokens each in a pool of 1,024, which overlap however late some of them come: sequences give their blocks back, and
/// what is computed again is told.
#[tokio::test(flavor = "multi_thread")]
async fn what_is_preempted_and_computed_again_is_counted() -> anyhow::Result<()> {
    const PROMPT: usize = 100;
    const ANSWER: usize = 800;
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=512KiB", "--prefill=0"])?;
    let api = Api::new(up.openai()?);
    let answers = (0..4).map(|first| {
        let prompt: Vec<usize> = (0..PROMPT).map(|i| (first + i * 7) % 250).collect();
        let body = json!({"prompt": prompt, "max_tokens": ANSWER, "ignore_eos": true, "cache": {"off": true}});
        api.post("completions", body)
    });
    for answer in futures::future::try_join_all(answers).await? {
        ensure!(answer.status == 200 && answer.body["usage"]["completion_tokens"] == ANSWER, "{answer:?}");
    }
    eventually(async || told_of_preemptions(&up, PROMPT, ANSWER).await).await?;
    up.stop()
}

/// The counts of four answers of `answer` tokens to prompts of `prompt` tokens.
async fn told_of_preemptions(up: &Up, prompt: usize, answer: usize) -> anyhow::Result<()> {
    let worker = Scrape::of(&up.metrics("decode-0")?).await?;
    let value = |name: &str, labels: &[&str]| worker.find(name, labels);
    let (preemptions, again) =
        (value("baton_preemptions_total", &[])?, value("baton_engine_recomputed_tokens_total", &[])?);
    ensure!(preemptions >= 1.0, "four fit at once:\n{}", worker.text());
    // Whoever gives way has its prompt, and at least a token.
    ensure!(again >= preemptions * (prompt + 1) as f64, "{again} tokens of {preemptions} sequences");
    let (prompts, answers) = ((4 * prompt) as f64, (4 * answer) as f64);
    ensure!(value("baton_generated_tokens_total", &[])? == answers);
    let (prefill, decode) = (&["kind=\"prefill\""], &["kind=\"decode\""]);
    let prefilled = value("baton_engine_rows_total", prefill)?;
    ensure!(prefilled >= prompts + preemptions * prompt as f64, "{prefilled} rows, {preemptions}: {}", worker.text());
    // The first token of each, and the one behind each computation, are of prefill rows.
    let decoded = value("baton_engine_rows_total", decode)?;
    ensure!(
        decoded > 0.0 && decoded <= answers - 4.0 - preemptions,
        "{decoded} rows, {preemptions}: {}",
        worker.text()
    );
    ensure!(value("baton_kv_used_ratio", &[])? == 0.0 && value("baton_sequences_running", &[])? == 0.0);
    let router = Scrape::of(&up.metrics("router")?).await?;
    for (name, expected) in [
        ("baton_router_prompt_tokens_total", prompts),
        ("baton_router_completion_tokens_total", answers),
        ("baton_prompt_tokens_total", prompts),
        ("baton_cached_tokens_total", 0.0),
        ("baton_cache_write_tokens_total", 0.0),
        // Of a request that went on elsewhere; here an engine lost blocks.
        ("baton_recomputed_tokens_total", 0.0),
        ("baton_router_replayed_tokens_total", 0.0),
    ] {
        ensure!(router.sum(name, &[]) == expected, "{name} is {}, not {expected}", router.sum(name, &[]));
    }
    Ok(())
}

/// Where the code names the values of labels.
enum Source {
    /// The arms of `name` of an enum.
    Enum(&'static str, &'static str),
    /// Every text between these two.
    Between(&'static str, &'static str, &'static str),
}

/// The texts between `before` and `after`, of one line.
fn between<'a>(text: &'a str, before: &str, after: &str) -> impl Iterator<Item = &'a str> {
    let name = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    text.split(before).skip(1).filter_map(move |rest| {
        let end = rest.find(|c| !name(c))?;
        rest[end..].starts_with(after).then(|| &rest[..end])
    })
}

impl Source {
    fn values(&self) -> anyhow::Result<BTreeSet<String>> {
        let (file, before, after) = match self {
            Self::Enum(file, _) => (file, "=> \"", "\""),
            Self::Between(file, before, after) => (file, *before, *after),
        };
        let text = fs::read_to_string(root().join(file))?;
        let text = match self {
            Self::Enum(_, name) => {
                let of_enum = text.split_once(&format!("\nimpl {name} {{")).with_context(|| format!("no {name}"))?.1;
                let of_name = of_enum.split_once("fn name(").context("it has no name")?.1;
                of_name.split_once("\n    }\n").context("its name does not end")?.0
            }
            Self::Between(..) => text.as_str(),
        };
        let found: BTreeSet<String> = between(text, before, after).map(str::to_owned).collect();
        ensure!(!found.is_empty(), "{file} names no values any more");
        Ok(found)
    }
}

#[test]
fn labels_have_the_values_that_the_table_tells() -> anyhow::Result<()> {
    use Source::{Between, Enum};
    let (worker, failures) = ("worker/src/metrics.rs", Enum("kv-transfer/src/error.rs", "HandoffFailure"));
    let follower = "router/src/prefixes/follower.rs";
    let role = Enum("types/src/instance.rs", "Role");
    let main = |file| Between(file, "#[command(name = \"", "\"");
    let mains = [main("router/src/main.rs"), main("prefill-worker/src/main.rs"), main("decode-worker/src/main.rs")];
    let lost = Between("node/src/metrics/mod.rs", "(\"", "\", &counters.lost");
    let window = Between("router/src/metrics/cache.rs", "(\"window\", \"", "\")");
    let change = Enum("router/src/metrics/changes.rs", "MembershipChange");
    // metric, label, where its values are named, values that stand alone
    let sources: [(&str, &str, &[Source], &[&str]); 29] = [
        ("baton_build_info", "service", &mains, &[]),
        ("baton_spans_lost_total", "reason", &[lost], &[]),
        ("baton_router_requests_total", "outcome", &[Enum("types/src/error.rs", "ErrorKind")], &["ok"]),
        ("baton_router_placements_total", "reason", &[Enum("router/src/placement/decision.rs", "Reason")], &[]),
        ("baton_router_retries_total", "reason", &[Enum("router/src/recovery/mod.rs", "Step")], &[]),
        ("baton_router_given_up_total", "reason", &[Enum("router/src/recovery/mod.rs", "GiveUp")], &[]),
        ("baton_router_auth_refused_total", "reason", &[Enum("router/src/auth/denied.rs", "Denied")], &[]),
        ("baton_router_problems", "kind", &[Enum("router/src/status/judge.rs", "Kind")], &[]),
        ("baton_router_ready_workers", "role", std::slice::from_ref(&role), &[]),
        ("baton_router_unpaired_workers", "role", std::slice::from_ref(&role), &[]),
        ("baton_router_membership_changes_total", "role", std::slice::from_ref(&role), &[]),
        ("baton_router_membership_changes_total", "change", &[change], &[]),
        ("baton_cache_hit_ratio", "window", &[window], &[]),
        ("baton_prefix_cache_removed_blocks_total", "reason", &[Between(worker, "(\"reason\", \"", "\")")], &[]),
        ("baton_router_index_events_total", "kind", &[Between(follower, "(\"", "\", CacheChange::")], &[]),
        ("baton_router_index_snapshots_total", "reason", &[Between(follower, "{ \"", "\" }")], &[]),
        ("baton_router_index_forgotten_total", "reason", &[Enum(follower, "Dropped")], &[]),
        ("baton_kv_blocks", "state", &[Between(worker, "(\"", "\", load.blocks.")], &[]),
        ("baton_engine_rows_total", "kind", &[Between(worker, "(\"kind\", \"", "\")")], &[]),
        ("baton_speculation_proposed_tokens_total", "kind", &[Between(worker, "proposer(\"", "\"")], &[]),
        ("baton_speculation_accepted_tokens_total", "kind", &[Between(worker, "proposer(\"", "\"")], &[]),
        ("baton_device_memory_bytes", "kind", &[Between(worker, "(\"", "\", memory.")], &[]),
        ("baton_worker_phase_seconds", "phase", &[Enum("worker/src/phases.rs", "WorkerPhase")], &[]),
        ("baton_kv_transfer_bytes_total", "direction", &[Between(worker, "(\"direction\", \"", "\")")], &[]),
        ("baton_kv_handoffs_total", "direction", &[Between(worker, "outcomes(\"", "\"")], &[]),
        ("baton_kv_handoffs_total", "outcome", std::slice::from_ref(&failures), &["adopted"]),
        ("baton_kv_peer_handoffs_total", "direction", &[Between(worker, "(\"", "\", &peer.")], &[]),
        ("baton_kv_peer_handoffs_total", "outcome", std::slice::from_ref(&failures), &["adopted"]),
        ("baton_kv_refused_total", "reason", &[Enum("kv-transfer/src/error.rs", "RefuseReason")], &[]),
    ];
    let mut named = label_values::LabelValues::new();
    for (metric, label, of, alone) in sources {
        let mut values: BTreeSet<String> = alone.iter().map(|value| (*value).to_owned()).collect();
        for source in of {
            values.extend(source.values().with_context(|| format!("{label} of {metric}"))?);
        }
        named.insert((metric.to_owned(), label.to_owned()), values);
    }
    let told = label_values::told()?;
    for (of, values) in &named {
        ensure!(told.get(of) == Some(values), "{of:?} has {values:?}, and docs/metrics.md tells {:?}", told.get(of));
    }
    ensure!(named.len() == told.len(), "docs/metrics.md tells values that nothing is compared with");
    Ok(())
}
