//! What alerts, dashboard and autoscalers ask of labels: a value that the code never says would make an expression empty, and an alert silent.

use crate::alerts::{ALERTS, rules};
use crate::helm::{items, manifests, of_kind, path, render};
use anyhow::{Context, ensure};
use baton_tests::label_values::{self, LabelValues};
use serde_json::Value;
use std::fs;

/// Labels whose values come from records and from whoever scrapes.
const OPEN: [&str; 9] = ["namespace", "pod", "instance", "job", "model", "pool", "peer", "lanes", "le"];

/// `metric{label="value"}` of a text: metric, label and values, alternatives of a pattern apart.
fn asked(text: &str) -> Vec<(String, String, Vec<String>)> {
    let word = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let mut found = Vec::new();
    for (at, _) in text.match_indices("baton_") {
        let rest = &text[at..];
        let end = rest.find(|c| !word(c)).unwrap_or(rest.len());
        let metric =
            ["_bucket", "_sum", "_count"].iter().find_map(|s| rest[..end].strip_suffix(s)).unwrap_or(&rest[..end]);
        let Some(mut inner) = rest[end..].strip_prefix('{') else { continue };
        loop {
            inner = inner.trim_start_matches([',', ' ']);
            let label = inner.find(|c| !word(c)).unwrap_or(0);
            let (name, more) = inner.split_at(label);
            let Some(value) = more.trim_start_matches(['=', '~', '!', ' ']).strip_prefix('"') else { break };
            let Some((value, after)) = value.split_once('"') else { break };
            if !name.is_empty() {
                found.push((metric.to_owned(), name.to_owned(), value.split('|').map(str::to_owned).collect()));
            }
            inner = after;
        }
    }
    found
}

/// How many matchers of a fixed set a text has; an error where one asks for what is never there.
fn check(told: &LabelValues, text: &str) -> anyhow::Result<usize> {
    let mut checked = 0;
    for (metric, label, values) in asked(text) {
        if OPEN.contains(&label.as_str()) {
            continue;
        }
        let known = told.get(&(metric.clone(), label.clone()));
        let known = known.with_context(|| format!("docs/metrics.md tells no values of {label} of {metric}: {text}"))?;
        let never: Vec<_> = values.iter().filter(|value| !known.contains(*value)).collect();
        ensure!(never.is_empty(), "{label} of {metric} is never {never:?}: {text}");
        checked += 1;
    }
    Ok(checked)
}

#[test]
fn a_value_that_is_never_there_is_told() -> anyhow::Result<()> {
    let told = label_values::told()?;
    let sound =
        "sum(rate(baton_kv_handoffs_total{namespace=\"a\", direction=\"received\",outcome!~\"adopted|aborted\"}[5m]))";
    ensure!(check(&told, sound)? == 2);
    for wrong in [
        "baton_kv_handoffs_total{direction=\"in\"}",
        "baton_kv_handoffs_total{pool=\"p\", outcome=~\"adopted|abandoned\"}",
        "sum(rate(baton_worker_phase_seconds_bucket{phase=\"prefill.wait\"}[5m]))",
        "baton_router_requests_total{result=\"ok\"}",
    ] {
        ensure!(check(&told, wrong).is_err(), "{wrong}");
    }
    Ok(())
}

#[test]
fn expressions_ask_for_values_that_the_code_can_say() -> anyhow::Result<()> {
    let told = label_values::told()?;
    let mut of_alerts = 0;
    for rule in rules()? {
        of_alerts += check(&told, rule["expr"].as_str().context("a rule without an expression")?)?;
    }
    ensure!(of_alerts >= 8, "{of_alerts} in {ALERTS}");
    let dashboard: Value = serde_json::from_slice(&fs::read(path("deploy/helm/baton/files/baton.json"))?)?;
    let mut of_dashboard = 0;
    for target in items(&dashboard["panels"]).flat_map(|panel| items(&panel["targets"])) {
        of_dashboard += check(&told, target["expr"].as_str().unwrap_or_default())?;
    }
    ensure!(of_dashboard >= 8, "{of_dashboard} on the dashboard");
    let manifests = manifests(&render("everything")?)?;
    for trigger in of_kind(&manifests, "ScaledObject").flat_map(|scaled| items(&scaled["spec"]["triggers"])) {
        check(&told, trigger["metadata"]["query"].as_str().context("no query")?)?;
    }
    // Nor do the series with which the alerts are tried.
    let tried = check(&told, &fs::read_to_string(path("tests/chart/alerts.yaml"))?)?;
    ensure!(tried >= 8, "{tried} in tests/chart/alerts.yaml");
    Ok(())
}
