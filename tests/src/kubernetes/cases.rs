//! The cases. Each returns its counts.

use super::Bench;
use super::cluster::{Cluster, Pod, SETTLE_MAX};
use super::flows::{End, allowed};
use super::traffic::{Tally, Traffic, known};
use crate::load::Known;
use crate::scrape::Scrape;
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::sleep;

/// The parts of a release and how many pods each has in `base.yaml`.
const PARTS: [(&str, usize); 4] = [("router", 1), ("prefill", 2), ("decode", 2), ("etcd", 1)];
/// Right answers required before and after each disturbance.
pub(super) const ANSWERS: u64 = 8;
/// gRPC port of workers for routers, and the port of every part's metrics.
const WORKER_GRPC: u16 = 50052;
const ADMIN: u16 = 9090;
/// Any port of the data plane, which UCX chooses.
const DATA: u16 = 40_000;
const ETCD: u16 = 2379;
/// Socket of containerd on the tests' own node.
const CONTAINERD: &str = "/run/containerd.sock";

/// Permitted effects of a disturbance on requests.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum May {
    /// Each is answered at the first try.
    Nothing,
    /// A client whose router stops before the answer has begun tries the next router.
    Move,
    /// Answers may break off, because no other live path had them.
    Fail,
}

/// (a): a values file with images and a model's volume is enough; clients are answered through the service; KV crosses pods.
pub(super) async fn installs(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    if bench.settings.node.is_some() {
        let jaeger = std::fs::read_to_string(bench.settings.values.join("jaeger.yaml"))?;
        let file = bench.settings.scratch()?.join("jaeger.yaml");
        std::fs::write(
            &file,
            jaeger.replace("REGISTRY", &bench.settings.registry).replace("TAG", &bench.settings.tag),
        )?;
        cluster.kubectl(&["apply", "--filename", &file.display().to_string()]).await?;
    }
    cluster.apply("install", &bench.values(&[]), &bench.images()).await?;
    let mut counts = Vec::new();
    for (part, count) in PARTS {
        cluster.ready(part, count, &[]).await?;
        counts.push(format!("{count} ready of {part}"));
    }
    let limit = format!("--timeout={}s", SETTLE_MAX.as_secs());
    cluster.helm("test", &[&limit]).await?;
    counts.push("helm test passed".into());
    counts.push(without_prefill(bench).await?);
    counts.extend(super::answers::answers(bench).await?);
    Ok(counts)
}

/// Without a prefill worker no KV crosses pods, and the release's own test reports that.
async fn without_prefill(bench: &Bench) -> anyhow::Result<String> {
    let cluster = &bench.cluster;
    let sets = ["get", "deployment", "--output=name", "--selector=app.kubernetes.io/component=prefill"];
    let set = cluster.kubectl(&sets).await?;
    cluster.kubectl(&["scale", set.trim(), "--replicas=0"]).await?;
    gone(cluster, "prefill").await?;
    let limit = format!("--timeout={}s", SETTLE_MAX.as_secs());
    let failed = cluster.helm("test", &[&limit]).await;
    ensure!(failed.is_err(), "helm test passes although no prefill worker runs");
    cluster.kubectl(&["scale", set.trim(), "--replicas=2"]).await?;
    cluster.ready("prefill", 2, &[]).await?;
    cluster.helm("test", &[&limit]).await?;
    Ok("helm test failed without prefill workers, and passed with them again".into())
}

/// (e): which connections the policies allow.
pub(super) async fn policies(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    let policies = cluster.get(&["networkpolicies"]).await?;
    let mut ends = BTreeMap::new();
    for (part, _) in PARTS {
        let pod = cluster.pods(part).await?.into_iter().next().with_context(|| format!("no pod of {part}"))?;
        ends.insert(part, cluster.end(&pod).await?);
    }
    ends.insert("stranger", End { namespace: "elsewhere".into(), ..End::default() });
    ends.insert("neighbour", End { labels: BTreeMap::default(), ports: BTreeMap::default(), ..ends["router"].clone() });
    let required = [
        ("stranger", "router", 50051),
        ("stranger", "router", 8000),
        ("stranger", "prefill", ADMIN),
        ("router", "prefill", WORKER_GRPC),
        ("router", "decode", WORKER_GRPC),
        ("prefill", "decode", DATA),
        ("decode", "prefill", DATA),
        ("decode", "decode", DATA),
        ("router", "etcd", ETCD),
        ("prefill", "etcd", ETCD),
        ("decode", "etcd", ETCD),
    ];
    let forbidden = [
        ("stranger", "prefill", WORKER_GRPC),
        ("stranger", "decode", WORKER_GRPC),
        ("stranger", "decode", DATA),
        ("stranger", "etcd", ETCD),
        ("neighbour", "decode", WORKER_GRPC),
        ("neighbour", "prefill", DATA),
        ("neighbour", "etcd", ETCD),
        ("etcd", "decode", WORKER_GRPC),
    ];
    let expected = required.iter().map(|flow| (flow, true)).chain(forbidden.iter().map(|flow| (flow, false)));
    let mut wrong = Vec::new();
    for ((from, to, port), expected) in expected {
        if allowed(&policies, &ends[from], &ends[to], *port)? != expected {
            wrong.push(format!("{from} to {to}:{port} should be {}", if expected { "allowed" } else { "refused" }));
        }
    }
    ensure!(wrong.is_empty(), "{} policies: {wrong:#?}", policies.len());
    let (required, forbidden) = (required.len(), forbidden.len());
    Ok(vec![format!("{} policies: {required} flows allowed, {forbidden} refused", policies.len())])
}

/// (b): one pod of each part is killed under load, etcd also without its data.
pub(super) async fn kills(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    let url = bench.grpc().await?;
    let known = known(&url).await?;
    let mut counts = Vec::new();
    for (part, count) in PARTS {
        let traffic = Traffic::start(&url, &known)?;
        traffic.answers(ANSWERS).await?;
        let victim = cluster.pods(part).await?.into_iter().next().context("a pod")?;
        kill(bench, &victim).await?;
        let back = cluster.ready(part, count, &[victim.uid]).await?;
        all_ready(cluster).await?;
        traffic.answers(ANSWERS).await?;
        // No other process has the streams of the only router, and none accepts requests meanwhile.
        let may = if part == "router" { May::Fail } else { May::Nothing };
        counts.push(judge(&format!("{part} killed, back after {:.1} s", back.as_secs_f64()), traffic, may).await?);
    }
    if let Some(node) = &bench.settings.node {
        let traffic = Traffic::start(&url, &known)?;
        traffic.answers(ANSWERS).await?;
        let sets = cluster
            .kubectl(&["get", "statefulset", "--output=name", "--selector=app.kubernetes.io/component=etcd"])
            .await?;
        let scale = async |to: &str| cluster.kubectl(&["scale", sets.trim(), to]).await;
        scale("--replicas=0").await?;
        gone(cluster, "etcd").await?;
        empty(&node.join("volumes/etcd-0"))?;
        scale("--replicas=1").await?;
        cluster.ready("etcd", 1, &[]).await?;
        all_ready(cluster).await?;
        traffic.answers(ANSWERS).await?;
        counts.push(judge("etcd back without its data", traffic, May::Nothing).await?);
    }
    Ok(counts)
}

/// Ends a pod as a power loss of its node would: no process in it is notified. On other nodes than our own the containers get the
/// shortest grace period that Kubernetes has.
pub(super) async fn kill(bench: &Bench, pod: &Pod) -> anyhow::Result<()> {
    if bench.settings.node.is_some() {
        let containers = pod.object["status"]["containerStatuses"].as_array().into_iter().flatten();
        for id in containers.filter_map(|c| c["containerID"].as_str()?.strip_prefix("containerd://")) {
            let arguments = ["--address", CONTAINERD, "--namespace=k8s.io", "tasks", "kill", "--signal=SIGKILL", id];
            super::cluster::run("ctr", &arguments, Duration::from_secs(10)).await?;
        }
    }
    bench.cluster.kill(pod).await
}

/// (c): upgrades that change each role, including images with another protocol version and another kernel revision.
pub(super) async fn upgrades(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    let url = bench.grpc().await?;
    let known = known(&url).await?;
    let mut counts = Vec::new();
    let annotation = |role: &str| format!("{role}.annotations.step=next");
    // Images of other versions are on our own node: `tests/kubernetes/images` makes them.
    let ours = bench.settings.node.is_some();
    let decode = if ours { "decode.image.tag=protocol".to_owned() } else { annotation("decode") };
    let mut steps = vec![
        ("prefill changed", annotation("prefill"), May::Nothing),
        (if ours { "decode to a newer protocol" } else { "decode changed" }, decode, May::Nothing),
        ("router changed", annotation("router"), May::Move),
    ];
    if ours {
        steps.push(("prefill to another kernel revision", "prefill.image.tag=revision".to_owned(), May::Nothing));
    }
    // Each step keeps the changes before it, so that one part rolls at a time.
    let mut set = bench.images();
    for (what, change, may) in steps {
        set.push(change);
        counts.push(upgrade(bench, &url, &known, (what, may), &set).await?);
    }
    counts.push(upgrade(bench, &url, &known, ("all changed back", May::Move), &bench.images()).await?);
    all_ready(cluster).await?;
    Ok(counts)
}

async fn upgrade(
    bench: &Bench,
    url: &str,
    known: &[Known],
    (what, may): (&str, May),
    set: &[String],
) -> anyhow::Result<String> {
    let traffic = Traffic::start(url, known)?;
    traffic.answers(ANSWERS).await?;
    bench.cluster.apply("upgrade", &bench.values(&[]), set).await?;
    all_ready(&bench.cluster).await?;
    traffic.answers(ANSWERS).await?;
    judge(what, traffic, may).await
}

/// (f): nothing is left after an uninstall.
pub(super) async fn uninstalls(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let limit = format!("--timeout={}s", SETTLE_MAX.as_secs());
    bench.cluster.helm("uninstall", &["--wait", &limit]).await?;
    gone(&bench.cluster, "").await?;
    let left = bench.cluster.objects().await?;
    // Objects that the tests themselves created.
    let ours = ["jaeger", "persistentvolumeclaim/models"];
    let left: Vec<&String> = left.iter().filter(|name| !ours.iter().any(|ours| name.contains(ours))).collect();
    ensure!(left.is_empty(), "left behind: {left:?}");
    Ok(vec!["no object is left".into()])
}

/// (d): pods that request devices run where there are some, and wait with a reason where there are none.
pub(super) async fn devices(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    let capacity = [("nvidia.com/gpu", 2u64), ("rdma/hca", 4)];
    let patches = capacity.iter().flat_map(|(name, count)| {
        let name = name.replace('/', "~1");
        ["capacity", "allocatable"]
            .map(|of| json!({"op": "add", "path": format!("/status/{of}/{name}"), "value": count.to_string()}))
    });
    let patch = Value::from_iter(patches).to_string();
    cluster.kubectl(&["patch", "node", "node-1", "--subresource=status", "--type=json", "--patch", &patch]).await?;
    let mut arguments = vec![cluster.chart.display().to_string()];
    arguments.extend(bench.values(&["gpu.yaml"]).iter().map(|file| format!("--values={}", file.display())));
    arguments.extend(bench.images().iter().map(|set| format!("--set={set}")));
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    cluster.helm("install", &arguments).await?;
    let mut counts = Vec::new();
    // gpu.yaml requests one of each; GPUs run out first.
    for (device, there, given) in [("nvidia.com/gpu", 2, 2), ("rdma/hca", 4, 2), ("rdma/none", 0, 0)] {
        let (placed, waiting) = decided(cluster, device).await?;
        ensure!(placed.len() == given, "{device}: {there} there, given to {}", placed.len());
        let requested = placed.iter().chain(&waiting).flat_map(|pod| requests(pod, device));
        let wrong: Vec<&str> = requested.filter(|count| *count != "1").collect();
        ensure!(wrong.is_empty(), "{device}: pods ask for {wrong:?}");
        let reason = format!("Insufficient {device}");
        let told = waiting.iter().filter(|pod| why(pod).contains("Insufficient")).count();
        ensure!(told == waiting.len(), "{device}: pods wait without a reason like {reason:?}: {waiting:#?}");
        if there == 0 {
            ensure!(waiting.iter().any(|pod| why(pod).contains(&reason)), "nobody waits for {device}");
        }
        counts.push(format!(
            "{device}: {there} there, {} pods scheduled, {} wait and say why",
            placed.len(),
            waiting.len()
        ));
    }
    cluster.helm("uninstall", &["--wait"]).await?;
    Ok(counts)
}

/// Pods that request a device: those with a node, and those that wait. Waits until the scheduler has looked at all of them.
async fn decided(cluster: &Cluster, device: &str) -> anyhow::Result<(Vec<Pod>, Vec<Pod>)> {
    let deadline = tokio::time::Instant::now() + SETTLE_MAX;
    loop {
        let asks = |pod: &Pod| requests(pod, device).next().is_some();
        let pods: Vec<Pod> = cluster.pods("").await?.into_iter().filter(asks).collect();
        let (placed, waiting): (Vec<Pod>, Vec<Pod>) =
            pods.into_iter().partition(|pod| pod.object["spec"]["nodeName"].is_string());
        if !(placed.is_empty() && waiting.is_empty()) && waiting.iter().all(|pod| !why(pod).is_empty()) {
            return Ok((placed, waiting));
        }
        ensure!(tokio::time::Instant::now() < deadline, "{device}: {} placed, {waiting:#?}", placed.len());
        sleep(Duration::from_millis(500)).await;
    }
}

/// Requests of a pod's containers for a device, one for each container once it has started.
fn requests<'a>(pod: &'a Pod, device: &'a str) -> impl Iterator<Item = &'a str> {
    let containers = pod.object["spec"]["containers"].as_array().into_iter().flatten();
    containers.filter_map(move |container| container["resources"]["requests"][device].as_str())
}

/// Why the scheduler finds no node for a pod.
fn why(pod: &Pod) -> &str {
    let conditions = pod.object["status"]["conditions"].as_array().into_iter().flatten();
    let scheduled = conditions.clone().find(|c| c["type"] == "PodScheduled").unwrap_or(&Value::Null);
    scheduled["message"].as_str().unwrap_or_default()
}

/// The clients' counts; an error if they saw more than `may` permits.
pub(super) async fn judge(what: &str, traffic: Traffic, may: May) -> anyhow::Result<String> {
    let Tally { right, moved, failed, .. } = traffic.stop().await.with_context(|| what.to_owned())?;
    let failures: u64 = failed.values().sum();
    let said = format!("{what}: {right} right, {moved} asked again, {failures} failed {failed:?}");
    ensure!(may >= May::Fail || failures == 0, "requests failed that had another way: {said}");
    ensure!(may >= May::Move || moved == 0, "requests were refused though their router stood: {said}");
    Ok(said)
}

pub(super) async fn all_ready(cluster: &Cluster) -> anyhow::Result<()> {
    for (part, count) in PARTS {
        cluster.ready(part, count, &[]).await?;
    }
    Ok(())
}

/// Waits until a part has no pods left, including terminating ones.
pub(super) async fn gone(cluster: &Cluster, part: &str) -> anyhow::Result<()> {
    let own = format!("app.kubernetes.io/instance={}", cluster.release);
    let selector = if part.is_empty() { own } else { format!("{own},app.kubernetes.io/component={part}") };
    let limit = format!("--timeout={}s", SETTLE_MAX.as_secs());
    let arguments = ["--namespace", &cluster.namespace, "wait", "--for=delete", "pod", "--selector", &selector, &limit];
    super::cluster::run("kubectl", &arguments, SETTLE_MAX + Duration::from_secs(10)).await.map(drop)
}

pub(super) fn empty(folder: &std::path::Path) -> anyhow::Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() { std::fs::remove_dir_all(&path)? } else { std::fs::remove_file(&path)? }
    }
    Ok(())
}

/// The metrics of a pod, read through the API server, which can reach pods from anywhere.
pub(super) async fn metrics(cluster: &Cluster, pod: &Pod) -> anyhow::Result<Scrape> {
    let path = format!("/api/v1/namespaces/{}/pods/{}:{ADMIN}/proxy/metrics", cluster.namespace, pod.name);
    Ok(Scrape::from_text(cluster.kubectl(&["get", "--raw", &path]).await?))
}
