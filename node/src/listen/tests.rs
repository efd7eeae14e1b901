//! Peers that are silent, gone, or too many.

use super::*;
use crate::grpc::{self, GrpcConfig};
use crate::identity::{ClientProtocol, ServerTls, ServerTlsConfig};
use crate::testing::certificates::certificates;
use axum::Router;
use axum::routing::get;
use std::io::ErrorKind;
use std::sync::Mutex;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::oneshot;
use tokio::task::JoinHandle;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

const SHORT: Duration = Duration::from_millis(400);
/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const ASKED: &[u8] = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n";

async fn listener(connections_max: u32) -> Listener {
    Listener::bind("127.0.0.1:0".parse().unwrap(), connections_max).await.unwrap()
}

/// A server of `/`, which answers "ok", and `/slow`, which takes three times [`SHORT`].
fn http(listener: Listener, idle_max: Duration) -> (SocketAddr, CancellationToken, JoinHandle<()>) {
    let (address, stop) = (listener.address(), CancellationToken::new());
    let slow = || async {
        sleep(3 * SHORT).await;
        "slow"
    };
    let routes = Router::new().route("/", get(|| async { "ok" })).route("/slow", get(slow));
    let served = tokio::spawn(serve_http(listener, Callers::default(), routes, idle_max, stop.clone()));
    (address, stop, served)
}

/// A server of one request that never answers; the receiver ends when the request is cancelled.
fn never(listener: Listener) -> (SocketAddr, oneshot::Receiver<()>) {
    let address = listener.address();
    let (asked, given_up) = oneshot::channel();
    let asked = Arc::new(Mutex::new(Some(asked)));
    let handler = move || {
        let asked = GivenUp(asked.lock().unwrap().take());
        async move {
            let _asked = asked;
            std::future::pending::<&str>().await
        }
    };
    tokio::spawn(serve_http(
        listener,
        Callers::default(),
        Router::new().route("/", get(handler)),
        LONG * 10,
        CancellationToken::new(),
    ));
    (address, given_up)
}

/// Notifies when it is dropped.
struct GivenUp(Option<oneshot::Sender<()>>);

impl Drop for GivenUp {
    fn drop(&mut self) {
        if let Some(asked) = self.0.take() {
            let _ = asked.send(());
        }
    }
}

/// Connects and sends `words`.
async fn say(to: SocketAddr, words: &[u8]) -> TcpStream {
    let mut stream = TcpStream::connect(to).await.unwrap();
    stream.write_all(words).await.unwrap();
    stream
}

/// All bytes until the other side closes.
async fn rest(stream: &mut TcpStream) -> String {
    let mut said = Vec::new();
    match timeout(LONG, stream.read_to_end(&mut said)).await.expect("held for ever") {
        Ok(_) => {}
        Err(error) => assert_eq!(error.kind(), ErrorKind::ConnectionReset, "{error}"),
    }
    String::from_utf8_lossy(&said).into_owned()
}

/// Reads an answer that ends with `end`.
async fn answer(stream: &mut TcpStream, end: &str) {
    let mut said = String::new();
    while !said.ends_with(end) {
        let mut some = [0; 1024];
        let n = timeout(LONG, stream.read(&mut some)).await.expect("an answer").unwrap();
        assert_ne!(n, 0, "closed after {said:?}");
        said += std::str::from_utf8(&some[..n]).unwrap();
    }
}

/// A connection that received an answer, and is kept open.
async fn kept(by: SocketAddr) -> TcpStream {
    let mut stream = say(by, ASKED).await;
    answer(&mut stream, "ok").await;
    stream
}

#[tokio::test]
async fn who_does_not_say_what_it_speaks_is_let_go_by_either_server() {
    let mut of_http = listener(10).await;
    let mut of_grpc = listener(10).await;
    (of_http.hello_max, of_grpc.hello_max) = (SHORT, SHORT);
    let grpc_address = of_grpc.address();
    let stop = CancellationToken::new();
    let server = grpc::server(&GrpcConfig::default()).add_service(grpc::health().1);
    tokio::spawn(grpc::serve(server, of_grpc, Callers::default(), stop.clone()));
    let (http_address, _, _) = http(of_http, LONG * 10);
    for address in [http_address, grpc_address] {
        for words in [&b""[..], b"P", b"PRI * HTTP/2.0\r\n\r\nSM\r\n"] {
            let began = Instant::now();
            rest(&mut say(address, words).await).await;
            assert!(began.elapsed() >= SHORT / 2, "{words:?} was cut off early");
        }
    }
    stop.cancel();
}

#[tokio::test]
async fn who_has_said_the_preface_and_nothing_more_is_probed() {
    let of_grpc = listener(10).await;
    let address = of_grpc.address();
    let config = GrpcConfig { keepalive_ms: 100, keepalive_wait_ms_max: 100, ..GrpcConfig::default() };
    let server = grpc::server(&config).add_service(grpc::health().1);
    tokio::spawn(grpc::serve(server, of_grpc, Callers::default(), CancellationToken::new()));
    rest(&mut say(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await).await;
}

#[tokio::test]
async fn half_a_head_and_an_idle_connection_end_and_a_slow_answer_does_not() {
    let (address, _, _) = http(listener(10).await, SHORT);
    assert_eq!(rest(&mut say(address, b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-ty").await).await, "");
    let mut idle = kept(address).await;
    assert_eq!(rest(&mut idle).await, "");
    let mut slow = say(address, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await;
    answer(&mut slow, "slow").await;
}

#[tokio::test]
async fn of_many_that_probe_the_oldest_gives_way_and_none_holds_more_than_one_answer() {
    let listener = listener(3).await;
    let address = listener.address();
    let routes = Router::new().route("/", get(|| async { "ok" }));
    tokio::spawn(serve_probes(listener, routes, LONG * 10, CancellationToken::new()));
    let (mut first, mut second) = (kept(address).await, kept(address).await);
    let mut third = kept(address).await;
    assert_eq!(rest(&mut first).await, "");
    for stream in [&mut second, &mut third] {
        stream.write_all(ASKED).await.unwrap();
        answer(stream, "ok").await;
    }
    drop(second);
    let refused = rest(&mut say(address, b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await).await;
    assert!(refused.is_empty() || refused.starts_with("HTTP/1.1 400"), "it speaks HTTP/2: {refused:?}");
}

#[tokio::test]
async fn who_leaves_bytes_behind_and_goes_is_noticed_before_the_answer() {
    for behind in [&b""[..], b"\r\n", ASKED] {
        let (address, dropped) = never(listener(10).await);
        let mut gone = say(address, ASKED).await;
        gone.write_all(behind).await.unwrap();
        sleep(SHORT).await;
        drop(gone);
        timeout(LONG, dropped).await.expect("computes for nobody").unwrap();
    }
}

#[tokio::test]
async fn who_has_said_all_and_reads_on_has_its_answer() {
    let (address, _, _) = http(listener(10).await, LONG * 10);
    let mut asker = say(address, &[b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n", ASKED].concat()).await;
    asker.shutdown().await.unwrap();
    let said = rest(&mut asker).await;
    assert!(said.contains("\r\n\r\nslow"), "{said}");
}

/// An HTTP/2 frame (RFC 9113, section 4.1).
fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Reads frames up to one of `kind`; its stream and its payload.
async fn frame_of(kind: u8, stream: &mut TcpStream) -> (u32, Vec<u8>) {
    loop {
        let mut head = [0; 9];
        timeout(LONG, stream.read_exact(&mut head)).await.expect("a frame").unwrap();
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        timeout(LONG, stream.read_exact(&mut payload)).await.expect("all of it").unwrap();
        assert_ne!(head[3], GOAWAY, "the server ends the connection: {payload:?}");
        if head[3] == kind {
            return (u32::from_be_bytes(head[5..].try_into().unwrap()), payload);
        }
    }
}

const HEADERS: u8 = 1;
const RST_STREAM: u8 = 3;
const SETTINGS: u8 = 4;
const GOAWAY: u8 = 7;

#[tokio::test]
async fn a_burst_of_cancelled_calls_does_not_end_the_connection() {
    let (address, _, _) = http(listener(10).await, LONG * 10);
    let mut said = [&b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"[..], &frame(SETTINGS, 0, 0, &[])].concat();
    // GET / of http://x, complete (END_STREAM, END_HEADERS); all but the last are cancelled before the server can read
    // them.
    let ask = |stream| frame(HEADERS, 0x5, stream, &[0x82, 0x86, 0x84, 0x41, 1, b'x']);
    for call in 0..150 {
        said.extend([ask(2 * call + 1), frame(RST_STREAM, 0, 2 * call + 1, &8_u32.to_be_bytes())].concat());
    }
    said.extend(ask(301));
    let mut stream = say(address, &said).await;
    let (answered, headers) = frame_of(HEADERS, &mut stream).await;
    assert_eq!((answered, headers[0]), (301, 0x88), "200, to the one that is left");
}

#[tokio::test]
async fn a_connection_too_many_is_served_once_another_ends() {
    let (address, _, _) = http(listener(1).await, LONG * 10);
    let mut first = kept(address).await;
    let mut second = say(address, ASKED).await;
    // A server that treats both fairly answers the second long before the first has received 100 answers.
    for _ in 0..100 {
        first.write_all(ASKED).await.unwrap();
        answer(&mut first, "ok").await;
        let early = second.try_read(&mut [0]);
        assert!(matches!(&early, Err(e) if e.kind() == ErrorKind::WouldBlock), "one place, two served: {early:?}");
    }
    drop(first);
    answer(&mut second, "ok").await;
}

#[tokio::test]
async fn a_stop_lets_answers_end_and_idle_connections_go() {
    let (address, stop, served) = http(listener(10).await, LONG * 10);
    let mut idle = kept(address).await;
    let mut slow = say(address, b"GET /slow HTTP/1.1\r\nhost: x\r\n\r\n").await;
    sleep(SHORT).await;
    stop.cancel();
    assert!(rest(&mut slow).await.ends_with("slow"));
    assert_eq!(rest(&mut idle).await, "");
    timeout(LONG, served).await.expect("it ends").unwrap();
}

#[tokio::test]
async fn a_server_that_is_dropped_drops_its_connections() {
    let (address, _, served) = http(listener(10).await, LONG * 10);
    let mut idle = kept(address).await;
    served.abort();
    assert_eq!(rest(&mut idle).await, "");
}

#[cfg(target_os = "linux")]
#[tokio::test]
async fn who_takes_nothing_is_gone() {
    let mut listener = listener(1).await;
    listener.peer_gone_max = Duration::from_millis(500);
    let reader = TcpStream::connect(listener.address()).await.unwrap();
    let mut connection = listener.accept().await;
    let written = timeout(LONG, async { while connection.write_all(&[0; 1 << 16]).await.is_ok() {} }).await;
    assert!(written.is_ok(), "a reader that stopped holds its connection");
    drop(reader);
}

/// A folder with the certificate that `from` holds, under the names of a Kubernetes TLS Secret.
fn install(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    std::fs::copy(from.join("node.pem"), to.join("tls.crt")).unwrap();
    std::fs::copy(from.join("node.key"), to.join("tls.key")).unwrap();
}

/// What a client sees that trusts the authority in `folder` and speaks `protocol`: what was agreed, and the answer.
async fn ask_over_tls(
    address: SocketAddr,
    folder: &std::path::Path,
    protocol: &[u8],
) -> std::io::Result<(Option<Vec<u8>>, String)> {
    use rustls::pki_types::{CertificateDer, pem::PemObject as _};
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_file(folder.join("ca.pem")).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let client = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let mut client = client.with_root_certificates(roots).with_no_client_auth();
    client.alpn_protocols = vec![protocol.to_vec()];
    let stream = TcpStream::connect(address).await?;
    let connector = tokio_rustls::TlsConnector::from(Arc::new(client));
    let mut stream = connector.connect("127.0.0.1".try_into().unwrap(), stream).await?;
    stream.write_all(b"GET / HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n").await?;
    let agreed = stream.get_ref().1.alpn_protocol().map(<[u8]>::to_vec);
    let mut said = String::new();
    // Servers may leave out TLS's own end.
    let _ = timeout(LONG, stream.read_to_string(&mut said)).await.expect("no end");
    Ok((agreed, said))
}

#[tokio::test]
async fn clients_see_the_certificate_that_is_in_the_folder_now() {
    let (first, second, dir) =
        (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    certificates(first.path()).unwrap();
    certificates(second.path()).unwrap();
    install(first.path(), dir.path());
    let tls = ServerTls::start(&ServerTlsConfig { dir: Some(dir.path().into()), reread_ms: 10 }).await.unwrap();
    let (listener, stop) = (listener(10).await, CancellationToken::new());
    let address = listener.address();
    let routes = Router::new().route("/", get(|| async { "ok" }));
    tokio::spawn(serve_http(listener, Callers::Clients(tls, ClientProtocol::Http), routes, LONG, stop.clone()));

    let (agreed, said) = ask_over_tls(address, first.path(), b"http/1.1").await.unwrap();
    assert!(agreed.as_deref() == Some(b"http/1.1") && said.ends_with("ok"), "{agreed:?} {said}");
    ask_over_tls(address, first.path(), b"h2").await.expect_err("a protocol that this port does not have");
    ask_over_tls(address, second.path(), b"http/1.1").await.expect_err("a client that trusts another authority");
    // Without TLS nothing is answered.
    let mut clear = TcpStream::connect(address).await.unwrap();
    clear.write_all(ASKED).await.unwrap();
    let mut said = Vec::new();
    let _ = timeout(LONG, clear.read_to_end(&mut said)).await.expect("no end");
    assert!(!said.starts_with(b"HTTP"), "{said:?}");

    // Half of a new pair changes nothing; the whole pair does.
    std::fs::copy(second.path().join("node.pem"), dir.path().join("tls.crt")).unwrap();
    sleep(SHORT).await;
    ask_over_tls(address, first.path(), b"http/1.1").await.expect("the pair before");
    install(second.path(), dir.path());
    let until = Instant::now() + LONG;
    while ask_over_tls(address, second.path(), b"http/1.1").await.is_err() {
        assert!(Instant::now() < until, "the new files are not taken");
        sleep(SHORT / 10).await;
    }
    let other_key = ServerTlsConfig { dir: Some(dir.path().into()), reread_ms: 10 };
    std::fs::copy(first.path().join("node.key"), dir.path().join("tls.key")).unwrap();
    let error = ServerTls::start(&other_key).await.unwrap_err().to_string();
    assert!(error.contains("cannot be used"), "{error}");
    std::fs::remove_file(dir.path().join("tls.key")).unwrap();
    let error = ServerTls::start(&other_key).await.unwrap_err().to_string();
    assert!(error.contains("tls.dir, which holds tls.crt and tls.key"), "{error}");
}
