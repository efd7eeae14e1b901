//! The chart's etcd fails, and grows without Helm: with `helm template | kubectl apply`, as done by operators who keep manifests in a
//! repository.

use super::Bench;
use super::cases::{ANSWERS, May, all_ready, gone, judge, kill, metrics};
use super::cluster::{Cluster, SETTLE_MAX};
use super::traffic::{Traffic, known};
use anyhow::{Context, ensure};
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Nodes after the growth.
const NODES: usize = 3;

/// A router whose pod starts while etcd is down finds the workers through their service's DNS names, serves, and reports that source.
pub(super) async fn starts_without(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let cluster = &bench.cluster;
    let url = bench.grpc().await?;
    let known = known(&url).await?;
    let selector = "--selector=app.kubernetes.io/component=etcd";
    let set = cluster.kubectl(&["get", "statefulset", "--output=name", selector]).await?;
    cluster.kubectl(&["scale", set.trim(), "--replicas=0"]).await?;
    gone(cluster, "etcd").await?;
    let victim = cluster.pods("router").await?.into_iter().next().context("no router")?;
    kill(bench, &victim).await?;
    let back = cluster.ready("router", 1, std::slice::from_ref(&victim.uid)).await?;
    told(cluster, &[("membership_up", 0.0), ("unconfirmed_workers", 4.0), ("registered_workers", 4.0)]).await?;
    let traffic = Traffic::start(&url, &known)?;
    traffic.answers(ANSWERS).await?;
    let what = format!("a router started without etcd, ready after {:.1} s", back.as_secs_f64());
    // The service may still route to the former router for a moment.
    let mut counts = vec![judge(&what, traffic, May::Move).await?];

    let traffic = Traffic::start(&url, &known)?;
    traffic.answers(ANSWERS).await?;
    cluster.kubectl(&["scale", set.trim(), "--replicas=1"]).await?;
    cluster.ready("etcd", 1, &[]).await?;
    told(cluster, &[("membership_up", 1.0), ("unconfirmed_workers", 0.0), ("registered_workers", 4.0)]).await?;
    traffic.answers(ANSWERS).await?;
    counts.push(judge("etcd is back", traffic, May::Nothing).await?);
    Ok(counts)
}

/// Clients are served throughout. Afterwards all nodes are one cluster, in which the same workers are registered.
pub(super) async fn grows(bench: &Bench) -> anyhow::Result<Vec<String>> {
    let Some(_) = &bench.settings.node else {
        return Ok(vec!["left out: it needs three volumes of the class".into()]);
    };
    let cluster = &bench.cluster;
    let url = bench.grpc().await?;
    let known = known(&url).await?;
    let before = id(cluster).await?;
    let traffic = Traffic::start(&url, &known)?;
    traffic.answers(ANSWERS).await?;

    let began = Instant::now();
    // Helm cannot look them up here, so certificates are created once and named from then on.
    let set = [bench.images(), vec![format!("etcd.replicas={NODES}"), "identity.from=secrets".into()]].concat();
    let manifests = cluster.template(&bench.values(&[]), &set).await?;
    let file = bench.settings.scratch()?.join("grown.yaml");
    std::fs::write(&file, manifests)?;
    cluster.kubectl(&["apply", "--filename", &file.display().to_string()]).await?;
    cluster.ready("etcd", NODES, &[]).await?;
    let took = began.elapsed();
    rolled(cluster).await?;
    all_ready(cluster).await?;
    traffic.answers(ANSWERS).await?;
    let mut counts =
        vec![judge(&format!("1 node to {NODES} within {:.0} s", took.as_secs_f64()), traffic, May::Move).await?];

    one_truth(cluster).await?;
    let after = id(cluster).await?;
    ensure!(before == after, "cluster {before} became {after}");
    counts.push(format!("cluster {after} is the one of before, and all routers see one cluster with 4 workers"));

    let victim =
        cluster.pods("etcd").await?.into_iter().find(|pod| pod.name.ends_with("-0")).context("the first node")?;
    let folder = bench.settings.scratch()?.join("volumes/etcd-0");
    let traffic = Traffic::start(&url, &known)?;
    traffic.answers(ANSWERS).await?;
    // Before it ends: its successor would otherwise find the data.
    super::cases::empty(&folder)?;
    kill(bench, &victim).await?;
    cluster.ready("etcd", NODES, &[victim.uid]).await?;
    traffic.answers(ANSWERS).await?;
    counts.push(judge("the first node came back without its data", traffic, May::Nothing).await?);
    one_truth(cluster).await?;
    let now = id(cluster).await?;
    ensure!(before == now, "cluster {before} became {now}");
    Ok(counts)
}

/// Waits until every roll-out has completed.
async fn rolled(cluster: &Cluster) -> anyhow::Result<()> {
    let sets = cluster
        .kubectl(&["get", "deployment,statefulset", "--output=name", "--selector=app.kubernetes.io/name=baton"])
        .await?;
    let limit = format!("--timeout={}s", SETTLE_MAX.as_secs());
    for set in sets.split_whitespace() {
        let arguments = ["--namespace", &cluster.namespace, "rollout", "status", set, &limit];
        super::cluster::run("kubectl", &arguments, SETTLE_MAX + Duration::from_secs(10)).await?;
    }
    Ok(())
}

/// Waits until every router reports that the etcd nodes are one cluster, that it is reachable, and that all workers are registered in it.
async fn one_truth(cluster: &Cluster) -> anyhow::Result<()> {
    told(cluster, &[("etcd_clusters", 1.0), ("membership_up", 1.0), ("registered_workers", 4.0)]).await
}

/// Waits until the metrics of every router have these values.
async fn told(cluster: &Cluster, values: &[(&str, f64)]) -> anyhow::Result<()> {
    let deadline = Instant::now() + SETTLE_MAX;
    loop {
        let mut wrong = Vec::new();
        for router in cluster.pods("router").await? {
            let scrape = metrics(cluster, &router).await?;
            for (name, expected) in values {
                let found = scrape.find(&format!("baton_router_{name}"), &[])?;
                if found != *expected {
                    wrong.push(format!("{}: {name} is {found}", router.name));
                }
            }
        }
        if wrong.is_empty() {
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{wrong:?}");
        sleep(Duration::from_millis(500)).await;
    }
}

/// The etcd cluster id, as its pods log it at their start; all running pods must have the same.
async fn id(cluster: &Cluster) -> anyhow::Result<String> {
    let mut ids = std::collections::BTreeSet::new();
    for pod in cluster.pods("etcd").await? {
        let logs = cluster.kubectl(&["logs", &pod.name, "--container=etcd"]).await?;
        let mut told = logs.lines().filter_map(|line| line.split_once("\"cluster-id\":\"")?.1.split('"').next());
        ids.insert(told.next_back().with_context(|| format!("{} tells no cluster: {logs}", pod.name))?.to_owned());
    }
    ensure!(ids.len() == 1, "nodes of several clusters: {ids:?}");
    Ok(ids.pop_first().unwrap_or_default())
}
