//! Which connections a cluster's network policies allow, decided from the policies themselves: the tests' node stores them without
//! enforcing them.

use anyhow::{Context, bail, ensure};
use serde_json::Value;
use std::collections::BTreeMap;

/// Labels of a pod or a namespace.
pub(crate) type Labels = BTreeMap<String, String>;

/// One end of a connection.
#[derive(Clone, Debug, Default)]
pub(crate) struct End {
    pub(crate) namespace: String,
    pub(crate) namespace_labels: Labels,
    /// Labels of the pod.
    pub(crate) labels: Labels,
    /// Named ports of the pod.
    pub(crate) ports: BTreeMap<String, u16>,
}

/// A direction, with the keys of a policy's rules and their peers.
#[derive(Clone, Copy)]
struct Way {
    kind: &'static str,
    rules: &'static str,
    peers: &'static str,
}

const IN: Way = Way { kind: "Ingress", rules: "ingress", peers: "from" };
const OUT: Way = Way { kind: "Egress", rules: "egress", peers: "to" };

/// Whether `from` may connect to `port` of `to` over TCP: the policies of both must allow it.
pub(crate) fn allowed(policies: &[Value], from: &End, to: &End, port: u16) -> anyhow::Result<bool> {
    Ok(lets(policies, OUT, from, to, to, port)? && lets(policies, IN, to, from, to, port)?)
}

/// Whether the policies of `of` allow a connection with `other`. A pod that no policy selects may have any connection.
fn lets(policies: &[Value], way: Way, of: &End, other: &End, to: &End, port: u16) -> anyhow::Result<bool> {
    let mut selected = false;
    for policy in policies {
        let spec = &policy["spec"];
        let here = policy["metadata"]["namespace"].as_str() == Some(&of.namespace);
        let kinds: Vec<&str> = spec["policyTypes"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        if !here || !kinds.contains(&way.kind) || !selects(&spec["podSelector"], &of.labels)? {
            continue;
        }
        selected = true;
        for rule in spec[way.rules].as_array().into_iter().flatten() {
            if is_peer(&rule[way.peers], other, &of.namespace)? && is_port(&rule["ports"], to, port)? {
                return Ok(true);
            }
        }
    }
    Ok(!selected)
}

/// Without a list of peers, every peer is allowed.
fn is_peer(peers: &Value, other: &End, own_namespace: &str) -> anyhow::Result<bool> {
    let Some(peers) = peers.as_array().filter(|peers| !peers.is_empty()) else { return Ok(true) };
    for peer in peers {
        if let Some(block) = peer.get("ipBlock") {
            let cidr = block["cidr"].as_str().context("a block without an address")?;
            ensure!(["0.0.0.0/0", "::/0"].contains(&cidr), "pods have no address here to compare with {cidr}");
            return Ok(true);
        }
        let namespace = match peer.get("namespaceSelector") {
            Some(selector) => selects(selector, &other.namespace_labels)?,
            None => other.namespace == own_namespace,
        };
        let pod = match peer.get("podSelector") {
            Some(selector) => selects(selector, &other.labels)?,
            None => true,
        };
        if namespace && pod {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Without a list of ports, every port is allowed.
fn is_port(ports: &Value, to: &End, port: u16) -> anyhow::Result<bool> {
    let Some(ports) = ports.as_array().filter(|ports| !ports.is_empty()) else { return Ok(true) };
    for entry in ports {
        if entry["protocol"].as_str().unwrap_or("TCP") != "TCP" {
            continue;
        }
        let first = match &entry["port"] {
            Value::Null => return Ok(true),
            Value::String(name) => to.ports.get(name).copied(),
            number => Some(u16::try_from(number.as_u64().context("a port")?)?),
        };
        let last = entry["endPort"].as_u64().map(u16::try_from).transpose()?.or(first);
        if first.is_some_and(|first| first <= port) && last.is_some_and(|last| port <= last) {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Whether a selector matches these labels; an empty selector matches all.
fn selects(selector: &Value, labels: &Labels) -> anyhow::Result<bool> {
    let exact = selector["matchLabels"].as_object().into_iter().flatten();
    if !exact.clone().all(|(key, value)| labels.get(key).map(String::as_str) == value.as_str()) {
        return Ok(false);
    }
    for expression in selector["matchExpressions"].as_array().into_iter().flatten() {
        let value = labels.get(expression["key"].as_str().context("a key")?);
        let listed = |value: &String| {
            expression["values"].as_array().into_iter().flatten().any(|v| v.as_str() == Some(value.as_str()))
        };
        let fits = match expression["operator"].as_str() {
            Some("In") => value.is_some_and(listed),
            Some("NotIn") => !value.is_some_and(listed),
            Some("Exists") => value.is_some(),
            Some("DoesNotExist") => value.is_none(),
            other => bail!("an operator that nobody knows: {other:?}"),
        };
        if !fits {
            return Ok(false);
        }
    }
    Ok(true)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn end(namespace: &str, component: &str) -> End {
        let labels = |key: &str, value: &str| Labels::from([(key.to_owned(), value.to_owned())]);
        End {
            namespace: namespace.into(),
            namespace_labels: labels("name", namespace),
            labels: labels("component", component),
            ports: BTreeMap::from([("grpc".to_owned(), 50052)]),
        }
    }

    fn policy(spec: Value) -> Value {
        json!({"metadata": {"namespace": "baton"}, "spec": spec})
    }

    #[test]
    fn a_connection_needs_both_sides() {
        let (router, worker) = (end("baton", "router"), end("baton", "decode"));
        let stranger = end("other", "client");
        let only_routers = policy(json!({
            "podSelector": {"matchLabels": {"component": "decode"}}, "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": {"matchExpressions": [{"key": "component", "operator": "In", "values": ["router"]}]}}],
                         "ports": [{"port": "grpc"}, {"port": 9000, "endPort": 9010}]}]}));
        let nothing_out = policy(json!({"podSelector": {}, "policyTypes": ["Egress"]}));
        let may = |policies: &[Value], from: &End, to: &End, port| allowed(policies, from, to, port).unwrap();
        assert!(may(&[], &stranger, &worker, 1));
        let ingress = [only_routers.clone()];
        for (from, port, expected) in [
            (&router, 50052, true),
            (&router, 9005, true),
            (&router, 9011, false),
            (&router, 50051, false),
            (&stranger, 50052, false),
            (&end("other", "router"), 50052, false),
        ] {
            assert_eq!(may(&ingress, from, &worker, port), expected, "{from:?} {port}");
        }
        assert!(may(&ingress, &worker, &router, 1), "nobody selects routers");
        assert!(!may(&[only_routers, nothing_out], &router, &worker, 50052), "nothing leaves");
    }

    #[test]
    fn peers_of_other_namespaces_are_named() {
        let spec = |peer: Value| json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": [{"from": [peer]}]});
        let (from, to) = (end("monitoring", "prometheus"), end("baton", "router"));
        for (peer, expected) in [
            (json!({"namespaceSelector": {}}), true),
            (json!({"namespaceSelector": {"matchLabels": {"name": "monitoring"}}, "podSelector": {}}), true),
            (
                json!({"namespaceSelector": {"matchLabels": {"name": "monitoring"}}, "podSelector": {"matchLabels": {"component": "x"}}}),
                false,
            ),
            (json!({"podSelector": {}}), false),
            (json!({"ipBlock": {"cidr": "0.0.0.0/0"}}), true),
        ] {
            assert_eq!(allowed(&[policy(spec(peer.clone()))], &from, &to, 80).unwrap(), expected, "{peer}");
        }
        let closed = json!({"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []});
        assert!(!allowed(&[policy(closed)], &from, &to, 80).unwrap());
        assert!(allowed(&[policy(spec(json!({"ipBlock": {"cidr": "10.0.0.0/8"}})))], &from, &to, 80).is_err());
    }
}
