//! Requests at the limits of HTTP and JSON: each gets a refusal or a closed connection, never an answer, and the router
//! keeps serving.

use crate::testing::cluster::Cluster;
use crate::testing::http::send;
use baton_types::Role;
use std::net::SocketAddr;
use std::time::Duration;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::time::timeout;

const BODY: &str = r#"{"prompt":[1,2,3],"max_tokens":1}"#;
const POST: &str = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n";

/// Statuses of the answers until the router closes or sends nothing for a while.
async fn statuses(to: SocketAddr, request: &[u8]) -> Vec<u16> {
    let mut stream = TcpStream::connect(to).await.unwrap();
    let _ = stream.write_all(request).await;
    let (mut said, mut some) = (Vec::new(), [0; 4096]);
    // After the first bytes, the rest follows at once.
    let mut patience = Duration::from_secs(20);
    while let Ok(Ok(n @ 1..)) = timeout(patience, stream.read(&mut some)).await {
        said.extend_from_slice(&some[..n]);
        patience = Duration::from_millis(200);
    }
    let said = String::from_utf8_lossy(&said).into_owned();
    said.split("HTTP/1.1 ").skip(1).map(|answer| answer[..3].parse().unwrap()).collect()
}

#[tokio::test]
async fn malformed_requests_are_refused_and_nothing_is_smuggled() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let to = cluster.router.http_addr;
    let chunked = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    let headers: String = (0..150).map(|i| format!("a{i}: b\r\n")).collect();
    let cases = [
        ("two lengths", format!("{POST}content-length: 33\r\ncontent-length: 5\r\n\r\n{BODY}")),
        ("a length with a sign", format!("{POST}content-length: +33\r\n\r\n{BODY}")),
        ("an unknown coding", format!("{POST}transfer-encoding: xchunked\r\n\r\n{chunked}")),
        ("not chunked at last", format!("{POST}transfer-encoding: chunked, identity\r\n\r\n{chunked}")),
        ("a space before a colon", format!("{POST}content-length : 33\r\n\r\n{BODY}")),
        ("a folded header", format!("{POST}x: a\r\n b\r\ncontent-length: 33\r\n\r\n{BODY}")),
        ("many headers", format!("GET /healthz HTTP/1.1\r\nhost: x\r\n{headers}\r\n")),
        ("a large header", format!("GET /healthz HTTP/1.1\r\nhost: x\r\na: {}\r\n\r\n", "b".repeat(1 << 20))),
        ("a huge chunk", format!("{POST}transfer-encoding: chunked\r\n\r\nffffffffffffffff\r\n{BODY}")),
        ("an endless extension", format!("{POST}transfer-encoding: chunked\r\n\r\n1;{}", "a".repeat(200_000))),
        ("deep JSON", format!("{POST}content-length: 200000\r\n\r\n{}", "[".repeat(200_000))),
        ("a path upwards", "GET /v1/models/..%2f..%2fetc%2fpasswd HTTP/1.1\r\nhost: x\r\n\r\n".to_owned()),
    ];
    for (what, request) in cases {
        let said = statuses(to, request.as_bytes()).await;
        assert!(said.len() <= 1 && said.iter().all(|status| (400..=431).contains(status)), "{what}: {said:?}");
    }
    let numbers = [
        ("max_tokens", "4294967295"),
        ("max_tokens", "1e99"),
        ("n", "1e99"),
        ("seed", "99999999999999999999"),
        ("temperature", "1e39"),
        ("top_p", "NaN"),
        ("priority", "2147483648"),
        ("stop_token_ids", "[4294967296]"),
        ("top_k", "-2"),
        ("logprobs", "4000000000"),
        ("prompt", "[4294967295]"),
        ("prompt", "[-1]"),
    ];
    for (field, value) in numbers {
        let prompt = if field == "prompt" { "" } else { r#""prompt":[1,2],"# };
        let body = format!(r#"{{{prompt}"{field}":{value}}}"#);
        assert_eq!(send(to, "POST /v1/completions", "", &body).await.status, 400, "{body}");
    }
    assert_eq!(send(to, "GET /healthz", "", "").await.status, 200);
    assert_eq!(cluster.router.requests(), 0);
}
