//! The network policies, evaluated against flows that must be possible and flows that must not.

use crate::helm::{items, manifests, of_kind, render};
use anyhow::ensure;
use serde_json::{Map, Value, json};

/// Labels of a pod.
type Labels = Map<String, Value>;

/// Who calls: a pod of this release by its component, or one of another namespace by the namespace's name.
#[derive(Clone, Copy, Debug)]
enum Caller {
    Own(&'static str),
    Foreign(&'static str),
}

fn labels(component: &str) -> Labels {
    let own = json!({"app.kubernetes.io/name": "baton", "app.kubernetes.io/instance": "baton",
        "app.kubernetes.io/component": component});
    own.as_object().cloned().unwrap_or_default()
}

fn selects(selector: &Value, labels: &Labels) -> bool {
    let wanted = selector["matchLabels"].as_object();
    wanted.is_none_or(|wanted| wanted.iter().all(|(key, value)| labels.get(key) == Some(value)))
}

fn is_peer(peer: &Value, caller: Caller) -> bool {
    match caller {
        Caller::Own(component) => {
            peer["namespaceSelector"].is_null() && selects(&peer["podSelector"], &labels(component))
        }
        Caller::Foreign(namespace) => {
            let name = json!({"kubernetes.io/metadata.name": namespace});
            !peer["namespaceSelector"].is_null()
                && selects(&peer["namespaceSelector"], &name.as_object().cloned().unwrap_or_default())
        }
    }
}

/// What Kubernetes says: a pod that no policy of a direction selects takes and sends everything, another one what any of its policies lets
/// in and out.
fn passes(manifests: &[Value], caller: Caller, to: &str, port: u64) -> bool {
    let (incoming, to) = (selected(manifests, to, "Ingress"), labels(to));
    let lets_in = |rule: &Value| {
        let at_port = rule["ports"].is_null() || items(&rule["ports"]).any(|p| p["port"] == port);
        let from = rule["from"].is_null() || items(&rule["from"]).any(|peer| is_peer(peer, caller));
        at_port && from
    };
    let lets_out = |rule: &Value| {
        let at_port = rule["ports"].is_null() || items(&rule["ports"]).any(|p| p["port"] == port);
        let own = |peer: &Value| peer["namespaceSelector"].is_null() && selects(&peer["podSelector"], &to);
        at_port && (rule["to"].is_null() || items(&rule["to"]).any(own))
    };
    let sends = match caller {
        Caller::Own(from) => {
            let outgoing = selected(manifests, from, "Egress");
            outgoing.is_empty() || outgoing.iter().any(|p| items(&p["spec"]["egress"]).any(lets_out))
        }
        Caller::Foreign(_) => true,
    };
    sends && (incoming.is_empty() || incoming.iter().any(|p| items(&p["spec"]["ingress"]).any(lets_in)))
}

/// The policies of one direction for pods of a component.
fn selected<'a>(manifests: &'a [Value], component: &str, direction: &str) -> Vec<&'a Value> {
    let selects = |p: &&Value| selects(&p["spec"]["podSelector"], &labels(component));
    let policies = of_kind(manifests, "NetworkPolicy").filter(selects);
    policies.filter(|p| items(&p["spec"]["policyTypes"]).any(|of| of == direction)).collect()
}

fn check(case: &str, flows: &[(Caller, &str, u64, bool)]) -> anyhow::Result<()> {
    let manifests = manifests(&render(case)?)?;
    for (caller, to, port, expected) in flows {
        let found = passes(&manifests, *caller, to, *port);
        ensure!(found == *expected, "{case}: {caller:?} to {to}:{port} passes: {found}");
    }
    Ok(())
}

use Caller::{Foreign, Own};

#[test]
fn only_routers_call_workers_and_workers_reach_each_other() -> anyhow::Result<()> {
    // The data plane listens on ports that the kernel gives.
    let data = 41_217;
    check(
        "everything",
        &[
            (Own("router"), "prefill", 50052, true),
            (Own("router"), "decode", 50052, true),
            (Own("prefill"), "decode", data, true),
            (Own("decode"), "prefill", data, true),
            (Own("decode"), "decode", data, true),
            (Own("prefill"), "prefill", data, true),
            (Own("router"), "decode", data, false),
            (Own("router"), "prefill", 9090, false),
            (Own("etcd"), "decode", 50052, false),
            (Own("test"), "decode", 50052, false),
            (Foreign("default"), "decode", 50052, false),
            (Foreign("default"), "prefill", data, false),
            (Foreign("gateways"), "decode", 50052, false),
            (Foreign("monitoring"), "decode", 9090, true),
            (Foreign("monitoring"), "decode", 50052, false),
            (Foreign("monitoring"), "prefill", data, false),
        ],
    )
}

#[test]
fn pods_call_whom_they_need_and_nobody_else_where_that_is_asked_for() -> anyhow::Result<()> {
    check(
        "extras",
        &[
            (Own("router"), "prefill", 50052, true),
            (Own("router"), "decode", 50052, true),
            (Own("router"), "etcd", 2379, true),
            (Own("prefill"), "decode", 40_000, true),
            (Own("decode"), "prefill", 40_000, true),
            (Own("prefill"), "etcd", 2379, true),
            (Own("etcd"), "etcd", 2379, true),
            (Own("etcd"), "etcd", 2380, true),
            (Own("etcd"), "router", 50051, false),
            (Own("decode"), "router", 50051, false),
            (Own("router"), "router", 50051, false),
            // A rule without peers lets them out to everybody at its port, and no further.
            (Own("decode"), "elsewhere", 443, true),
            (Own("decode"), "elsewhere", 80, false),
            (Own("etcd"), "elsewhere", 443, false),
        ],
    )?;
    let manifests = manifests(&render("extras")?)?;
    for policy in of_kind(&manifests, "NetworkPolicy") {
        let mut dns = items(&policy["spec"]["egress"]).flat_map(|rule| items(&rule["ports"]));
        ensure!(dns.any(|port| port["protocol"] == "UDP" && port["port"] == 53), "no names without DNS: {policy}");
    }
    Ok(())
}

#[test]
fn etcd_is_for_the_cluster_alone() -> anyhow::Result<()> {
    check(
        "everything",
        &[
            (Own("router"), "etcd", 2379, true),
            (Own("prefill"), "etcd", 2379, true),
            (Own("decode"), "etcd", 2379, true),
            (Own("etcd"), "etcd", 2379, true),
            (Own("etcd"), "etcd", 2380, true),
            (Own("router"), "etcd", 2380, false),
            (Own("decode"), "etcd", 2380, false),
            (Own("test"), "etcd", 2379, false),
            (Foreign("default"), "etcd", 2379, false),
            (Foreign("gateways"), "etcd", 2379, false),
            (Foreign("monitoring"), "etcd", 2381, true),
        ],
    )
}

#[test]
fn routers_take_the_clients_that_are_named_or_all() -> anyhow::Result<()> {
    check(
        "everything",
        &[
            (Foreign("gateways"), "router", 8000, true),
            (Foreign("gateways"), "router", 50051, true),
            (Foreign("gateways"), "router", 9090, false),
            (Own("test"), "router", 50051, true),
            (Foreign("default"), "router", 8000, false),
            (Own("decode"), "router", 50051, false),
            (Foreign("monitoring"), "router", 9090, true),
        ],
    )?;
    check(
        "minimal",
        &[
            (Foreign("default"), "router", 8000, true),
            (Foreign("default"), "router", 50051, true),
            (Foreign("default"), "router", 2379, false),
            (Foreign("default"), "decode", 50052, false),
        ],
    )
}
