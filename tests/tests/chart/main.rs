//! The Helm chart, rendered by real Helm over a matrix of values.

mod alerts;
mod configs;
mod helm;
mod network;
mod prometheus;
mod refusals;
mod security;

use crate::helm::{
    RELEASES, cases, checked, helm, items, manifests, name, notes, of_kind, path, render, render_values,
};
use anyhow::{Context, ensure};
use expect_test::expect_file;
use std::collections::BTreeSet;

#[test]
fn every_case_is_linted_and_valid_in_three_releases() -> anyhow::Result<()> {
    for case in cases()? {
        let linted = helm(&["lint", "--strict"], Some(&case), "")?;
        ensure!(linted.is_ok(), "{case}: {linted:?}");
        let manifests = checked(&render(&case)?)?;
        let names: BTreeSet<_> = manifests.iter().map(|m| (m["kind"].to_string(), name(m))).collect();
        ensure!(names.len() == manifests.len(), "{case}: two objects of one kind have one name");
        // A pod's name is that of its Deployment with 17 bytes behind it, and is a host's name.
        let long: Vec<_> = of_kind(&manifests, "Deployment").map(name).filter(|name| name.len() > 46).collect();
        ensure!(long.is_empty(), "{case}: {long:?}");
    }
    Ok(())
}

#[test]
fn what_is_wrong_is_told_by_the_check_of_schemas() -> anyhow::Result<()> {
    let wrong = "apiVersion: v1\nkind: Service\nmetadata: {name: a}\nspec: {prots: []}\n";
    let said = checked(wrong).unwrap_err().to_string();
    ensure!(RELEASES.iter().all(|release| said.contains(release)) && said.contains("prots"), "{said}");
    let twice = "apiVersion: v1\nkind: Service\nmetadata: {name: a, name: b}\n";
    ensure!(manifests(twice).unwrap_err().to_string().contains("stand twice"));
    Ok(())
}

#[test]
fn renderings_are_as_they_were() -> anyhow::Result<()> {
    for case in ["minimal", "gpu-rdma", "external-etcd"] {
        let golden = path(&format!("tests/golden/chart/{case}.yaml"));
        expect_file![golden].assert_eq(&render(case)?);
    }
    Ok(())
}

#[test]
fn pools_take_what_they_do_not_set_from_their_model_and_their_role() -> anyhow::Result<()> {
    let values = "
decode: {replicas: 3, scratch: 2Gi}
models:
  - name: m
    source: random:seed=1
    engine: {runningMax: 7, threads: 2}
    decode: [{name: a}, {name: b, replicas: 5, engine: {threads: 9}}]
";
    let rendered = render_values(values)?.map_err(anyhow::Error::msg)?;
    let manifests = manifests(&rendered)?;
    let replicas: Vec<_> =
        of_kind(&manifests, "Deployment").map(|d| (name(d), d["spec"]["replicas"].as_u64().unwrap_or(0))).collect();
    ensure!(replicas == [("baton-decode-m-a", 3), ("baton-decode-m-b", 5), ("baton-router", 1)], "{replicas:?}");
    for (pool, threads) in [("a", 2), ("b", 9)] {
        let of_pool = |m: &&serde_json::Value| name(m) == format!("baton-decode-m-{pool}");
        let config = of_kind(&manifests, "ConfigMap").find(of_pool).map(|m| m["data"]["baton.toml"].to_string());
        let config = config.unwrap_or_default();
        for line in [format!("threads = {threads}\\n"), "running_max = 7\\n".into(), "block_tokens = 16\\n".into()] {
            ensure!(config.contains(&line), "{pool} has no {line}: {config}");
        }
    }
    Ok(())
}

#[test]
fn devices_are_asked_for_by_the_pods_that_need_them() -> anyhow::Result<()> {
    let manifests = manifests(&render("gpu-rdma")?)?;
    let mut pods = 0;
    for deployment in of_kind(&manifests, "Deployment").filter(|d| name(d) != "baton-router") {
        let pod = &deployment["spec"]["template"]["spec"];
        for container in items(&pod["containers"]) {
            let limits = &container["resources"]["limits"];
            ensure!(limits["nvidia.com/gpu"] == 1 && limits["rdma/hca_shared_devices_a"] == 1, "{limits}");
            ensure!(limits["hugepages-2Mi"] == "2Gi", "{limits}");
            let mounts: Vec<_> = items(&container["volumeMounts"]).filter_map(|m| m["mountPath"].as_str()).collect();
            ensure!(["/dev/shm", "/dev/hugepages", "/weights"].iter().all(|m| mounts.contains(m)), "{mounts:?}");
            pods += 1;
        }
        ensure!(items(&pod["topologySpreadConstraints"]).count() == 1 && items(&pod["tolerations"]).count() == 1);
        ensure!(pod["priorityClassName"] == "inference" && pod["runtimeClassName"] == "nvidia", "{pod}");
        // No GPU is left over for a successor.
        ensure!(deployment["spec"]["strategy"]["rollingUpdate"]["maxSurge"] == 0);
    }
    ensure!(pods == 2, "{pods} pools");
    Ok(())
}

/// The command and the variables of the pod that `helm test` starts.
fn test_call(values: &str) -> anyhow::Result<Option<(Vec<String>, Vec<String>)>> {
    let manifests = manifests(&render_values(values)?.map_err(anyhow::Error::msg)?)?;
    let pod = of_kind(&manifests, "Pod").next();
    Ok(pod.map(|pod| {
        let container = &pod["spec"]["containers"][0];
        let texts = |of: &serde_json::Value, key: &str| {
            items(of)
                .filter_map(|i| if key.is_empty() { i.as_str() } else { i[key].as_str() })
                .map(str::to_owned)
                .collect()
        };
        (texts(&container["command"], ""), texts(&container["env"], "name"))
    }))
}

#[test]
fn the_test_of_a_release_names_a_model_and_has_a_key() -> anyhow::Result<()> {
    let two = "models: [{name: a, source: x, decode: [{name: d}]}, {name: b, source: z, decode: [{name: d}]}]";
    let asked = |values: &str| -> anyhow::Result<Vec<String>> {
        let (command, _) = test_call(values)?.context("there is no test")?;
        Ok(command.into_iter().filter(|argument| argument.starts_with("--model")).collect())
    };
    // One model needs no name; of several the router would ask for one.
    ensure!(asked("{}")?.is_empty() && asked(two)? == ["--model=a"]);
    ensure!(asked(&format!("{two}\ntest: {{model: b}}"))? == ["--model=b"]);
    let keys = format!("auth: {{keys: [{{sha256: '{}', tenant: a}}]", "0".repeat(64));
    ensure!(test_call(&format!("{keys}}}"))?.is_none(), "a test without a key is refused by the router");
    ensure!(test_call("auth: {existingSecret: s}")?.is_none(), "a test without a key is refused by the router");
    let (_, variables) = test_call(&format!("{keys}, testKey: {{secret: t}}}}"))?.context("there is no test")?;
    ensure!(variables == ["BATON_API_KEY"], "{variables:?}");
    Ok(())
}

#[test]
fn metrics_are_not_on_the_service_of_clients() -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let ports = |of: &str| -> Vec<u64> {
        let service = of_kind(&manifests, "Service").find(|s| name(s) == of);
        service.map(|s| items(&s["spec"]["ports"]).filter_map(|p| p["port"].as_u64()).collect()).unwrap_or_default()
    };
    ensure!(ports("llm-router") == [50051, 8000] && ports("llm-router-metrics") == [9090]);
    let selected = |labels: &serde_json::Value, of: &serde_json::Value| {
        labels.as_object().is_some_and(|labels| labels.iter().all(|(key, value)| of[key] == *value))
    };
    // Prometheus' operator reads the one service and no other, and takes no label away that alerts ask for.
    let monitor = of_kind(&manifests, "ServiceMonitor").next().context("no ServiceMonitor")?;
    let of_monitor = of_kind(&manifests, "Service")
        .filter(|s| selected(&monitor["spec"]["selector"]["matchLabels"], &s["metadata"]["labels"]));
    ensure!(of_monitor.map(name).eq(["llm-router-metrics"]), "{monitor}");
    ensure!(monitor["spec"]["endpoints"][0]["honorLabels"] == true, "{monitor}");
    let service = of_kind(&manifests, "Service").find(|s| name(s) == "llm-router-metrics").context("no service")?;
    let router = of_kind(&manifests, "Deployment").find(|d| name(d) == "llm-router").context("no router")?;
    ensure!(selected(&service["spec"]["selector"], &router["spec"]["template"]["metadata"]["labels"]), "{service}");
    ensure!(service["spec"]["clusterIP"] == "None" && service["spec"]["type"].is_null(), "{service}");
    Ok(())
}

#[test]
fn pools_shrink_only_after_their_look_back() -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let hpa = of_kind(&manifests, "HorizontalPodAutoscaler").map(|s| &s["spec"]["behavior"]);
    let keda = of_kind(&manifests, "ScaledObject")
        .map(|s| &s["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]);
    let behaviors: Vec<_> = hpa.chain(keda).collect();
    ensure!(behaviors.len() == 2, "{behaviors:?}");
    for behavior in behaviors {
        ensure!(behavior["scaleDown"]["stabilizationWindowSeconds"] == 300, "{behavior}");
        ensure!(behavior["scaleDown"]["policies"][0]["value"] == 1, "{behavior}");
    }
    Ok(())
}

#[test]
fn notes_tell_how_to_make_the_first_call() -> anyhow::Result<()> {
    let (no_keys, no_cuda, names) = ("no API keys are configured", "no CUDA engine", "is one of those");
    let no_test = "helm test has nothing to run";
    let digest = "0".repeat(64);
    let keys = format!("auth: {{keys: [{{sha256: '{digest}', tenant: a}}]}}");
    let two = "models: [{name: a, source: x, decode: [{name: d}]}, {name: b, source: z, decode: [{name: d}]}]";
    // values, what is told, what is not
    let cases: [(&str, &[&str], &[&str]); 4] = [
        (
            "{}",
            &["service/baton-router 8000 50051", "/v1/chat/completions", no_keys],
            &[no_cuda, names, "Bearer", no_test],
        ),
        (&keys, &["Bearer $API_KEY", no_test, "auth.testKey"], &[no_keys]),
        (two, &[names, "\"model\":\"a\"", "in the cluster, to a."], &[no_cuda, no_test]),
        ("decode: {engine: {device: cuda}}", &[no_cuda, "decode pool default of model default"], &["prefill pool"]),
    ];
    for (values, told, not_told) in cases {
        let notes = notes(values)?;
        ensure!(told.iter().all(|part| notes.contains(part)), "{values} does not tell {told:?}:\n{notes}");
        ensure!(!not_told.iter().any(|part| notes.contains(part)), "{values} tells one of {not_told:?}:\n{notes}");
    }
    Ok(())
}
