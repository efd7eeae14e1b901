//! The Helm chart, rendered by real Helm over a matrix of values.

mod alerts;
mod configs;
mod etcd;
mod extras;
mod helm;
mod identity;
mod labels;
mod network;
mod parts;
mod prometheus;
mod refusals;
mod security;
mod upgrade;

use crate::helm::{
    RELEASES, cases, checked, helm, items, manifests, name, notes, of_kind, path, render, render_values,
};
use anyhow::ensure;
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
    for case in ["minimal", "gpu-rdma", "external-etcd", "extras", "cert-manager"] {
        let golden = path(&format!("tests/golden/chart/{case}.yaml"));
        expect_file![golden].assert_eq(&identity::masked(&render(case)?));
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
    // Parts of GPUs have names of their own.
    let mig = "nvidia.com/mig-3g.40gb";
    let values = format!("decode: {{engine: {{device: cuda}}, gpu: {{count: 1, resource: {mig}}}}}");
    let rendered = render_values(&values)?.map_err(anyhow::Error::msg)?;
    let manifests = helm::manifests(&rendered)?;
    let decode = of_kind(&manifests, "Deployment").find(|d| name(d).starts_with("baton-decode"));
    let Some(decode) = decode else { anyhow::bail!("no pool") };
    for container in helm::containers(&decode["spec"]["template"]["spec"]) {
        let limits = &container["resources"]["limits"];
        ensure!(limits[mig] == 1 && limits["nvidia.com/gpu"].is_null(), "{limits}");
    }
    Ok(())
}

#[test]
fn notes_tell_how_to_make_the_first_call() -> anyhow::Result<()> {
    let (no_keys, no_cuda, names) = ("no API keys are configured", "has never run on a GPU", "is one of those");
    let no_test = "helm test has nothing to run";
    let digest = "0".repeat(64);
    let keys = format!("auth: {{keys: [{{sha256: '{digest}', tenant: a}}]}}");
    let two = "models: [{name: a, source: x, decode: [{name: d}]}, {name: b, source: z, decode: [{name: d}]}]";
    // values, what is told, what is not
    let cases: [(&str, &[&str], &[&str]); 5] = [
        (
            "{}",
            &["service/baton-router 8000 50051", "/v1/chat/completions", no_keys],
            &[no_cuda, names, "Bearer", no_test],
        ),
        (&keys, &["Bearer $API_KEY", no_test, "auth.testKey"], &[no_keys]),
        (two, &[names, "\"model\":\"a\"", "in the cluster, to a."], &[no_cuda, no_test]),
        (
            "decode: {engine: {device: cuda}}",
            &[no_cuda, "decode pool default of model default", "set gpu.count to 1", "image.suffix to -cuda"],
            &["prefill pool"],
        ),
        (
            "image: {suffix: -cuda}\ndecode: {engine: {device: cuda}, gpu: {count: 1}}",
            &[no_cuda],
            &["gpu.count", "image.suffix"],
        ),
    ];
    for (values, told, not_told) in cases {
        let notes = notes(values)?;
        ensure!(told.iter().all(|part| notes.contains(part)), "{values} does not tell {told:?}:\n{notes}");
        ensure!(!not_told.iter().any(|part| notes.contains(part)), "{values} tells one of {not_told:?}:\n{notes}");
    }
    Ok(())
}
