//! The page at `/`: its files, who may see the cluster, and what is told of it.

use super::auth::KeysFile;
use super::traces::traced;
use crate::testing::cluster::{Cluster, Reader, ask, remote};
use crate::testing::fake::Fake;
use crate::testing::http::{Answer, send};
use baton_node::identity::{Authority, IdentityConfig, Role as Party};
use baton_proto::v1::{self, FinishReason};
use serde_json::{Value, json};
use std::time::Duration;

const ALICE: (&str, &str) = ("sk-alice", "alice");
const OPS: (&str, &str) = ("sk-ops", "ops operator");
/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const EVENTS: &str = "/cluster/events";

async fn get(cluster: &Cluster, path: &str, headers: &str) -> Answer {
    send(cluster.router.http_addr, &format!("GET {path}"), headers, "").await
}

fn bearer(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") }
}

/// The values of an attribute, or of imports, in a file.
fn quoted<'a>(text: &'a str, before: &str) -> Vec<&'a str> {
    text.split(before).skip(1).filter_map(|rest| rest.split('"').next()).collect()
}

#[tokio::test]
async fn the_page_is_open_and_takes_nothing_from_elsewhere() {
    let keys = KeysFile::new(&[ALICE]);
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let page = get(&cluster, "/", "").await;
    assert_eq!((page.status, page.header("content-type")), (200, Some("text/html; charset=utf-8")));
    let policy = page.header("content-security-policy").unwrap().to_owned();
    assert!(policy.starts_with("default-src 'none'; script-src 'self';"), "{policy}");
    assert!(!policy.contains("unsafe") && policy.contains("require-trusted-types-for 'script'"), "{policy}");
    assert_eq!(
        (page.header("x-content-type-options"), page.header("referrer-policy")),
        (Some("nosniff"), Some("no-referrer"))
    );
    let tag = page.header("etag").unwrap().to_owned();
    let html = page.text().await;
    for forbidden in ["://", "<style", "style=", "javascript:", " onclick", " onload"] {
        assert!(!html.contains(forbidden), "{forbidden} in the page");
    }
    let mut files: Vec<String> =
        [quoted(&html, " href=\""), quoted(&html, " src=\"")].concat().into_iter().map(str::to_owned).collect();
    let mut seen = Vec::new();
    while let Some(file) = files.pop() {
        if seen.contains(&file) {
            continue;
        }
        let answer = get(&cluster, &format!("/{file}"), "").await;
        assert_eq!((answer.status, answer.header("content-security-policy")), (200, Some(&*policy)), "{file}");
        let text = answer.text().await;
        for forbidden in
            ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "localStorage", "https://"]
        {
            assert!(!text.contains(forbidden), "{forbidden} in {file}");
        }
        files.extend(quoted(&text, " from \"./").into_iter().map(|import| format!("ui/{import}")));
        seen.push(file);
    }
    assert_eq!(seen.len(), 12, "every file is used: {seen:?}");
    let known = get(&cluster, "/", &format!("if-none-match: {tag}\r\n")).await;
    assert_eq!((known.status, &*known.text().await), (304, ""));
}

#[tokio::test]
async fn the_page_can_be_turned_off() {
    let cluster = Cluster::start(|c| c.page.enabled = false).await;
    for path in ["/", "/ui/main.js", "/cluster", EVENTS] {
        assert_eq!(get(&cluster, path, "").await.status, 404, "{path}");
    }
}

#[tokio::test]
async fn the_cluster_is_shown_to_operators_alone() {
    let keys = KeysFile::new(&[ALICE, OPS]);
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let cases =
        [("", 401, "operator"), ("sk-mallory", 401, "unknown"), ("sk-alice", 403, "operator"), ("sk-ops", 200, "")];
    for (key, status, says) in cases {
        for path in ["/cluster", EVENTS, "/cluster/requests", "/cluster/requests/x"] {
            let answer = get(&cluster, path, &bearer(key)).await;
            let expected = if status == 200 && path.ends_with("/x") { 404 } else { status };
            assert_eq!(answer.status, expected, "{key} {path}");
            if status != 200 {
                let said = answer.json().await["error"]["message"].to_string();
                assert!(said.contains(says) && !said.contains("sk-"), "{said}");
            }
        }
    }
    // A name that leads here from elsewhere is nothing to a page that does not know the key.
    let named = format!("{}host: cluster.example\r\n", bearer("sk-ops"));
    assert_eq!(get(&cluster, "/cluster", &named).await.status, 200);
    let foreign = format!("{}sec-fetch-site: cross-site\r\n", bearer("sk-ops"));
    assert_eq!(get(&cluster, "/cluster", &foreign).await.status, 403);
}

#[tokio::test]
async fn without_keys_the_cluster_is_shown_where_the_router_has_no_identity_or_is_told_to() {
    let folder = tempfile::tempdir().unwrap();
    let authority = Authority::new().unwrap();
    authority.issue(folder.path(), &[Party::Router], &[], Duration::from_secs(3600), "").unwrap();
    let identity = IdentityConfig { dir: Some(folder.path().into()), ..IdentityConfig::default() };
    for (has_identity, open, expected) in [(false, false, 200), (true, false, 403), (true, true, 200)] {
        let cluster = Cluster::start(|c| {
            c.page.open = open;
            if has_identity {
                c.identity = identity.clone();
            }
        })
        .await;
        let answer = get(&cluster, "/cluster", "host: 127.0.0.1:8000\r\n").await;
        assert_eq!(answer.status, expected, "{has_identity} {open}");
        if expected == 403 {
            assert!(answer.json().await["error"]["message"].as_str().unwrap().contains("page.open"));
            continue;
        }
        for (headers, status) in [
            ("host: rebound.example\r\n", 403),
            ("sec-fetch-site: same-site\r\n", 403),
            ("sec-fetch-site: same-origin\r\n", 200),
            ("host: 127.0.0.1:8000\r\norigin: https://evil.example\r\n", 403),
            ("host: 127.0.0.1:8000\r\norigin: http://127.0.0.1:8001\r\n", 403),
            ("origin: null\r\n", 403),
            ("host: 127.0.0.1:8000\r\norigin: http://127.0.0.1:8000\r\n", 200),
        ] {
            assert_eq!(get(&cluster, "/cluster", headers).await.status, status, "{headers}");
        }
    }
}

/// The next event of this name.
async fn event(stream: &mut Answer, name: &str) -> Value {
    let comes = async {
        loop {
            let line = stream.line().await.expect("the stream goes on");
            if line.strip_prefix("event: ").is_some_and(|event| event == name) {
                let data = stream.line().await.expect("an event has data");
                return serde_json::from_str(data.strip_prefix("data: ").expect("data")).expect("JSON");
            }
        }
    };
    tokio::time::timeout(LONG, comes).await.expect("an event comes")
}

/// A request whose KV moves from `p` to `d`, up to its handoff.
async fn handed_over(cluster: &Cluster, p: &Fake, d: &Fake) {
    let mut answer = cluster.generate(v1::GenerateRequest { request_id: "moved".into(), ..remote("x") }).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    prefill.started().await;
    prefill.token(b'a'.into(), None).await;
    decode.adopted().await;
    prefill.done().await;
    answer.reads("a").await;
    decode.last(b'b'.into(), FinishReason::Length).await;
    assert_eq!(answer.rest().await.0, "b");
}

#[tokio::test]
async fn what_happens_is_told_as_it_happens() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let mut stream = get(&cluster, EVENTS, "").await;
    assert_eq!((stream.status, stream.header("cache-control")), (200, Some("no-store")));
    let first = event(&mut stream, "cluster").await;
    let mut names: Vec<_> =
        first["status"]["workers"].as_array().unwrap().iter().map(|w| w["instance"].clone()).collect();
    names.sort_by_key(Value::to_string);
    assert_eq!((json!(names), &first["open_handoffs"]), (json!(["d", "p"]), &json!([])));

    let mut open = cluster.generate(remote("x")).await;
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    let pairs = json!([{"prefill": "p", "decode": "d", "open": 1}]);
    while event(&mut stream, "cluster").await["open_handoffs"] != pairs {}
    prefill.started().await;
    prefill.token(b'x'.into(), Some(FinishReason::Length)).await;
    prefill.done().await;
    open.rest().await;

    handed_over(&cluster, &p, &d).await;
    let mut told = event(&mut stream, "handoffs").await;
    assert!(told[0]["ago_ms"].take().is_u64());
    let expected = json!([{
        "request": "moved", "prefill": "p", "decode": "d", "transport": "test",
        "bytes": 4096, "transfer_us": 80, "exposed_us": 8, "ago_ms": null,
    }]);
    assert_eq!(told, expected);
    // Another stream begins with the last minute.
    let mut late = get(&cluster, EVENTS, "").await;
    assert_eq!(event(&mut late, "handoffs").await[0]["request"], "moved");
    let status = get(&cluster, "/cluster", "").await.json().await;
    assert_eq!(status["router"]["models"], json!(["m"]));
}

#[tokio::test]
async fn streams_are_bounded_and_end_with_the_router() {
    let cluster = Cluster::start(|c| c.page.watchers_max = 1).await;
    let mut stream = get(&cluster, EVENTS, "").await;
    let refused = get(&cluster, EVENTS, "").await;
    assert_eq!(refused.status, 503);
    assert!(refused.json().await["error"]["message"].as_str().unwrap().contains("page.watchers_max"));
    event(&mut stream, "cluster").await;
    drop(stream);
    let freed = async {
        loop {
            let stream = get(&cluster, EVENTS, "").await;
            if stream.status == 200 {
                return stream;
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    let mut stream = tokio::time::timeout(LONG, freed).await.expect("a stream that is closed makes room");
    let Cluster { router, client } = cluster;
    drop(client);
    tokio::time::timeout(LONG, router.stop()).await.expect("a stream holds up no stop");
    let end = async { while stream.line().await.is_some() {} };
    tokio::time::timeout(LONG, end).await.expect("the stream ends");
}

#[tokio::test]
async fn recent_requests_are_told_and_one_is_drawn() {
    let (cluster, _guard, _entered) = traced(|_| ()).await;
    let (p, d) = cluster.pair().await;
    let list = async || get(&cluster, "/cluster/requests", "").await.json().await["requests"].clone();
    assert_eq!(list().await, json!([]));
    handed_over(&cluster, &p, &d).await;
    let mut reader = Reader(cluster.client.clone().generate(ask("x")).await.unwrap().into_inner());
    let decode = d.decode().await;
    decode.claimed().await;
    let prefill = p.prefill().await;
    prefill.started().await;
    prefill.token(b'x'.into(), Some(FinishReason::Length)).await;
    prefill.done().await;
    reader.rest().await;
    let both = async {
        loop {
            let told = list().await;
            if told.as_array().unwrap().len() == 2 {
                return told;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let told = tokio::time::timeout(LONG, both).await.expect("requests that ended are told");
    let moved = &told[1];
    assert_eq!(
        (&moved["request_id"], &moved["prefill"], &moved["decode"]),
        (&json!("moved"), &json!("p"), &json!("d"))
    );
    assert_eq!(
        (&moved["kv_bytes"], &moved["exposed_ms"], &moved["transfer_ms"]),
        (&json!(4096), &json!(0.008), &json!(0.08))
    );
    assert_eq!(
        (&moved["completion_tokens"], &moved["finish_reason"], &moved["error"]),
        (&json!(2), &json!("length"), &json!(null))
    );
    assert_eq!(told[0]["kv_bytes"], json!(null), "nothing moved for an answer of one token");

    let drawn = get(&cluster, "/cluster/requests/moved", "").await.json().await;
    assert_eq!((&drawn["rows"][0]["name"], &drawn["rows"][0]["depth"]), (&json!("generate"), &json!(0)));
    assert!(drawn["facts"][0] == "request moved" && drawn["trace_id"] == moved["trace_id"], "{drawn}");
    let unknown = get(&cluster, "/cluster/requests/nobody", "").await;
    assert_eq!(unknown.status, 404);
    assert!(unknown.json().await["error"]["message"].as_str().unwrap().contains("\"nobody\""));
    let unreadable = get(&cluster, "/cluster/requests/%ff", "").await;
    assert_eq!(unreadable.status, 400);
    assert!(unreadable.json().await["error"]["message"].as_str().unwrap().contains("UTF-8"));
    assert_eq!(
        get(&cluster, "/cluster/requests?limit=1", "").await.json().await["requests"].as_array().unwrap().len(),
        1
    );
    for wrong in ["limit=0", "limit=201", "limit=x", "other=1"] {
        assert_eq!(get(&cluster, &format!("/cluster/requests?{wrong}"), "").await.status, 400, "{wrong}");
    }
}
