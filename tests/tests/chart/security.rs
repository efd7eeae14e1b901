//! What pods may: nothing beyond the pod security standard `restricted`, but for RDMA as root, and no token of the API server.

use crate::helm::{cases, containers, items, manifests, name, of_kind, render};
use anyhow::{Context, ensure};
use serde_json::{Value, json};

/// Specifications of all pods, with the names of what makes them.
fn pods(manifests: &[Value]) -> impl Iterator<Item = (&str, &Value)> {
    let made = of_kind(manifests, "Deployment").chain(of_kind(manifests, "StatefulSet"));
    let made = made.map(|m| (name(m), &m["spec"]["template"]["spec"]));
    made.chain(of_kind(manifests, "Pod").map(|m| (name(m), &m["spec"])))
}

#[test]
fn pods_are_restricted() -> anyhow::Result<()> {
    for case in cases()? {
        let manifests = manifests(&render(&case)?)?;
        ensure!(pods(&manifests).count() >= 3, "{case}");
        for (name, pod) in pods(&manifests) {
            let at = format!("{case}: {name}");
            ensure!(pod["automountServiceAccountToken"] == false, "{at}");
            // Kubernetes would make variables of services, and BATON_… is refused where it is no key.
            ensure!(pod["enableServiceLinks"] == false, "{at}");
            let asks_root = case == "gpu-rdma" && name.starts_with("baton-decode");
            let security = &pod["securityContext"];
            ensure!(security["seccompProfile"]["type"] == "RuntimeDefault", "{at}");
            ensure!(security["runAsUser"] == if asks_root { 0 } else { 65532 }, "{at}");
            ensure!((security["runAsNonRoot"] == true) != asks_root, "{at}");
            for container in containers(pod) {
                let security = &container["securityContext"];
                ensure!(security["readOnlyRootFilesystem"] == true, "{at}");
                ensure!(security["allowPrivilegeEscalation"] == false && security["privileged"].is_null(), "{at}");
                ensure!(security["capabilities"]["drop"] == json!(["ALL"]), "{at}");
                let added = if asks_root { json!(["IPC_LOCK"]) } else { Value::Null };
                ensure!(security["capabilities"]["add"] == added, "{at}: {security}");
                ensure!(!container["resources"]["limits"]["memory"].is_null(), "{at} has no bound on its memory");
            }
            let kinds = ["hostPath", "nfs", "iscsi"];
            ensure!(items(&pod["volumes"]).all(|v| kinds.iter().all(|kind| v[kind].is_null())), "{at}");
            let asks_network = case == "extras" && name.starts_with("baton-decode");
            ensure!((pod["hostNetwork"] == true) == asks_network, "{at}");
            ensure!(pod["hostPID"].is_null() && pod["hostIPC"].is_null(), "{at}");
        }
        ensure!(
            of_kind(&manifests, "Role").chain(of_kind(&manifests, "ClusterRole")).count() == 0,
            "{case} asks for rights"
        );
        ensure!(of_kind(&manifests, "ServiceAccount").all(|a| a["automountServiceAccountToken"] == false), "{case}");
    }
    Ok(())
}

#[test]
fn a_drain_ends_before_its_pod_is_killed() -> anyhow::Result<()> {
    for case in cases()? {
        let manifests = manifests(&render(&case)?)?;
        for deployment in of_kind(&manifests, "Deployment") {
            let pod = &deployment["spec"]["template"]["spec"];
            let grace = pod["terminationGracePeriodSeconds"].as_u64().context("no grace period")?;
            let map = of_kind(&manifests, "ConfigMap").find(|m| name(m) == name(deployment)).context("no config")?;
            let toml = map["data"]["baton.toml"].as_str().unwrap_or_default();
            let drain = toml.lines().find_map(|l| l.strip_prefix("drain_ms_max = ")).context("no drain")?;
            let wait = pod["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64().unwrap_or(0);
            ensure!(
                grace * 1000 >= drain.parse::<u64>()? + 1000 * (wait + 10),
                "{case}: {} in {grace} s",
                name(deployment)
            );
        }
        // A pool without a pod to spare drains one before its successor starts: that is progress, although nothing gets ready meanwhile.
        for deployment in of_kind(&manifests, "Deployment").filter(|d| !name(d).ends_with("-router")) {
            let pod = &deployment["spec"]["template"]["spec"];
            let startup = &pod["containers"][0]["startupProbe"];
            let load = startup["periodSeconds"].as_u64().zip(startup["failureThreshold"].as_u64());
            let load = load.map(|(every, times)| every * times).context("no startup probe")?;
            let grace = pod["terminationGracePeriodSeconds"].as_u64().context("no grace period")?;
            let deadline = deployment["spec"]["progressDeadlineSeconds"].as_u64().context("no deadline")?;
            ensure!(deadline > load + grace, "{case}: {} within {deadline} s", name(deployment));
        }
        let router = of_kind(&manifests, "Deployment").find(|d| name(d).ends_with("-router")).context("no router")?;
        // It is ready once a decode worker is.
        let deadline = |deployment: &Value| deployment["spec"]["progressDeadlineSeconds"].as_u64();
        let decode = of_kind(&manifests, "Deployment").filter(|d| name(d).contains("-decode-")).filter_map(deadline);
        ensure!(deadline(router) > decode.max(), "{case}: routers give up before their workers do");
        let wait = &router["spec"]["template"]["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"];
        ensure!(wait.as_u64() > Some(0), "{case}: proxies still send to a router that is on its way out");
    }
    Ok(())
}

#[test]
fn an_etcd_that_waits_for_its_others_is_not_restarted() -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let etcd = of_kind(&manifests, "StatefulSet").next().context("no etcd")?;
    let container = &etcd["spec"]["template"]["spec"]["containers"][0];
    // /readyz asks for a leader, which one of three alone does not have; a failed startup probe kills.
    let path = |probe: &str| container[probe]["httpGet"]["path"].as_str().unwrap_or_default().to_owned();
    let paths = ["startupProbe", "livenessProbe", "readinessProbe"].map(path);
    ensure!(paths == ["/livez", "/livez", "/readyz"], "{paths:?}");
    Ok(())
}

#[test]
fn a_load_of_weights_is_bounded_by_the_startup_probe_alone() -> anyhow::Result<()> {
    for case in cases()? {
        let manifests = manifests(&render(&case)?)?;
        for deployment in of_kind(&manifests, "Deployment") {
            let container = &deployment["spec"]["template"]["spec"]["containers"][0];
            let path = |probe: &str| container[probe]["httpGet"]["path"].as_str().unwrap_or_default().to_owned();
            let paths = ["startupProbe", "livenessProbe", "readinessProbe"].map(path);
            ensure!(paths == ["/startupz", "/healthz", "/readyz"], "{case}: {paths:?}");
            let startup = &container["startupProbe"];
            let bound = startup["periodSeconds"].as_u64().zip(startup["failureThreshold"].as_u64());
            let worker = name(deployment).contains("prefill-") || name(deployment).contains("decode-");
            ensure!(!worker || bound.is_some_and(|(every, times)| every * times >= 900), "{case}: {startup}");
        }
    }
    Ok(())
}
