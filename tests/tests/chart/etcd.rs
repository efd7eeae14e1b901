//! The chart's own etcd: how its nodes come into their cluster, where they stand, how much they keep.

use crate::helm::{items, manifests, name, of_kind, render, render_values};
use anyhow::{Context, ensure};
use serde_json::Value;

fn etcd(values: &str) -> anyhow::Result<(Value, String)> {
    let manifests = manifests(&render_values(values)?.map_err(anyhow::Error::msg)?)?;
    let set = of_kind(&manifests, "StatefulSet").next().context("no etcd")?.clone();
    let config = of_kind(&manifests, "ConfigMap").find_map(|m| m["data"]["etcd.yaml"].as_str()).context("no config")?;
    Ok((set, config.to_owned()))
}

fn words(container: &Value) -> Vec<&str> {
    items(&container["command"]).filter_map(Value::as_str).collect()
}

#[test]
fn nodes_decide_at_their_start_how_they_come_into_their_cluster() -> anyhow::Result<()> {
    for nodes in [1, 3] {
        let (set, config) = etcd(&format!("etcd: {{replicas: {nodes}}}"))?;
        let pod = &set["spec"]["template"]["spec"];
        let [version, join] = &pod["initContainers"].as_array().context("none")?[..] else {
            anyhow::bail!("other than the image's check and the join: {pod}")
        };
        // A member that is added and cannot start would cost the others their quorum.
        ensure!(version["image"] == pod["containers"][0]["image"] && words(version) == ["etcd", "--version"]);
        let count = format!("--nodes={nodes}");
        for argument in [count.as_str(), "--pod=$(POD_NAME)", "--domain=baton-etcd.llm.svc.cluster.local"] {
            ensure!(words(join).contains(&argument), "no {argument}: {join}");
        }
        let file =
            words(join).iter().find_map(|word| word.strip_prefix("--write=")).context("writes nothing")?.to_owned();
        ensure!(words(&pod["containers"][0]) == ["etcd", &format!("--config-file={file}")], "{pod}");
        // No list of nodes is fixed anywhere: that is what splits a cluster that grows.
        ensure!(!config.contains("initial-cluster") && !set.to_string().contains("initial-cluster"), "{config}");
        ensure!(config.contains("data-dir: /data/etcd\n") && words(join).contains(&"--data=/data/etcd"), "{config}");
    }
    Ok(())
}

#[test]
fn nodes_stand_on_different_hosts() -> anyhow::Result<()> {
    let spread = |values: &str| -> anyhow::Result<Vec<Value>> {
        Ok(items(&etcd(values)?.0["spec"]["template"]["spec"]["topologySpreadConstraints"]).cloned().collect())
    };
    ensure!(spread("{}")?.is_empty());
    let three = spread("etcd: {replicas: 3}")?;
    let hosts = three.iter().find(|c| c["topologyKey"] == "kubernetes.io/hostname").context("not by host")?;
    ensure!(hosts["maxSkew"] == 1 && hosts["whenUnsatisfiable"] == "DoNotSchedule", "{hosts}");
    ensure!(hosts["labelSelector"]["matchLabels"]["app.kubernetes.io/component"] == "etcd", "{hosts}");
    let zones = three.iter().find(|c| c["topologyKey"] == "topology.kubernetes.io/zone").context("not by zone")?;
    ensure!(zones["whenUnsatisfiable"] == "ScheduleAnyway", "{zones}");
    let own = "etcd: {replicas: 3, topologySpreadConstraints: [{maxSkew: 2, topologyKey: rack, whenUnsatisfiable: ScheduleAnyway}]}";
    ensure!(spread(own)?.len() == 1);
    Ok(())
}

#[test]
fn etcd_says_that_it_is_full_before_its_volume_is() -> anyhow::Result<()> {
    for (size, quota) in [("1Gi", 268_435_456_u64), ("100Mi", 26_214_400), ("2G", 500_000_000), ("1.5Gi", 402_653_184)]
    {
        let (_, config) = etcd(&format!("etcd: {{persistence: {{size: {size}}}}}"))?;
        ensure!(config.contains(&format!("quota-backend-bytes: {quota}\n")), "{size}: {config}");
    }
    let (_, config) = etcd("etcd: {quotaBytes: 8388608}")?;
    ensure!(config.contains("quota-backend-bytes: 8388608\n"), "{config}");
    Ok(())
}

#[test]
fn another_size_of_the_cluster_reaches_all_who_use_it() -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let configs = of_kind(&manifests, "ConfigMap").filter_map(|m| m["data"]["baton.toml"].as_str());
    for config in configs {
        ensure!(
            (0..3).all(|i| config.contains(&format!("llm-etcd-{i}.llm-etcd.llm.svc.cluster.local:2379"))),
            "{config}"
        );
    }
    Ok(())
}

#[test]
fn routers_find_workers_while_etcd_is_away() -> anyhow::Result<()> {
    let manifests = manifests(&render("minimal")?)?;
    let router = of_kind(&manifests, "ConfigMap").find(|m| name(m) == "baton-router").context("no config")?;
    let toml = router["data"]["baton.toml"].as_str().context("no text")?;
    for role in ["prefill", "decode"] {
        ensure!(toml.contains(&format!("\"baton-{role}-workers.llm.svc.cluster.local:50052\"")), "{role}: {toml}");
        let service = of_kind(&manifests, "Service").find(|s| name(s) == format!("baton-{role}-workers"));
        let spec = &service.context("no service")?["spec"];
        // Nobody is ready who was admitted by no router yet.
        ensure!(spec["clusterIP"] == "None" && spec["publishNotReadyAddresses"] == true, "{spec}");
        ensure!(spec["selector"]["app.kubernetes.io/component"] == role, "{spec}");
    }
    Ok(())
}
