//! The tables of docs/metrics.md and what the processes export agree: names, types, labels, and who exports them.

use anyhow::{Context, ensure};
use baton_tests::http::Api;
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

#[tokio::test(flavor = "multi_thread")]
async fn the_tables_and_the_export_agree() -> anyhow::Result<()> {
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=1MiB"])?;
    let api = Api::new(up.openai()?);
    let prompt: Vec<u64> = (0..300).map(|i| i % 250).collect();
    let body = json!({"prompt": prompt, "max_tokens": 4, "ignore_eos": true, "prefill_policy": "remote"});
    let answer = api.post("completions", body).await?;
    ensure!(answer.status == 200, "{answer:?}");
    let told = told()?;
    let table = |name: &str| told.get(name).with_context(|| format!("docs/metrics.md has no table {name:?}"));
    let mut with_series: BTreeSet<String> = BTreeSet::new();
    for (processes, heading) in [(&["router"][..], "Routers"), (&["prefill-0", "decode-0"], "Workers")] {
        let expected: BTreeMap<_, _> = table("Every process")?.iter().chain(table(heading)?).collect();
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
    // What did not happen here must at least be counted somewhere.
    let source = fs::read_to_string(root().join("router/src/metrics.rs"))?;
    for (name, _) in
        told.values().flatten().filter(|(name, metric)| metric.may_never_happen && !with_series.contains(*name))
    {
        let registered = name.trim_start_matches("baton_").trim_end_matches("_total");
        ensure!(source.contains(&format!("\"{registered}\"")), "nobody registers {name}");
    }
    up.stop()?;
    Ok(())
}
