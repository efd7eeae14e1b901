//! A real Prometheus reads a cluster under load: every expression of dashboard, alerts and autoscalers is sound there, and has data where
//! it must.

use crate::alerts::{ALERTS, rules};
use crate::helm::{items, manifests, name, of_kind, path, render};
use anyhow::{Context, bail, ensure};
use baton_tests::http::Api;
use baton_tests::processes::Up;
use baton_tests::service::free_addresses;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::fs;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const MODEL: &str = "random:vocab=300,context=1024,layers=2,hidden=64,heads=4,seed=3";
/// Longest wait for Prometheus to serve, and for its first look at everything.
const START_MAX: Duration = Duration::from_secs(60);
/// Rates are taken over this much of the load.
const LOAD: Duration = Duration::from_secs(20);
const CLIENTS: usize = 3;
/// Metrics whose series begin with something that goes wrong, which nothing does here, or with a GPU.
const NEVER_HERE: [&str; 6] = [
    "baton_device_memory_bytes",
    "baton_router_retries_total",
    "baton_router_given_up_total",
    "baton_router_unpaired_workers",
    "baton_kv_quarantined_blocks",
    "baton_kv_refused_total",
];

/// A Prometheus that reads these processes once a second. Dropping it kills it.
struct Prometheus {
    process: Child,
    url: String,
    _folder: tempfile::TempDir,
}

impl Drop for Prometheus {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Prometheus {
    /// Reads `processes`, pairs of a pod's name and the address of its metrics.
    async fn start(processes: &[(&str, String)]) -> anyhow::Result<Self> {
        let folder = tempfile::tempdir()?;
        let targets = processes.iter().map(|(pod, url)| {
            let target = url.trim_start_matches("http://").trim_end_matches("/metrics");
            json!({"targets": [target], "labels": {"namespace": "llm", "pod": pod}})
        });
        // JSON is YAML.
        let config = json!({
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [fs::canonicalize(path(ALERTS))?],
            "scrape_configs": [{"job_name": "baton", "static_configs": targets.collect::<Vec<_>>()}],
        });
        let file = folder.path().join("prometheus.yaml");
        fs::write(&file, config.to_string())?;
        let [address] = free_addresses()?;
        let process = Command::new(path("target/prometheus/usr/bin/prometheus"))
            .arg(format!("--config.file={}", file.display()))
            .arg(format!("--storage.tsdb.path={}", folder.path().join("data").display()))
            .arg(format!("--web.listen-address={address}"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context("run `make charts` first, as `make test` does")?;
        let prometheus = Self { process, url: format!("http://{address}"), _folder: folder };
        let deadline = Instant::now() + START_MAX;
        while prometheus.query("up").await.map_or(0, |up| up.len()) < processes.len() {
            ensure!(Instant::now() < deadline, "Prometheus does not read {processes:?} after {START_MAX:?}");
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
        Ok(prometheus)
    }

    async fn get(&self, what: &str, query: &[(&str, &str)]) -> anyhow::Result<Value> {
        let url = reqwest::Url::parse_with_params(&format!("{}/api/v1/{what}", self.url), query)?;
        let answer: Value = serde_json::from_slice(&reqwest::get(url).await?.bytes().await?)?;
        ensure!(answer["status"] == "success", "{query:?}: {answer}");
        Ok(answer["data"].clone())
    }

    /// The series of an expression.
    async fn query(&self, expression: &str) -> anyhow::Result<Vec<Value>> {
        let found = self.get("query", &[("query", expression)]).await?;
        Ok(items(&found["result"]).cloned().collect())
    }

    /// Fails where a metric that an expression names does not exist, although it should.
    async fn has_metrics_of(&self, expression: &str) -> anyhow::Result<()> {
        for metric in metrics_of(expression) {
            if !NEVER_HERE.contains(&metric.as_str()) && self.query(&metric).await?.is_empty() {
                bail!("there is no {metric}, which this needs: {expression}");
            }
        }
        Ok(())
    }
}

fn metrics_of(expression: &str) -> BTreeSet<String> {
    let words = expression.split(|c: char| !(c.is_ascii_alphanumeric() || c == '_'));
    words.filter(|word| word.starts_with("baton_")).map(str::to_owned).collect()
}

/// What Grafana makes of an expression of the dashboard when everything is chosen.
fn chosen(expression: &str) -> String {
    let all = [("$namespace", ".*"), ("$model", ".*"), ("$pool", ".*"), ("$__rate_interval", "10s")];
    all.iter().fold(expression.to_owned(), |text, (name, value)| text.replace(name, value))
}

async fn load(api: &Api, until: Instant) -> anyhow::Result<()> {
    let prompt: Vec<u64> = (0..400).map(|i| i % 250).collect();
    while Instant::now() < until {
        for policy in ["remote", "local"] {
            let body = json!({"prompt": prompt, "max_tokens": 24, "ignore_eos": true, "prefill_policy": policy});
            let answer = api.post("completions", body).await?;
            ensure!(answer.status == 200, "{answer:?}");
        }
    }
    Ok(())
}

async fn check_dashboard(prometheus: &Prometheus) -> anyhow::Result<()> {
    let dashboard: Value = serde_json::from_slice(&fs::read(path("deploy/helm/baton/files/baton.json"))?)?;
    let mut checked = 0;
    for target in items(&dashboard["panels"]).flat_map(|panel| items(&panel["targets"])) {
        let expression = chosen(target["expr"].as_str().unwrap_or_default());
        ensure!(!expression.contains('$'), "{expression}");
        let data = prometheus.query(&expression).await?;
        let never = metrics_of(&expression).iter().any(|metric| NEVER_HERE.contains(&metric.as_str()));
        ensure!(never || !data.is_empty(), "no data: {expression}");
        // A quantile of nothing is NaN: the load must have come through.
        let numbers = data.iter().filter(|series| series["value"][1] != "NaN").count();
        ensure!(never || numbers > 0, "no number: {expression}");
        checked += 1;
    }
    ensure!(checked > 40, "{checked} expressions");
    for variable in items(&dashboard["templating"]["list"]) {
        prometheus.has_metrics_of(variable["definition"].as_str().unwrap_or_default()).await?;
    }
    Ok(())
}

async fn check_alerts(prometheus: &Prometheus) -> anyhow::Result<()> {
    for rule in rules()? {
        let expression = rule["expr"].as_str().context("a rule without an expression")?;
        prometheus.query(expression).await?;
        prometheus.has_metrics_of(expression).await?;
    }
    let read = prometheus.get("rules", &[]).await?;
    let read: Vec<&Value> = items(&read["groups"]).flat_map(|group| items(&group["rules"])).collect();
    ensure!(read.len() == rules()?.len(), "{read:?}");
    for rule in read {
        ensure!(rule["health"] == "ok" && rule["state"] == "inactive", "a sound cluster, and {rule}");
    }
    Ok(())
}

async fn check_autoscalers(prometheus: &Prometheus) -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let mut checked = 0;
    for scaled in of_kind(&manifests, "ScaledObject") {
        for trigger in items(&scaled["spec"]["triggers"]) {
            let query = trigger["metadata"]["query"].as_str().context("no query")?;
            ensure!(prometheus.query(query).await?.len() == 1, "{} has no data: {query}", name(scaled));
            checked += 1;
        }
    }
    for scaler in of_kind(&manifests, "HorizontalPodAutoscaler") {
        for metric in items(&scaler["spec"]["metrics"]) {
            let metric = metric["pods"]["metric"]["name"].as_str().context("no metric of pods")?;
            let of_pods = format!("{metric}{{namespace=\"llm\",pod=~\"{}-.+\"}}", name(scaler));
            ensure!(prometheus.query(&of_pods).await?.len() == 1, "{} has no data: {of_pods}", name(scaler));
            checked += 1;
        }
    }
    ensure!(checked == 2, "{checked} autoscalers");
    Ok(())
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "takes a minute: part of `make test-full`"]
async fn every_expression_is_sound_and_has_data_under_load() -> anyhow::Result<()> {
    let up = Up::start(&[&format!("--model={MODEL}"), "--kv-cache-bytes=4MiB"])?;
    let pods = [
        ("router", "llm-router-5d8f-x2x"),
        ("prefill-0", "llm-prefill-llama-default-5d8f-x2x"),
        ("decode-0", "llm-decode-llama-default-5d8f-x2x"),
    ];
    let processes = pods.map(|(process, pod)| up.metrics(process).map(|url| (pod, url)));
    let processes = processes.into_iter().collect::<anyhow::Result<Vec<_>>>()?;
    let prometheus = Prometheus::start(&processes).await?;
    let api = Api::new(up.openai()?);
    let until = Instant::now() + LOAD;
    futures::future::try_join_all((0..CLIENTS).map(|_| load(&api, until))).await?;
    check_dashboard(&prometheus).await?;
    check_alerts(&prometheus).await?;
    check_autoscalers(&prometheus).await?;
    drop(prometheus);
    up.stop()
}
