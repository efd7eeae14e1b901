//! What an upgrade must not change: Helm asks a stand-in of an API server, which has objects already.

use crate::helm::{NAMESPACE, manifests, name, of_kind, path, render_values, tool};
use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::io::{BufRead as _, BufReader, Write as _};
use std::net::{TcpListener, TcpStream};
use std::time::Duration;

/// Longest silence of Helm within a call.
const SILENCE_MAX: Duration = Duration::from_secs(10);

/// Answers one request: the kinds of a group, or an object that there is.
fn answer(stream: TcpStream, there: &[Value]) -> anyhow::Result<()> {
    stream.set_read_timeout(Some(SILENCE_MAX))?;
    let mut lines = BufReader::new(&stream).lines();
    let asked = lines.next().context("no request")??;
    for line in lines {
        if line?.is_empty() {
            break;
        }
    }
    let path = asked.split([' ', '?']).nth(1).unwrap_or_default();
    let kinds = |group: &str, plural: &str, kind: &str| {
        let singular = kind.to_lowercase();
        let kind =
            json!({"name": plural, "singularName": singular, "namespaced": true, "kind": kind, "verbs": ["get"]});
        json!({"kind": "APIResourceList", "groupVersion": group, "resources": [kind]})
    };
    let found = there.iter().find(|object| {
        let folder = if object["kind"] == "Secret" {
            "/api/v1/namespaces/llm/secrets"
        } else {
            "/apis/apps/v1/namespaces/llm/statefulsets"
        };
        path == format!("{folder}/{}", name(object))
    });
    let (status, body) = match (path, found) {
        ("/api/v1", _) => ("200 OK", kinds("v1", "secrets", "Secret")),
        ("/apis/apps/v1", _) => ("200 OK", kinds("apps/v1", "statefulsets", "StatefulSet")),
        (_, Some(object)) => ("200 OK", object.clone()),
        _ => (
            "404 Not Found",
            json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}),
        ),
    };
    let body = body.to_string();
    let length = body.len();
    write!(
        &stream,
        "HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {length}\r\nconnection: close\r\n\r\n{body}"
    )?;
    Ok(())
}

/// What values render, or what Helm says against them, where a cluster has these objects.
pub(crate) fn upgraded(there: &[Value], values: &str) -> anyhow::Result<Result<String, String>> {
    let listener = TcpListener::bind("127.0.0.1:0")?;
    let server = format!("http://{}", listener.local_addr()?);
    let there = there.to_vec();
    // It ends with the process of the test; each connection is one request.
    std::thread::spawn(move || listener.incoming().flatten().try_for_each(|stream| answer(stream, &there)));
    let chart = path("deploy/helm/baton").display().to_string();
    let fixed = ["template", "baton", &chart, "--namespace", NAMESPACE, "--kube-version", "1.35.0", "--values", "-"];
    let arguments = [&fixed[..], &["--dry-run=server", "--kube-apiserver", &server]].concat();
    let output = tool("target/helm/helm", &arguments, values)?;
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    Ok(if output.status.success() { Ok(text(&output.stdout)) } else { Err(text(&output.stderr)) })
}

#[test]
fn an_etcd_that_is_there_may_grow_and_keeps_its_volumes() -> anyhow::Result<()> {
    let installed = "etcd: {replicas: 1, persistence: {size: 2Gi, storageClass: fast}}";
    let rendered = render_values(installed)?.map_err(anyhow::Error::msg)?;
    let there = of_kind(&manifests(&rendered)?, "StatefulSet").next().context("no etcd")?.clone();
    for (etcd, sound) in [
        ("{replicas: 1, persistence: {size: 2Gi, storageClass: fast}}", true),
        ("{replicas: 1, leaseSeconds: 20, persistence: {size: 2Gi, storageClass: fast}}", true),
        ("{replicas: 3, persistence: {size: 2Gi, storageClass: fast}}", true),
        ("{replicas: 1, persistence: {size: 3Gi, storageClass: fast}}", false),
        ("{replicas: 1, persistence: {size: 2Gi}}", false),
        ("{replicas: 1, persistence: {enabled: false}}", false),
        ("{enabled: false, external: {endpoints: ['http://e:2379']}}", true),
    ] {
        let found = upgraded(std::slice::from_ref(&there), &format!("etcd: {etcd}"))?;
        ensure!(found.is_ok() == sound, "{etcd}: {found:?}");
        let told = ["etcd.replicas", "etcd.persistence", "1 nodes, volume 2Gi of fast, with TLS", "deploy/README.md"];
        ensure!(found.err().is_none_or(|said| told.iter().all(|part| said.contains(part))), "{etcd}");
    }
    let found = upgraded(std::slice::from_ref(&there), &format!("{installed}\nidentity: {{enabled: false}}"))?;
    ensure!(found.is_err_and(|said| said.contains("identity.enabled cannot change")));
    let mut three = there.clone();
    three["spec"]["replicas"] = json!(3);
    let found =
        upgraded(&[three], &format!("etcd: {}", "{replicas: 1, persistence: {size: 2Gi, storageClass: fast}}"))?;
    ensure!(found.is_err_and(|said| said.contains("can only grow") && said.contains("3 nodes")));
    // Nothing is there yet, or no longer.
    ensure!(upgraded(&[], "etcd: {replicas: 3}")?.is_ok());
    Ok(())
}
