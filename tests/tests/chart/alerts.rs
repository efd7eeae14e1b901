//! Alerts: sound expressions, each fires when it must and has its text; the dashboard is what Grafana reads.

use crate::helm::{items, manifests, of_kind, path, render, render_values, tool};
use anyhow::{Context, ensure};
use serde_json::Value;
use std::collections::BTreeSet;
use std::fs;

const PROMTOOL: &str = "target/prometheus/usr/bin/promtool";
pub(crate) const ALERTS: &str = "deploy/helm/baton/files/alerts.yaml";

fn promtool(arguments: &[&str]) -> anyhow::Result<()> {
    let output = tool(PROMTOOL, arguments, "")?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{said}");
    Ok(())
}

/// The rules, read as YAML is: as one manifest of the kind that holds them.
pub(crate) fn rules() -> anyhow::Result<Vec<Value>> {
    let text = fs::read_to_string(path(ALERTS))?;
    let manifest = format!("kind: PrometheusRule\nmetadata: {{name: alerts}}\n{text}");
    let read = manifests(&manifest)?.into_iter().next().context("no rules")?;
    Ok(items(&read["groups"]).flat_map(|group| items(&group["rules"])).cloned().collect())
}

#[test]
fn rules_are_sound_and_fire_when_they_must() -> anyhow::Result<()> {
    promtool(&["check", "rules", &path(ALERTS).display().to_string()])?;
    promtool(&["test", "rules", &path("tests/chart/alerts.yaml").display().to_string()])
}

#[test]
fn every_rule_has_its_text_and_a_case() -> anyhow::Result<()> {
    let rules = rules()?;
    let names: BTreeSet<&str> = rules.iter().filter_map(|rule| rule["alert"].as_str()).collect();
    ensure!(names.len() == rules.len() && names.len() >= 15, "{names:?}");
    let text = fs::read_to_string(path("docs/alerts.md"))?;
    let told: BTreeSet<&str> = text.lines().filter_map(|line| line.strip_prefix("## ")).collect();
    ensure!(told == names, "{told:?} in docs/alerts.md, {names:?} in the rules");
    for section in text.split("\n## ").skip(1) {
        ensure!(section.split_whitespace().count() > 20, "this says nothing: {section}");
    }
    let cases = fs::read_to_string(path("tests/chart/alerts.yaml"))?;
    for rule in &rules {
        let name = rule["alert"].as_str().unwrap_or_default();
        ensure!(cases.contains(&format!("alertname: {name}\n")), "no case shows that {name} fires");
        let runbook = format!("docs/alerts.md#{}", name.to_lowercase());
        ensure!(rule["annotations"]["runbook"] == runbook.as_str(), "{name} names {}", rule["annotations"]["runbook"]);
        ensure!(["critical", "warning"].iter().any(|s| rule["labels"]["severity"] == *s), "{name}");
    }
    Ok(())
}

#[test]
fn runbooks_are_links_where_it_is_known_where_they_are_read() -> anyhow::Result<()> {
    let annotations = |rendered: &str| -> anyhow::Result<Vec<Value>> {
        let manifests = manifests(rendered)?;
        let rule = of_kind(&manifests, "PrometheusRule").next().context("no rules")?;
        let all = items(&rule["spec"]["groups"]).flat_map(|group| items(&group["rules"]));
        Ok(all.map(|rule| rule["annotations"].clone()).collect())
    };
    let linked = annotations(&render("everything")?)?;
    let at = "https://git.example.com/baton/docs/alerts.md#baton";
    ensure!(linked.iter().all(|a| a["runbook_url"].as_str().is_some_and(|url| url.starts_with(at))), "{linked:?}");
    let plain = render_values("observability: {prometheusRule: {enabled: true}}")?.map_err(anyhow::Error::msg)?;
    let plain = annotations(&plain)?;
    ensure!(plain.iter().all(|a| a["runbook_url"].is_null() && a["runbook"].is_string()), "{plain:?}");
    ensure!(linked.len() == rules()?.len() && plain.len() == linked.len());
    Ok(())
}

#[test]
fn the_prometheus_of_one_host_reads_the_rules() -> anyhow::Result<()> {
    let compose =
        &manifests(&format!("kind: Compose\n{}", fs::read_to_string(path("deploy/compose/compose.yaml"))?))?[0];
    let mounts = items(&compose["services"]["prometheus"]["volumes"]).filter_map(Value::as_str);
    let mounts: Vec<_> = mounts.filter_map(|mount| mount.split_once(':')).collect();
    let config = fs::read_to_string(path("deploy/compose/prometheus.yaml"))?;
    let config = &manifests(&format!("kind: Prometheus\n{config}"))?[0];
    let files: Vec<_> = items(&config["rule_files"]).filter_map(Value::as_str).collect();
    ensure!(!files.is_empty(), "{config}");
    for file in files {
        let read = mounts.iter().find(|(_, to)| to.strip_suffix(":ro") == Some(file)).context("no such mount")?;
        ensure!(fs::canonicalize(path("deploy/compose").join(read.0))? == fs::canonicalize(path(ALERTS))?, "{read:?}");
    }
    Ok(())
}

#[test]
fn the_dashboard_has_a_row_a_phase() -> anyhow::Result<()> {
    let dashboard: Value = serde_json::from_slice(&fs::read(path("deploy/helm/baton/files/baton.json"))?)?;
    let panels: Vec<_> = items(&dashboard["panels"]).collect();
    let rows = panels.iter().filter(|p| p["type"] == "row").filter_map(|p| p["title"].as_str());
    let expected = [
        "Requests",
        "Queue and placement",
        "Prefill",
        "KV transfer",
        "Decode",
        "KV blocks",
        "Prefix cache",
        "Cluster",
        "Devices",
    ];
    ensure!(rows.eq(expected), "{dashboard}");
    let ids: BTreeSet<_> = panels.iter().map(|p| p["id"].as_u64()).collect();
    ensure!(ids.len() == panels.len(), "two panels have one id");
    for panel in panels.iter().filter(|p| p["type"] != "row") {
        ensure!(items(&panel["targets"]).count() > 0, "{panel}");
        let place = ["x", "w"].map(|key| panel["gridPos"][key].as_u64().unwrap_or(99));
        ensure!(place[0] + place[1] <= 24, "{} lies beside the page", panel["title"]);
    }
    Ok(())
}
