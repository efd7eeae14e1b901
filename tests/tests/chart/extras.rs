//! What operators add to pods and services beside what Baton needs.

use crate::helm::{containers, items, manifests, name, notes, of_kind, render, render_values};
use anyhow::{Context, ensure};
use serde_json::{Value, json};

fn pod<'a>(manifests: &'a [Value], of: &str) -> anyhow::Result<&'a Value> {
    let found = of_kind(manifests, "Deployment").find(|d| name(d) == of);
    Ok(&found.with_context(|| format!("no {of}"))?["spec"]["template"]["spec"])
}

#[test]
fn pods_have_the_volumes_schedulers_and_networks_of_values() -> anyhow::Result<()> {
    let manifests = manifests(&render("extras")?)?;
    let (prefill, decode) =
        (pod(&manifests, "baton-prefill-llama-default")?, pod(&manifests, "baton-decode-llama-default")?);
    let router = pod(&manifests, "baton-router")?;
    let mounts = |pod: &Value, at: &str| items(&pod["containers"][0]["volumeMounts"]).any(|m| m["mountPath"] == at);
    let volumes = |pod: &Value, of: &str| items(&pod["volumes"]).any(|v| v["name"] == of);
    ensure!(mounts(prefill, "/etc/tuning") && volumes(prefill, "tuning") && !mounts(decode, "/etc/tuning"));
    ensure!(mounts(router, "/etc/trust") && volumes(router, "trust"));
    ensure!(
        prefill["schedulerName"] == "kueue"
            && decode["schedulerName"] == "volcano"
            && router["schedulerName"].is_null()
    );
    ensure!(decode["hostNetwork"] == true && decode["dnsPolicy"] == "ClusterFirstWithHostNet", "{decode}");
    ensure!(prefill["hostNetwork"].is_null() && prefill["dnsPolicy"].is_null());
    let etcd = of_kind(&manifests, "StatefulSet").next().context("no etcd")?;
    ensure!(etcd["spec"]["template"]["spec"]["schedulerName"] == "kueue");
    Ok(())
}

#[test]
fn a_digest_says_which_image_it_is() -> anyhow::Result<()> {
    let manifests = manifests(&render("extras")?)?;
    let digest = format!("baton/baton-prefill-worker@sha256:{}", "1".repeat(64));
    ensure!(containers(pod(&manifests, "baton-prefill-llama-default")?).all(|c| c["image"] == digest.as_str()));
    let decode = pod(&manifests, "baton-decode-llama-default")?;
    ensure!(containers(decode).all(|c| c["image"] == "baton/baton-decode-worker:0.1.0"), "the other role has none");
    Ok(())
}

#[test]
fn service_accounts_have_the_annotations_of_their_part() -> anyhow::Result<()> {
    let manifests = manifests(&render("extras")?)?;
    for (part, annotations) in [
        ("prefill", json!({"eks.amazonaws.com/role-arn": "arn:aws:iam::1:role/models"})),
        ("decode", Value::Null),
        ("router", json!({"example.com/team": "inference"})),
        ("etcd", json!({"example.com/team": "storage"})),
    ] {
        let account = of_kind(&manifests, "ServiceAccount").find(|a| name(a) == format!("baton-{part}"));
        ensure!(account.context("no account")?["metadata"]["annotations"] == annotations, "{part}");
    }
    Ok(())
}

#[test]
fn clients_that_balance_by_themselves_see_each_router() -> anyhow::Result<()> {
    let manifests = manifests(&render("minimal")?)?;
    let service = of_kind(&manifests, "Service").find(|s| name(s) == "baton-router-headless").context("no service")?;
    ensure!(
        service["spec"]["clusterIP"] == "None" && service["spec"]["publishNotReadyAddresses"].is_null(),
        "{service}"
    );
    // Ports cannot be mapped where there is no address.
    let ports: Vec<_> = items(&service["spec"]["ports"]).filter_map(|p| p["port"].as_u64()).collect();
    ensure!(ports == [50051, 8000], "{service}");
    let clients = of_kind(&manifests, "Service").find(|s| name(s) == "baton-router").context("no service")?;
    ensure!(service["spec"]["selector"] == clients["spec"]["selector"]);
    // Whoever asks for the service of clients by its component finds that one alone.
    let component = "app.kubernetes.io/component";
    ensure!(service["metadata"]["labels"][component] != clients["metadata"]["labels"][component]);
    Ok(())
}

#[test]
fn objectives_of_values_are_those_of_the_alerts() -> anyhow::Result<()> {
    let expressions = |case: &str| -> anyhow::Result<Vec<String>> {
        let manifests = manifests(&render(case)?)?;
        let rules = of_kind(&manifests, "PrometheusRule").next().context("no rules")?;
        let all = items(&rules["spec"]["groups"]).flat_map(|group| items(&group["rules"]));
        let own = all.filter(|rule| rule["alert"].as_str().is_some_and(|a| a.ends_with("Objective")));
        Ok(own.filter_map(|rule| rule["expr"].as_str()).map(str::to_owned).collect())
    };
    let ends = |case: &str, with: [&str; 2]| -> anyhow::Result<bool> {
        let found = expressions(case)?;
        Ok(found.len() == 2 && found.iter().zip(with).all(|(expression, with)| expression.ends_with(with)))
    };
    ensure!(ends("extras", ["> 2", "> 0.1"])?, "{:?}", expressions("extras")?);
    ensure!(ends("everything", ["> 5", "> 0.25"])?, "{:?}", expressions("everything")?);
    Ok(())
}

#[test]
fn notes_tell_how_to_ask_by_grpc() -> anyhow::Result<()> {
    let said = notes("{}")?;
    for part in [
        "grpcurl -plaintext",
        "127.0.0.1:50051 baton.v1.Inference/Generate",
        "dns:///baton-router-headless.llm.svc.cluster.local:50051",
    ] {
        ensure!(said.contains(part), "no {part} in {said}");
    }
    ensure!(notes("auth: {existingSecret: s}")?.contains("-H \"authorization: Bearer $API_KEY\" \\"));
    Ok(())
}

#[test]
fn a_secret_with_a_certificate_turns_on_tls_for_clients() -> anyhow::Result<()> {
    let manifests = manifests(&render_values("router: {tls: {secret: public}}")?.map_err(anyhow::Error::msg)?)?;
    let router = pod(&manifests, "baton-router")?;
    ensure!(items(&router["containers"][0]["volumeMounts"]).any(|m| m["mountPath"] == "/etc/baton/tls"), "{router}");
    ensure!(items(&router["volumes"]).any(|v| v["secret"]["secretName"] == "public"), "{router}");
    let config = of_kind(&manifests, "ConfigMap").find(|c| name(c) == "baton-router").context("no configuration")?;
    let config = config["data"]["baton.toml"].as_str().context("no file")?;
    ensure!(config.contains("[tls]\ndir = \"/etc/baton/tls\""), "{config}");
    let service = of_kind(&manifests, "Service").find(|s| name(s) == "baton-router").context("no service")?;
    ensure!(items(&service["spec"]["ports"]).all(|port| port["appProtocol"] == "https"), "{service}");
    let test = of_kind(&manifests, "Pod").find(|p| name(p) == "baton-test").context("no helm test")?;
    let command: Vec<_> = items(&test["spec"]["containers"][0]["command"]).filter_map(Value::as_str).collect();
    ensure!(command.contains(&"--ca=/etc/baton/tls/ca.crt"), "{command:?}");
    ensure!(command.iter().any(|word| word.starts_with("--server=https://baton-router.")), "{command:?}");
    // The test needs no key.
    let files = &test["spec"]["volumes"][0]["secret"]["items"];
    ensure!(files == &json!([{"key": "ca.crt", "path": "ca.crt"}]), "{files}");
    Ok(())
}
