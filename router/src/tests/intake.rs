//! Requests that are not parsed yet have a limit, a share per client and a time, over both fronts; other requests are
//! served meanwhile.

use super::auth::KeysFile;
use crate::RouterConfig;
use crate::testing::cluster::{Cluster, ask};
use crate::testing::http::{post, send};
use baton_node::config::ByteSize;
use baton_node::intake::Client;
use baton_proto::v1::{self, FinishReason};
use baton_types::Role;
use serde_json::json;
use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tonic::Code;

/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const MIB: usize = 1 << 20;

fn keyed(key: &str) -> String {
    if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") }
}

/// Sends the head of a request with a body of `length` bytes, and `sent` bytes of the body.
async fn upload(to: SocketAddr, key: &str, length: usize, sent: usize) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.unwrap();
    let key = keyed(key);
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nhost: x\r\n{key}content-type: application/json\r\ncontent-length: {length}\r\n\r\n"
    );
    stream.write_all(head.as_bytes()).await.unwrap();
    // It may be refused while it is sent.
    let _ = stream.write_all(&vec![b' '; sent]).await;
    stream
}

/// The status of the answer.
async fn status(stream: &mut TcpStream) -> u16 {
    let mut said = [0; 12];
    timeout(LONG, stream.read_exact(&mut said)).await.expect("an answer").unwrap();
    std::str::from_utf8(&said[9..]).unwrap().parse().unwrap()
}

/// Whether a short request is served.
async fn is_served(cluster: &Cluster, d: &crate::testing::fake::Fake, key: &str) -> bool {
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.last(b'K'.into(), FinishReason::Length).await;
    };
    let (key, body) = (keyed(key), json!({"prompt": "x"}).to_string());
    let answer = send(cluster.router.http_addr, "POST /v1/completions", &key, &body);
    tokio::select! {
        (answer, ()) = async { tokio::join!(answer, worker) } => answer.status == 200,
        () = tokio::time::sleep(LONG) => panic!("no answer"),
    }
}

fn narrow(c: &mut RouterConfig) {
    (c.http.body_bytes_max, c.grpc.message_bytes_max) = (ByteSize(MIB as u64), ByteSize(MIB as u64));
    (c.limits.intake_bytes_max, c.limits.intake_share_bytes_max) = (ByteSize(16 << 20), ByteSize(8 << 20));
}

#[tokio::test]
async fn a_client_that_uploads_without_end_has_its_share_and_others_are_served() {
    let keys = KeysFile::new(&[("sk-mallory", "mallory"), ("sk-alice", "alice")]);
    let cluster = Cluster::with_keys(keys.path(), narrow).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let mut held = Vec::new();
    // 7 MiB of its 8 are for bodies that are not small, and the calls themselves also count.
    for _ in 0..13 {
        held.push(upload(to, "sk-mallory", MIB, MIB / 2).await);
    }
    let full = async {
        while cluster.router.core().intake.used() < (13 * MIB / 2) as u64 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, full).await.expect("its share is used");
    let mut further = upload(to, "sk-mallory", MIB, MIB / 2).await;
    assert_eq!(status(&mut further).await, 429);
    let message = v1::GenerateRequest { prompt: vec![], model: "x".repeat(MIB / 2), ..ask("x") };
    let mut request = tonic::Request::new(message);
    request.metadata_mut().insert("authorization", "Bearer sk-mallory".parse().unwrap());
    let refused = cluster.client.clone().generate(request).await.unwrap_err();
    assert_eq!(refused.code(), Code::ResourceExhausted, "one budget for both fronts: {refused:?}");
    assert!(refused.metadata().contains_key("retry-after-ms"), "{refused:?}");
    for key in ["sk-alice", "sk-mallory"] {
        assert!(is_served(&cluster, &d, key).await, "{key}: a small one");
    }
    let mut of_another = upload(to, "sk-alice", MIB, MIB).await;
    assert_eq!(status(&mut of_another).await, 400, "read whole: it is no JSON");
    drop(held);
    let empty = async {
        while cluster.router.core().intake.used() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, empty).await.expect("who goes gives back what it held");
}

#[tokio::test]
async fn a_body_that_never_fits_is_not_asked_for_again() {
    let cluster = Cluster::start(narrow).await;
    // Of 400 KB, which are read as 14.4 MB.
    let body = format!(r#"{{"prompt": "x", "zz": [{}]}}"#, vec!["1"; 200_000].join(","));
    let refused = send(cluster.router.http_addr, "POST /v1/completions", "", &body).await;
    assert_eq!((refused.status, refused.header("retry-after")), (400, None));
    assert!(refused.text().await.contains("send fewer values"));
}

#[tokio::test]
async fn every_call_counts_whatever_it_asks_for_and_probes_pass() {
    let cluster = Cluster::start(narrow).await;
    let to = cluster.router.http_addr;
    let intake = &cluster.router.core().intake;
    let mut all = vec![intake.hold(Client::at(to.ip()))];
    all[0].set(7 << 20).unwrap();
    all.extend((0..16).map(|_| {
        let mut small = intake.hold(Client::at(to.ip()));
        small.set(64 << 10).unwrap();
        small
    }));
    for path in ["/v1/models", "/v1/completions", "/nowhere", "/metrics"] {
        let refused = send(to, &format!("GET {path}"), "", "").await;
        assert_eq!((refused.status, refused.header("retry-after")), (429, Some("1")), "{path}");
    }
    let healthy = send(to, "GET /healthz", "", "").await;
    assert_eq!((healthy.status, healthy.text().await.as_str()), (200, "ok\n"));
    drop(all);
    for (path, status) in [("/v1/models", 200), ("/v1/completions", 405), ("/nowhere", 404), ("/metrics", 200)] {
        assert_eq!(send(to, &format!("GET {path}"), "", "").await.status, status, "{path}");
    }
}

#[tokio::test]
async fn a_body_that_does_not_come_is_let_go() {
    let cluster = Cluster::start(|c| c.http.body_ms_max = 200).await;
    let mut stalled = upload(cluster.router.http_addr, "", MIB, 1000).await;
    let began = Instant::now();
    assert_eq!(status(&mut stalled).await, 408);
    assert!(began.elapsed() >= Duration::from_millis(100));
    let let_go = async {
        while cluster.router.core().intake.used() > 0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LONG, let_go).await.expect("it holds nothing any more");
    // The request's own deadline is earlier.
    let mut stream = TcpStream::connect(cluster.router.http_addr).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nx-request-timeout: 20ms\r\ncontent-type: application/json\r\ncontent-length: 9\r\n\r\n";
    stream.write_all(head.as_bytes()).await.unwrap();
    assert_eq!(status(&mut stream).await, 504);
}

/// Each byte arrives in time, but the body never ends.
#[tokio::test]
async fn a_body_that_drips_is_let_go() {
    let cluster = Cluster::start(|c| c.http.body_ms_max = 500).await;
    let (mut said, mut writes) = tokio::io::split(upload(cluster.router.http_addr, "", MIB, 1).await);
    let drip = async {
        // It may be refused while it is sent.
        while writes.write_all(b" ").await.is_ok() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        std::future::pending::<()>().await;
    };
    let mut head = [0; 12];
    tokio::select! {
        read = timeout(LONG, said.read_exact(&mut head)) => { read.expect("an answer").unwrap(); }
        () = drip => {}
    }
    assert_eq!(&head, b"HTTP/1.1 408");
}

/// The memory of a body is released once it is tokenized, however long the answer takes.
#[tokio::test]
async fn answers_hold_nothing_of_the_budget_of_bodies() {
    let cluster = Cluster::start(narrow).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    // No answer is sent before the worker is released: only the open call counts then.
    let decoding = async || {
        let call = d.decode().await;
        call.claimed().await;
        let let_go = async {
            while cluster.router.core().intake.used() > 64 << 10 {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        timeout(LONG, let_go).await.expect("it is held until the answer begins");
        call.last(b'a'.into(), FinishReason::Length).await;
    };
    for stream in [true, false] {
        let body = json!({"prompt": "x", "stream": stream, "metadata": {"note": "x".repeat(MIB / 2)}}).to_string();
        let sent = send(cluster.router.http_addr, "POST /v1/completions", "", &body);
        let (answer, ()) = tokio::join!(sent, decoding());
        assert!(answer.text().await.contains("\"a\""));
    }
    let (mut stream, ()) = tokio::join!(cluster.generate(ask("x")), decoding());
    assert_eq!(stream.rest().await.0, "a");
}

#[tokio::test]
async fn lists_over_grpc_are_counted_before_they_are_built() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    for (request, param) in [
        (v1::GenerateRequest { prompt: vec![v1::Segment::default(); 1 << 20], ..ask("x") }, "prompt"),
        (v1::GenerateRequest { stop: vec![String::new(); 1 << 20], ..ask("x") }, "stop"),
    ] {
        let refused = cluster.generate_within(request, None).await.unwrap_err();
        let error = baton_proto::convert::status::to_error(&refused);
        assert_eq!((refused.code(), error.param.as_deref()), (Code::InvalidArgument, Some(param)));
    }
    let long = v1::GenerateRequest { model: "x".repeat(9 << 20), ..ask("x") };
    assert_eq!(cluster.generate_within(long, None).await.unwrap_err().code(), Code::OutOfRange);
}

#[tokio::test]
async fn a_key_has_its_limits_and_others_have_theirs() {
    let lines = [
        ("sk-small", "a requests_max=1 tokens_max=50 priority_max=-1"),
        ("sk-vip", "b priority_max=7"),
        ("sk-plain", "c"),
        ("sk-wide", "d requests_max=8 tokens_max=50"),
    ];
    let keys = KeysFile::new(&lines);
    let cluster = Cluster::with_keys(keys.path(), |_| ()).await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let ask = async |key: &str, more: serde_json::Value| {
        let mut body = json!({"prompt": "x", "max_tokens": 20, "priority": -1});
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        send(to, "POST /v1/completions", &keyed(key), &body.to_string()).await
    };
    // The plain key has no entry: it may not use any priority.
    for (key, more, param) in [
        ("sk-small", json!({"priority": 0}), "priority"),
        ("sk-plain", json!({"priority": 1}), "priority"),
        ("sk-vip", json!({"priority": 8}), "priority"),
        ("sk-small", json!({"n": 2}), "n"),
        ("sk-small", json!({"max_tokens": 50}), "max_tokens"),
        ("sk-wide", json!({"n": 3, "priority": 0}), "max_tokens"),
    ] {
        let answer = ask(key, more).await;
        assert_eq!(answer.status, 400, "{key} {param}");
        assert_eq!(answer.json().await["error"]["param"], json!(param));
    }
    let header = keyed("sk-small");
    let body = json!({"prompt": "x", "max_tokens": 20, "priority": -1, "stream": true}).to_string();
    let (first, decode) = tokio::join!(send(to, "POST /v1/completions", &header, &body), async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.say("a").await;
        decode
    });
    let second = ask("sk-small", json!({})).await;
    assert_eq!((second.status, second.header("retry-after")), (429, Some("1")));
    let other = async {
        let call = d.decode().await;
        call.claimed().await;
        call.last(b'K'.into(), FinishReason::Length).await;
    };
    let (vip, ()) = tokio::join!(ask("sk-vip", json!({"priority": 7})), other);
    assert_eq!(vip.status, 200);
    decode.last(b'b'.into(), FinishReason::Length).await;
    assert!(first.text().await.contains("[DONE]"));
    // A client that has read the end may send its next request at once.
    let again = async {
        let call = d.decode().await;
        call.claimed().await;
        call.last(b'K'.into(), FinishReason::Length).await;
    };
    let (again, ()) = tokio::join!(ask("sk-small", json!({})), again);
    assert_eq!(again.status, 200);
    assert_eq!(post(to, "/v1/completions", &json!({"prompt": "x"})).await.status, 401);
}
