//! What the parts of a release are made of: images, variables, labels, services, and the pod of `helm test`.

use crate::helm::{cases, checked, containers, items, manifests, name, of_kind, render, render_values};
use anyhow::{Context, ensure};
use serde_json::Value;

/// The command and the variables of the pod that `helm test` starts.
fn test_call(values: &str) -> anyhow::Result<Option<(Vec<String>, Vec<String>)>> {
    let manifests = manifests(&render_values(values)?.map_err(anyhow::Error::msg)?)?;
    let pod = of_kind(&manifests, "Pod").next();
    Ok(pod.map(|pod| {
        let container = &pod["spec"]["containers"][0];
        let texts = |of: &Value, key: &str| {
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
    // With prefill workers it is to see KV cross pods; where there are none, or they are not used, it cannot.
    let transfers = |values: &str| -> anyhow::Result<bool> {
        let (command, _) = test_call(values)?.context("there is no test")?;
        let long = command.iter().any(|argument| argument.len() > 500);
        let asked = command.iter().any(|argument| argument == "--expect-transfer");
        ensure!(long == asked, "{command:?}");
        Ok(asked)
    };
    ensure!(transfers("{}")? && !transfers("router: {prefillPolicy: local}")? && !transfers(two)?);
    ensure!(!transfers("prefill: {replicas: 0}")? && transfers("prefill: {replicas: 0, autoscaling: {kind: keda}}")?);
    let keys = format!("auth: {{keys: [{{sha256: '{}', tenant: a}}]", "0".repeat(64));
    ensure!(test_call(&format!("{keys}}}"))?.is_none(), "a test without a key is refused by the router");
    ensure!(test_call("auth: {existingSecret: s}")?.is_none(), "a test without a key is refused by the router");
    let (_, variables) = test_call(&format!("{keys}, testKey: {{secret: t}}}}"))?.context("there is no test")?;
    ensure!(variables == ["BATON_API_KEY"], "{variables:?}");
    Ok(())
}

#[test]
fn a_part_may_have_an_image_of_its_own() -> anyhow::Result<()> {
    let images = |rendered: &str| -> anyhow::Result<Vec<(String, String)>> {
        let manifests = manifests(rendered)?;
        let made = of_kind(&manifests, "Deployment").flat_map(|deployment| {
            let pod = &deployment["spec"]["template"]["spec"];
            containers(pod).map(|c| (name(deployment).to_owned(), c["image"].as_str().unwrap_or_default().to_owned()))
        });
        Ok(made.collect())
    };
    let at = |part: &str, tag: &str| format!("registry.example.com/baton/baton-{part}:{tag}");
    let worker = "decode-worker";
    let expected = [
        ("baton-decode-smollm2-plain", at(worker, "1.2.4-cpu")),
        // Its init container looks with the same build.
        ("baton-decode-smollm2-rdma", at(worker, "1.2.3-rdma")),
        ("baton-decode-smollm2-rdma", at(worker, "1.2.3-rdma")),
        ("baton-prefill-smollm2-plain", at("prefill-worker", "1.2.3")),
        // There is no router of another build.
        ("baton-router", at("router", "1.2.4")),
    ];
    let found = images(&render("mixed")?)?;
    ensure!(found == expected.map(|(of, image)| (of.to_owned(), image)), "{found:?}");
    let own = "image: {tag: \"1\", suffix: -x}
decode: {image: {repository: example.com/mine}}
router: {image: {suffix: -slim}}
";
    let found = images(&render_values(own)?.map_err(anyhow::Error::msg)?)?;
    let images: Vec<&str> = found.iter().map(|(_, image)| image.as_str()).collect();
    ensure!(
        images == ["example.com/mine:1-x", "baton/baton-prefill-worker:1-x", "baton/baton-router:1-slim"],
        "{found:?}"
    );
    Ok(())
}

#[test]
fn pods_have_what_selects_them_and_no_version_of_the_chart() -> anyhow::Result<()> {
    for case in cases()? {
        let manifests = manifests(&render(&case)?)?;
        for made in of_kind(&manifests, "Deployment").chain(of_kind(&manifests, "StatefulSet")) {
            let labels = &made["spec"]["template"]["metadata"]["labels"];
            let versions = ["helm.sh/chart", "app.kubernetes.io/version"];
            ensure!(versions.iter().all(|label| labels[label].is_null()), "{case}: {} has {labels}", name(made));
            ensure!(
                versions.iter().all(|label| made["metadata"]["labels"][label].is_string()),
                "{case}: {}",
                name(made)
            );
            let wanted = made["spec"]["selector"]["matchLabels"].as_object().context("no selector")?;
            ensure!(wanted.iter().all(|(key, value)| labels[key] == *value), "{case}: {} has {labels}", name(made));
        }
    }
    Ok(())
}

#[test]
fn variables_of_values_reach_all_containers_of_a_pod() -> anyhow::Result<()> {
    let values = "
models:
  - name: m
    source: org/m
    weights: {download: {size: 1Gi}}
    decode: [{name: d, gpu: {count: 1}}]
decode: {env: [{name: HTTPS_PROXY, value: 'http://proxy:3128'}]}
router: {env: [{name: OTEL_RESOURCE_ATTRIBUTES, value: a=b}]}
";
    let manifests = checked(&render_values(values)?.map_err(anyhow::Error::msg)?)?;
    for (of, variable, count) in
        [("baton-decode-m-d", "HTTPS_PROXY", 3), ("baton-router", "OTEL_RESOURCE_ATTRIBUTES", 1)]
    {
        let deployment = of_kind(&manifests, "Deployment").find(|d| name(d) == of).context("no deployment")?;
        let pod = &deployment["spec"]["template"]["spec"];
        let having = containers(pod).filter(|c| items(&c["env"]).any(|v| v["name"] == variable)).count();
        ensure!(having == count, "{of}: {having} of {count} containers have {variable}");
    }
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
    let selected = |labels: &Value, of: &Value| {
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
fn pods_are_read_at_the_port_of_their_metrics() -> anyhow::Result<()> {
    for (case, components) in
        [("everything", &["prefill", "decode", "etcd"][..]), ("cpu", &["router", "prefill", "decode", "etcd"])]
    {
        let manifests = manifests(&render(case)?)?;
        let monitor = of_kind(&manifests, "PodMonitor").next().context("no PodMonitor")?;
        let selector = &monitor["spec"]["selector"];
        ensure!(items(&selector["matchExpressions"][0]["values"]).eq(components), "{case}: {selector}");
        let made = of_kind(&manifests, "Deployment").chain(of_kind(&manifests, "StatefulSet"));
        for template in made.map(|made| &made["spec"]["template"]) {
            let mut ports = items(&template["spec"]["containers"][0]["ports"]);
            ensure!(ports.any(|port| port["name"] == "metrics"), "{case}: {template}");
        }
    }
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
