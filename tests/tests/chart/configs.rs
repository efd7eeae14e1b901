//! Every configuration that the chart writes is read by the binary that it is for, with the variables of its pod.

use crate::helm::{cases, containers, items, manifests, name, of_kind, render};
use anyhow::{Context, bail, ensure};
use baton_tests::processes::binary;
use serde_json::Value;
use std::fs;
use std::process::Command;

/// One process of a pod, as far as its configuration goes.
struct Process {
    program: String,
    variables: Vec<(String, String)>,
    toml: String,
}

/// What Kubernetes makes of the variables of a container in a pod of this name and address.
fn variables(container: &Value, pod: &str, address: &str) -> Vec<(String, String)> {
    let mut known: Vec<(String, String)> = Vec::new();
    for variable in items(&container["env"]) {
        let name = variable["name"].as_str().unwrap_or_default().to_owned();
        let value = match variable["valueFrom"]["fieldRef"]["fieldPath"].as_str() {
            Some("metadata.name") => pod.to_owned(),
            Some("status.podIP") => address.to_owned(),
            _ if !variable["valueFrom"]["secretKeyRef"].is_null() => "a stand-in for a secret".to_owned(),
            _ => known.iter().fold(variable["value"].as_str().unwrap_or_default().to_owned(), |value, (name, is)| {
                value.replace(&format!("$({name})"), is)
            }),
        };
        known.push((name, value));
    }
    known
}

/// The TOML that the processes of a pod are given.
fn configuration<'a>(manifests: &'a [Value], pod: &Value) -> anyhow::Result<&'a str> {
    let config = items(&pod["volumes"]).find(|v| v["name"] == "config").context("no volume of the configuration")?;
    let map = of_kind(manifests, "ConfigMap").find(|m| m["metadata"]["name"] == config["configMap"]["name"]);
    map.and_then(|m| m["data"]["baton.toml"].as_str()).context("its ConfigMap is missing")
}

fn processes(manifests: &[Value], address: &str) -> anyhow::Result<Vec<Process>> {
    let mut found = Vec::new();
    for deployment in of_kind(manifests, "Deployment") {
        let pod = &deployment["spec"]["template"]["spec"];
        let toml = configuration(manifests, pod)?;
        // Those with a command run something else than their image's process.
        for container in containers(pod).filter(|container| container["command"].is_null()) {
            let image = container["image"].as_str().unwrap_or_default();
            let program =
                image.rsplit('/').next().and_then(|i| i.split([':', '@']).next()).unwrap_or_default().to_owned();
            let variables = variables(container, &format!("{}-5d8f-x2x", name(deployment)), address);
            found.push(Process { program, variables, toml: toml.to_owned() });
        }
    }
    Ok(found)
}

impl Process {
    /// Its effective configuration.
    fn dump(&self) -> anyhow::Result<String> {
        let folder = tempfile::tempdir()?;
        let file = folder.path().join("baton.toml");
        fs::write(&file, &self.toml)?;
        let mut command = Command::new(binary(&self.program)?);
        let own = self.variables.iter().filter(|(name, _)| name != "BATON_CONFIG");
        let output = command.arg("--dump-config").env_clear().envs(own.cloned()).env("BATON_CONFIG", &file).output()?;
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        ensure!(output.status.success(), "{} refuses\n{}{:?}\n{said}", self.program, self.toml, self.variables);
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    }
}

#[test]
fn every_process_takes_its_configuration() -> anyhow::Result<()> {
    for case in cases()? {
        let rendered = render(&case)?;
        let (address, listens) = if case == "keys" { ("fd00::7", "[::]") } else { ("10.1.2.3", "0.0.0.0") };
        let processes = processes(&manifests(&rendered)?, address)?;
        ensure!(processes.len() >= 2, "{case} has {} processes", processes.len());
        for process in processes {
            let dump = process.dump().with_context(|| case.clone())?;
            let has = |line: &str| dump.lines().any(|l| l == line);
            let ours = |name: &str| process.variables.iter().any(|(n, _)| n == name);
            ensure!(has(&format!("listen = \"{listens}:9090\"")), "{case}: {dump}");
            ensure!(has("backend = \"etcd\"") && has("prefix = \"/baton/llm/baton/\""), "{case}: {dump}");
            if ours("BATON_INSTANCE__ID") {
                ensure!(has(&format!("bind = \"{address}\"")), "{case}: {dump}");
            }
            if ours("BATON_GRPC__ADVERTISE") {
                let port = if process.program == "baton-router" { 50051 } else { 50052 };
                let advertised =
                    if case == "keys" { format!("[{address}]:{port}") } else { format!("{address}:{port}") };
                ensure!(has(&format!("advertise = \"{advertised}\"")), "{case}: {dump}");
            }
        }
    }
    Ok(())
}

#[test]
fn every_process_finds_the_collectors_authority() -> anyhow::Result<()> {
    let mut seen = Vec::new();
    for case in ["everything", "cpu"] {
        let manifests = manifests(&render(case)?)?;
        for deployment in of_kind(&manifests, "Deployment") {
            let pod = &deployment["spec"]["template"]["spec"];
            let secret = items(&pod["volumes"]).find(|v| v["secret"]["secretName"] == "collector-ca");
            let volume = &secret.context("no volume")?["name"];
            let toml = configuration(&manifests, pod)?;
            // What fetches weights reads the same configuration; doctor reads none.
            for container in containers(pod).filter(|container| container["name"] != "doctor") {
                let mount = items(&container["volumeMounts"]).find(|mount| mount["name"] == *volume);
                let at = mount.and_then(|mount| mount["mountPath"].as_str()).context("not mounted")?;
                ensure!(toml.contains(&format!("otlp_ca_file = \"{at}/ca.crt\"")), "{toml}");
                seen.push(container["name"].as_str().unwrap_or_default().to_owned());
            }
        }
    }
    ensure!(["router", "worker", "download"].iter().all(|name| seen.iter().any(|s| s == name)), "{seen:?}");
    Ok(())
}

/// Init containers that look at the devices of their pods.
fn doctors(manifests: &[Value]) -> impl Iterator<Item = &Value> {
    let pods = of_kind(manifests, "Deployment").map(|deployment| &deployment["spec"]["template"]["spec"]);
    pods.flat_map(|pod| items(&pod["initContainers"])).filter(|container| container["name"] == "doctor")
}

#[test]
fn doctor_is_told_what_the_worker_will_use() -> anyhow::Result<()> {
    let mixed = manifests(&render("mixed")?)?;
    let doctors_of_mixed: Vec<&Value> = doctors(&mixed).collect();
    let [doctor] = doctors_of_mixed[..] else { bail!("the pool with RDMA alone has one: {doctors_of_mixed:?}") };
    let arguments: Vec<_> = items(&doctor["command"]).filter_map(Value::as_str).collect();
    for argument in [
        "--ucx-tls=rc",
        "--ucx-net-devices=mlx5_0:1,mlx5_1:1",
        "--pool-bytes=40GiB",
        "--etcd=https://etcd-0.example.com:2379,https://etcd-1.example.com:2379",
    ] {
        ensure!(arguments.contains(&argument), "no {argument} in {arguments:?}");
    }
    let variables = variables(doctor, "pod", "10.1.2.3");
    let files = [("CA", "/etc/baton/etcd/ca.crt"), ("PASSWORD_FILE", "/etc/baton/etcd-password/password")];
    for (name, value) in files.map(|(n, v)| (format!("BATON_MEMBERSHIP__ETCD__{n}"), v)) {
        ensure!(variables.contains(&(name.clone(), value.to_owned())), "no {name} in {variables:?}");
        let mut mounts = items(&doctor["volumeMounts"]).filter_map(|mount| mount["mountPath"].as_str());
        ensure!(mounts.any(|at| value.starts_with(&format!("{at}/"))), "{value} is not mounted: {doctor}");
    }
    ensure!(variables.contains(&("UCX_IB_GID_INDEX".into(), "3".into())), "{variables:?}");
    // The chart's own etcd starts with the pods; and what a GPU holds is not locked in the host's memory.
    let gpu = manifests(&render("gpu-rdma")?)?;
    let wrong = |a: &str| a.starts_with("--etcd") || a.starts_with("--pool-bytes");
    let mut asked = doctors(&gpu).flat_map(|doctor| items(&doctor["command"])).filter_map(Value::as_str);
    ensure!(!asked.any(wrong) && doctors(&gpu).count() == 2);
    Ok(())
}

#[test]
fn doctor_knows_what_it_is_asked_by_pods_with_devices() -> anyhow::Result<()> {
    let mut all = manifests(&render("gpu-rdma")?)?;
    let asks_gpu = doctors(&all).count();
    all.extend(manifests(&render("mixed")?)?);
    let commands: Vec<Vec<&str>> =
        doctors(&all).map(|doctor| items(&doctor["command"]).filter_map(Value::as_str).collect()).collect();
    ensure!(commands.len() > asks_gpu && asks_gpu >= 2, "{commands:?}");
    for (i, command) in commands.into_iter().enumerate() {
        let [program, arguments @ ..] = &command[..] else { anyhow::bail!("no command") };
        ensure!(arguments.contains(&"--rdma") && arguments.contains(&"--gpu") == (i < asks_gpu), "{command:?}");
        // No name is asked for over the network here: an address that nothing listens at stands for theirs.
        let arguments =
            arguments.iter().map(|a| if a.starts_with("--etcd=") { "--etcd=http://127.0.0.1:1" } else { a });
        // It ends with 2 where it does not know an argument, and with 1 where something is missing, as here.
        let output = Command::new(binary(program)?).args(arguments).output()?;
        ensure!(matches!(output.status.code(), Some(0 | 1)) && !output.stdout.is_empty(), "{command:?}: {output:?}");
    }
    Ok(())
}

#[test]
fn every_model_lies_on_a_volume_of_its_pod() -> anyhow::Result<()> {
    let mut paths = 0;
    for case in cases()? {
        let manifests = manifests(&render(&case)?)?;
        for deployment in of_kind(&manifests, "Deployment") {
            let map = of_kind(&manifests, "ConfigMap").find(|m| name(m) == name(deployment)).context("no config")?;
            let toml = map["data"]["baton.toml"].as_str().unwrap_or_default();
            let source = toml.lines().find_map(|line| line.strip_prefix("model = \"")?.strip_suffix('"'));
            let Some(source) = source.filter(|source| source.starts_with('/')) else { continue };
            let mounts = items(&deployment["spec"]["template"]["spec"]["containers"][0]["volumeMounts"]);
            let mut mounts = mounts.filter_map(|mount| mount["mountPath"].as_str());
            let on_it = mounts.any(|at| source.strip_prefix(at).is_some_and(|rest| rest.starts_with('/')));
            ensure!(on_it, "{case}: {} mounts nothing that {source} lies on", name(deployment));
            paths += 1;
        }
    }
    ensure!(paths >= 6, "{paths} pools read a path");
    Ok(())
}

#[test]
fn values_reach_the_processes() -> anyhow::Result<()> {
    let expected: [(&str, &str, &[&str]); 7] = [
        ("cpu", "baton-router", &["policy = \"least-loaded\"", "prefill_policy = \"remote\""]),
        (
            "multi-model",
            "baton-decode-worker",
            &["\"topology.kubernetes.io/zone\" = \"eu-1a\"", "served_names = [\"large\"]"],
        ),
        (
            "everything",
            "baton-router",
            &[
                "running_max = 4096",
                "trace_sample_ratio = 0.05",
                "drain_ms_max = 120000",
                "ttl_ms = 600000",
                "ttl_ms_max = 7200000",
                "pin_ms_max = 3600000",
                "acme = 600000",
                "secret = \"********\"",
                "[prices.models.\"meta-llama/Llama-3.1-8B\"]",
                "cached_input = 0.05",
                "output = 2.0",
            ],
        ),
        (
            "everything",
            "baton-prefill-worker",
            &[
                "step_ms_max = 30000",
                "peers_max = 64",
                "drain_ms_max = 90000",
                "[engine.prefix_cache]",
                "ttl_ms = 900000",
                "pinned_percent_max = 40",
                "pinned_percent_of_one_max = 10",
                "folder = \"/weights/loras\"",
                "max_loras = 4",
                "max_rank = 64",
                "memory_bytes_max = 536870912",
            ],
        ),
        (
            "gpu-rdma",
            "baton-decode-worker",
            &["device = \"cuda\"", "ucx_net_devices = \"mlx5_0:1\"", "running_max = 256", "block_tokens = 64"],
        ),
        (
            "gpu",
            "baton-prefill-worker",
            &["device = \"cuda\"", "gpu_memory_utilization = 0.85", "transport = \"auto\""],
        ),
        (
            "external-etcd",
            "baton-decode-worker",
            &[
                "ca = \"/etc/baton/etcd/ca.crt\"",
                "password_file = \"/etc/baton/etcd-password/password\"",
                "user = \"baton\"",
            ],
        ),
    ];
    for (case, program, lines) in expected {
        let processes = processes(&manifests(&render(case)?)?, "10.1.2.3")?;
        let process = processes.iter().find(|p| p.program == program).with_context(|| format!("no {program}"))?;
        let dump = process.dump()?;
        for line in lines {
            ensure!(dump.lines().any(|l| l == *line), "{case}: {program} has no {line}:\n{dump}");
        }
    }
    Ok(())
}
