//! Who the parts of a release prove to be: a certificate for each role, from the chart, from Secrets, or from cert-manager.

use crate::helm::{items, manifests, name, of_kind, render, render_values};
use crate::upgrade::upgraded;
use anyhow::{Context, ensure};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::Path;
use std::process::Command;

/// Roles of a release with an etcd of its own.
const ROLES: [&str; 4] = ["etcd", "operator", "router", "worker"];

/// A rendering without what is drawn anew each time.
pub(crate) fn masked(rendered: &str) -> String {
    let file = |line: &str| {
        let key = line.trim_start().split_once(": ").map(|(key, _)| key);
        key.filter(|key| ["ca.crt", "ca.key", "tls.crt", "tls.key"].contains(key)).map(str::to_owned)
    };
    let line = |line: &str| file(line).map_or_else(|| line.to_owned(), |key| format!("  {key}: drawn"));
    rendered.lines().map(line).map(|line| line + "\n").collect()
}

fn openssl(arguments: &[&str]) -> anyhow::Result<String> {
    let output = Command::new("openssl").args(arguments).output()?;
    let said = String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "openssl {arguments:?}: {said}");
    Ok(said)
}

/// The files of a Secret in a folder.
fn unpack(secret: &Value, to: &Path) -> anyhow::Result<()> {
    for (file, content) in secret["data"].as_object().context("no data")? {
        fs::write(to.join("encoded"), content.as_str().context("no text")?)?;
        let (from, to) = (to.join("encoded"), to.join(file));
        openssl(&["base64", "-d", "-A", "-in", &from.display().to_string(), "-out", &to.display().to_string()])?;
    }
    Ok(())
}

fn secrets(manifests: &[Value]) -> Vec<Value> {
    of_kind(manifests, "Secret").filter(|s| name(s).contains("-identity-")).cloned().collect()
}

fn values(given: &str) -> anyhow::Result<Vec<Value>> {
    manifests(&render_values(given)?.map_err(anyhow::Error::msg)?)
}

/// The Secret that each part has as its identity.
fn used(manifests: &[Value]) -> BTreeMap<String, String> {
    let made = of_kind(manifests, "Deployment").chain(of_kind(manifests, "StatefulSet"));
    let secret = |made: &Value| {
        let volume = items(&made["spec"]["template"]["spec"]["volumes"]).find(|v| v["name"] == "identity")?;
        Some((name(made).to_owned(), volume["secret"]["secretName"].as_str()?.to_owned()))
    };
    made.filter_map(secret).collect()
}

#[test]
fn the_authority_of_the_chart_signs_a_certificate_for_each_role() -> anyhow::Result<()> {
    let manifests = values("etcd: {replicas: 3}")?;
    let made = secrets(&manifests);
    let names: Vec<_> = made.iter().map(name).collect();
    let of = |role: &str| format!("baton-identity-{role}");
    ensure!(names == ["authority", "etcd", "operator", "router", "worker"].map(of), "{names:?}");
    // Applied over those of before, they are refused: a second authority would be a second cluster.
    ensure!(made.iter().all(|secret| secret["immutable"] == true), "{names:?}");
    for role in ROLES {
        let folder = tempfile::tempdir()?;
        let secret = made.iter().find(|s| name(s) == of(role)).context("no secret")?;
        ensure!(secret["type"] == "kubernetes.io/tls");
        unpack(secret, folder.path())?;
        let file = |name: &str| folder.path().join(name).display().to_string();
        let own = format!("{role}.baton.internal");
        openssl(&["verify", "-CAfile", &file("ca.crt"), "-verify_hostname", &own, &file("tls.crt")])?;
        for purpose in ["sslserver", "sslclient"] {
            openssl(&["verify", "-purpose", purpose, "-CAfile", &file("ca.crt"), &file("tls.crt")])?;
        }
        for other in ROLES.iter().filter(|other| **other != role) {
            let other = format!("{other}.baton.internal");
            let wrong = openssl(&["verify", "-CAfile", &file("ca.crt"), "-verify_hostname", &other, &file("tls.crt")]);
            ensure!(wrong.is_err(), "the certificate of {role} passes for {other}");
        }
        let node = "baton-etcd-2.baton-etcd.llm.svc.cluster.local";
        let is_node = openssl(&["verify", "-CAfile", &file("ca.crt"), "-verify_hostname", node, &file("tls.crt")]);
        ensure!(is_node.is_ok() == (role == "etcd"), "{role}: {is_node:?}");
        let key = openssl(&["pkey", "-in", &file("tls.key"), "-pubout"])?;
        ensure!(key == openssl(&["x509", "-in", &file("tls.crt"), "-noout", "-pubkey"])?, "the key is another's");
    }
    Ok(())
}

#[test]
fn the_authority_is_in_no_pod_and_each_part_has_its_role() -> anyhow::Result<()> {
    let manifests = manifests(&render("everything")?)?;
    let used = used(&manifests);
    let expected = [
        ("llm-decode-llama-default", "worker"),
        ("llm-etcd", "etcd"),
        ("llm-prefill-llama-default", "worker"),
        ("llm-router", "router"),
    ];
    let expected: BTreeMap<_, _> = expected.map(|(of, role)| (of.to_owned(), format!("llm-identity-{role}"))).into();
    ensure!(used == expected, "{used:?}");
    for map in of_kind(&manifests, "ConfigMap") {
        if let Some(toml) = map["data"]["baton.toml"].as_str() {
            ensure!(toml.contains("[identity]\ndir = \"/etc/baton/identity\"\n"), "{toml}");
            ensure!(toml.contains("https://llm-etcd-0.") && !toml.contains("http://llm-etcd"), "{toml}");
        }
        if let Some(etcd) = map["data"]["etcd.yaml"].as_str() {
            ensure!(
                etcd.matches("client-cert-auth: true\n").count() == 2 && !etcd.contains("client-urls: http:"),
                "{etcd}"
            );
            // A worker's certificate makes no node of etcd.
            ensure!(etcd.contains("allowed-hostname: [etcd.baton.internal]"), "{etcd}");
        }
    }
    let cluster = of_kind(&manifests, "Service").find(|s| name(s) == "llm-router-cluster").context("no service")?;
    ensure!(items(&cluster["spec"]["ports"]).map(|p| &p["port"]).eq([50052]), "{cluster}");
    let clients = of_kind(&manifests, "Service").find(|s| name(s) == "llm-router").context("no service")?;
    ensure!(items(&clients["spec"]["ports"]).all(|p| p["port"] != 50052), "that of clients may be open to the world");
    Ok(())
}

#[test]
fn an_upgrade_keeps_the_authority_and_its_certificates() -> anyhow::Result<()> {
    let installed = secrets(&values("{}")?);
    let again = secrets(&values("{}")?);
    ensure!(
        installed.len() == 5 && installed.iter().zip(&again).all(|(a, b)| a["data"] != b["data"]),
        "without a look"
    );
    let upgraded = |there: &[Value], with: &str| -> anyhow::Result<Vec<Value>> {
        let rendered = upgraded(there, with)?.map_err(anyhow::Error::msg)?;
        Ok(secrets(&manifests(&rendered)?))
    };
    let kept = upgraded(&installed, "router: {replicas: 2}")?;
    ensure!(kept.len() == 5 && installed.iter().zip(&kept).all(|(a, b)| a["data"] == b["data"]), "{kept:?}");
    // One that is missing is made by the same authority.
    let missing: Vec<Value> = installed.iter().filter(|s| !name(s).ends_with("-worker")).cloned().collect();
    let mended = upgraded(&missing, "{}")?;
    let of = |all: &[Value], role: &str| all.iter().find(|s| name(s).ends_with(role)).cloned().unwrap_or_default();
    ensure!(of(&mended, "-router")["data"] == of(&installed, "-router")["data"]);
    ensure!(of(&mended, "-worker")["data"]["ca.crt"] == of(&installed, "-router")["data"]["ca.crt"]);
    let folder = tempfile::tempdir()?;
    unpack(&of(&mended, "-worker"), folder.path())?;
    let file = |name: &str| folder.path().join(name).display().to_string();
    openssl(&["verify", "-CAfile", &file("ca.crt"), &file("tls.crt")])?;
    Ok(())
}

#[test]
fn cert_manager_is_asked_for_a_certificate_for_each_role() -> anyhow::Result<()> {
    let manifests = manifests(&render("cert-manager")?)?;
    ensure!(secrets(&manifests).is_empty(), "the Secrets are cert-manager's");
    let used = used(&manifests);
    let mut roles = Vec::new();
    for certificate in of_kind(&manifests, "Certificate") {
        let spec = &certificate["spec"];
        let role = spec["dnsNames"][0].as_str().and_then(|n| n.strip_suffix(".baton.internal")).context("no role")?;
        let hosts: Vec<_> = items(&spec["dnsNames"]).skip(1).filter_map(Value::as_str).collect();
        let expected: &[&str] = if role == "etcd" { &["*.baton-etcd.llm.svc.cluster.local", "localhost"] } else { &[] };
        ensure!(hosts == expected, "{role}: {hosts:?}");
        ensure!(
            items(&spec["usages"]).any(|u| u == "client auth") && items(&spec["usages"]).any(|u| u == "server auth")
        );
        ensure!(spec["issuerRef"]["name"] == "cluster" && spec["issuerRef"]["kind"] == "ClusterIssuer", "{spec}");
        let secret = spec["secretName"].as_str().context("no secret")?;
        ensure!(used.values().any(|used| used == secret) == (role != "operator"), "{role}: {secret}");
        ensure!((secret == "operators") == (role == "operator"), "{secret}");
        roles.push(role.to_owned());
    }
    ensure!(roles == ROLES, "{roles:?}");
    Ok(())
}

#[test]
fn secrets_of_values_are_used_as_they_are() -> anyhow::Result<()> {
    let manifests = values("identity: {from: secrets, secrets: {worker: mine}}")?;
    ensure!(secrets(&manifests).is_empty());
    let used = used(&manifests);
    ensure!(
        used["baton-decode-default-default"] == "mine" && used["baton-router"] == "baton-identity-router",
        "{used:?}"
    );
    Ok(())
}

#[test]
fn without_certificates_nobody_is_an_operator_from_outside() -> anyhow::Result<()> {
    let manifests = manifests(&render("in-clear")?)?;
    ensure!(secrets(&manifests).is_empty() && used(&manifests).is_empty());
    for toml in of_kind(&manifests, "ConfigMap").filter_map(|m| m["data"]["baton.toml"].as_str()) {
        ensure!(toml.contains("[identity]\ninsecure = true\n") && toml.contains("http://baton-etcd-0."), "{toml}");
        ensure!(!toml.contains("[cluster]") || toml.contains("[cluster]\nlisten = \"127.0.0.1:50052\"\n"), "{toml}");
    }
    ensure!(of_kind(&manifests, "Service").all(|s| !name(s).ends_with("-router-cluster")));
    Ok(())
}
