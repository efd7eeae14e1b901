//! Keys, over both fronts: which callers are accepted, for which calls, and changes of the file meanwhile.

use crate::testing::cluster::{Cluster, ask, config};
use crate::testing::http::{Answer, send};
use crate::{Router, RouterError};
use baton_proto::v1::{self, admin_client::AdminClient};
use baton_types::Role;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use std::path::PathBuf;
use std::time::Duration;
use tonic::{Code, Request, Status};

/// A file of keys in a folder that changes as orchestrators do it: by a link to another folder.
pub(super) struct KeysFile(tempfile::TempDir);

impl KeysFile {
    pub(super) fn new(lines: &[(&str, &str)]) -> Self {
        let file = Self(tempfile::tempdir().unwrap());
        file.become_text(&text(lines));
        file
    }

    pub(super) fn path(&self) -> PathBuf {
        self.0.path().join("keys")
    }

    fn become_text(&self, text: &str) {
        let folder = self.0.path().join(format!("{:x}", Sha256::digest(text)));
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("keys"), text).unwrap();
        let link = self.0.path().join("next");
        std::os::unix::fs::symlink(folder.join("keys"), &link).unwrap();
        std::fs::rename(link, self.path()).unwrap();
    }

    async fn cluster(&self) -> Cluster {
        let keys_file = Some(self.path());
        Cluster::start(|c| (c.auth.keys_file, c.auth.reread_ms) = (keys_file, 20)).await
    }
}

/// Lines for these keys.
fn text(lines: &[(&str, &str)]) -> String {
    lines.iter().map(|(key, rest)| format!("{:x} {rest}\n", Sha256::digest(key))).collect()
}

/// Longer than any of these waits takes on a busy machine.
const LONG: Duration = Duration::from_secs(30);
const ALICE: (&str, &str) = ("sk-alice", "alice");
const BOB: (&str, &str) = ("sk-bob", "bob");
const OPS: (&str, &str) = ("sk-ops", "ops operator");

async fn get(cluster: &Cluster, path: &str, key: &str) -> Answer {
    let header = if key.is_empty() { String::new() } else { format!("authorization: Bearer {key}\r\n") };
    send(cluster.router.http_addr, &format!("GET {path}"), &header, "").await
}

fn keyed<T>(message: T, key: &str) -> Request<T> {
    let mut request = Request::new(message);
    if !key.is_empty() {
        request.metadata_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    }
    request
}

/// Waits until a key is accepted, or is refused again.
async fn until(cluster: &Cluster, key: &str, status: u16) {
    let comes = async {
        while get(cluster, "/v1/models", key).await.status != status {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    assert!(tokio::time::timeout(LONG, comes).await.is_ok(), "{key} does not come to get {status}");
}

async fn metric(cluster: &Cluster, name: &str) -> f64 {
    let metrics = get(cluster, "/metrics", "").await.text().await;
    let line = metrics.lines().find(|l| l.starts_with(name)).unwrap_or_else(|| panic!("no {name} in {metrics}"));
    line.rsplit(' ').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn http_needs_a_key_for_the_api_alone() {
    let cluster = KeysFile::new(&[ALICE, OPS]).cluster().await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    for path in ["/healthz", "/health", "/readyz", "/metrics"] {
        assert_eq!(get(&cluster, path, "").await.status, 200, "{path}");
    }
    for path in ["/v1/models", "/v1/models/m"] {
        assert_eq!(get(&cluster, path, "sk-alice").await.status, 200, "{path}");
        for key in ["", "sk-mallory", &"k".repeat(4096)] {
            assert_eq!(get(&cluster, path, key).await.status, 401, "{path} {key}");
        }
    }
    for path in ["/v1/completions", "/v1/chat/completions"] {
        let headers = "authorization: Bearer sk-mallory\r\nx-request-id: mine\r\n";
        let answer = send(cluster.router.http_addr, &format!("POST {path}"), headers, "{").await;
        assert_eq!((answer.status, answer.header("www-authenticate")), (401, Some("Bearer")), "{path}");
        assert_eq!(answer.header("x-request-id"), Some("mine"));
        let error = answer.json().await["error"].take();
        assert_eq!(error["type"], "invalid_request_error");
        assert_eq!((&error["code"], &error["param"]), (&json!("invalid_api_key"), &json!(null)));
        assert!(!error.to_string().contains("sk-mallory"), "{error}");
    }
    // As clients of Anthropic's API send it.
    for (headers, status) in [
        ("x-api-key: sk-alice\r\n", 400),
        ("x-api-key: sk-mallory\r\n", 401),
        ("x-api-key: sk-alice\r\nauthorization: Bearer sk-ops\r\n", 401),
    ] {
        let answer = send(cluster.router.http_addr, "POST /v1/messages", headers, "{}").await;
        assert_eq!(answer.status, status, "{headers}");
        let kind = if status == 401 { "authentication_error" } else { "invalid_request_error" };
        assert_eq!(answer.json().await["error"]["type"], kind);
    }
    let refused = r#"baton_router_auth_refused_total{reason="unknown_key"}"#;
    assert_eq!(metric(&cluster, refused).await, 7.0);
    assert_eq!(metric(&cluster, r#"baton_router_auth_refused_total{reason="no_key"}"#).await, 3.0);
    assert_eq!(metric(&cluster, "baton_router_auth_keys ").await, 2.0);
}

#[tokio::test]
async fn a_request_with_a_key_is_served_and_the_key_goes_no_further() {
    let cluster = KeysFile::new(&[ALICE]).cluster().await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let worker = async {
        let decode = d.decode().await;
        decode.claimed().await;
        decode.last(u32::from(b'K'), v1::FinishReason::Stop).await;
        decode.metadata
    };
    let headers = "authorization: bearer sk-alice\r\n";
    let to = cluster.router.http_addr;
    let (answer, metadata) = tokio::join!(send(to, "POST /v1/completions", headers, r#"{"prompt": "x"}"#), worker);
    assert_eq!(answer.status, 200);
    assert!(!format!("{metadata:?}").contains("alice"), "{metadata:?}");
    let served = r#"baton_router_requests_total{model="m",pool="default",outcome="ok"}"#;
    let counted = async {
        loop {
            let metrics = get(&cluster, "/metrics", "").await.text().await;
            if metrics.contains(served) {
                return metrics;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let metrics = tokio::time::timeout(LONG, counted).await.expect("it is counted");
    assert!(metrics.contains(served) && !metrics.contains("alice"), "whoever reads metrics has no key: {metrics}");
}

#[tokio::test]
async fn grpc_needs_a_key_and_operators_a_marked_one() {
    let cluster = KeysFile::new(&[ALICE, OPS]).cluster().await;
    let d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    let generate = async |key: &str| -> Result<(), Status> {
        let mut request = keyed(ask("x"), key);
        request.metadata_mut().insert("x-request-id", "mine".parse().unwrap());
        let mut answer = cluster.client.clone().generate(request).await?.into_inner();
        let decode = d.decode().await;
        decode.claimed().await;
        decode.last(u32::from(b'K'), v1::FinishReason::Stop).await;
        while answer.message().await?.is_some() {}
        Ok(())
    };
    for key in ["", "sk-mallory"] {
        let status = generate(key).await.unwrap_err();
        assert_eq!(status.code(), Code::Unauthenticated, "{key}");
        assert_eq!(status.metadata().get("x-request-id").unwrap(), "mine");
    }
    for key in ["sk-alice", "sk-ops"] {
        generate(key).await.unwrap();
    }
    let mut admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
    let mut drain = async |key: &str| {
        let request = v1::DrainWorkerRequest { worker: "nobody".into(), timeout_ms: None };
        admin.drain(keyed(request, key)).await.unwrap_err().code()
    };
    assert_eq!(drain("").await, Code::Unauthenticated);
    assert_eq!(drain("sk-alice").await, Code::PermissionDenied);
    assert_eq!(drain("sk-ops").await, Code::NotFound, "there is no worker of that name");
    assert_eq!(metric(&cluster, r#"baton_router_auth_refused_total{reason="not_operator"}"#).await, 1.0);
}

#[tokio::test]
async fn without_keys_everybody_is_let_in() {
    let cluster = Cluster::start(|_| ()).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    for key in ["", "sk-whatever"] {
        assert_eq!(get(&cluster, "/v1/models", key).await.status, 200, "{key:?}");
    }
}

#[tokio::test]
async fn the_file_is_read_again_and_one_that_is_wrong_changes_nothing() {
    let file = KeysFile::new(&[ALICE]);
    let cluster = file.cluster().await;
    let errors = "baton_router_auth_keys_file_errors_total";
    until(&cluster, "sk-alice", 200).await;
    until(&cluster, "sk-bob", 401).await;
    file.become_text(&text(&[BOB]));
    until(&cluster, "sk-bob", 200).await;
    until(&cluster, "sk-alice", 401).await;
    assert_eq!(metric(&cluster, errors).await, 0.0);

    for wrong in ["", "sk-carol carol\n", &text(&[ALICE, ALICE])] {
        let before = metric(&cluster, errors).await;
        file.become_text(wrong);
        while metric(&cluster, errors).await < before + 2.0 {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        assert_eq!(get(&cluster, "/v1/models", "sk-bob").await.status, 200, "{wrong}");
        assert_eq!(get(&cluster, "/v1/models", "sk-alice").await.status, 401, "{wrong}");
    }
    std::fs::remove_file(file.path()).unwrap();
    let before = metric(&cluster, errors).await;
    while metric(&cluster, errors).await < before + 2.0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    until(&cluster, "sk-bob", 200).await;
    // A file that returns to its former content is applied, too.
    file.become_text(&text(&[BOB, ALICE]));
    until(&cluster, "sk-alice", 200).await;
    assert_eq!(metric(&cluster, "baton_router_auth_keys ").await, 2.0);
}

#[tokio::test]
async fn a_router_does_not_start_with_a_file_that_is_wrong() {
    let start = async |path: PathBuf| {
        let mut config = config();
        config.auth.keys_file = Some(path);
        match Router::start(config).await.unwrap_err() {
            RouterError::Keys(error) => error.to_string(),
            other => panic!("{other}"),
        }
    };
    let missing = start("/nowhere/keys".into()).await;
    assert!(missing.contains("/nowhere/keys") && missing.contains("auth.keys_file"), "{missing}");
    let file = KeysFile::new(&[ALICE]);
    file.become_text(&(text(&[ALICE]) + "sk-bob bob\n"));
    let wrong = start(file.path()).await;
    assert!(wrong.contains("line 2") && wrong.contains("sha256sum") && !wrong.contains("sk-bob"), "{wrong}");
    file.become_text(&"# x\n".repeat(1 << 19));
    let large = start(file.path()).await;
    assert!(large.contains("1048576 bytes"), "{large}");
}

#[tokio::test]
async fn one_key_without_a_file_is_everybodys() {
    let key = |key: &str| Some(serde_json::from_value(json!(key)).unwrap());
    let cluster = Cluster::start(|c| c.auth.api_key = key("sk-one")).await;
    let _d = cluster.worker(Role::Decode, "d").await;
    cluster.router.ready().await;
    for (given, status) in [("sk-one", 200), ("sk-two", 401), ("", 401)] {
        assert_eq!(get(&cluster, "/v1/models", given).await.status, status, "{given}");
    }
    assert_eq!(metric(&cluster, "baton_router_auth_keys ").await, 1.0);
    let mut admin = AdminClient::connect(format!("http://{}", cluster.router.grpc_addr)).await.unwrap();
    let status = async |admin: &mut AdminClient<_>, key| admin.status(keyed(v1::StatusRequest::default(), key)).await;
    assert!(status(&mut admin, "sk-one").await.is_ok(), "whoever has the key operates");
    assert_eq!(status(&mut admin, "").await.unwrap_err().code(), Code::Unauthenticated);
    let problems = |change: fn(&mut crate::RouterConfig)| {
        let mut config = config();
        config.auth.api_key = Some(serde_json::from_value(json!("sk-one")).unwrap());
        change(&mut config);
        let mut checker = baton_node::config::Checker::default();
        baton_node::config::Check::check(&config, &mut checker);
        checker.into_problems().into_iter().map(|(key, _)| key).collect::<Vec<_>>()
    };
    assert!(problems(|_| ()).is_empty());
    assert_eq!(problems(|c| c.auth.keys_file = Some("keys".into())), ["auth.api_key"]);
    assert_eq!(problems(|c| c.auth.api_key = Some(serde_json::from_value(json!("a b")).unwrap())), ["auth.api_key"]);
    assert_eq!(problems(|c| c.http.cors_origins = vec!["example.com".into()]), ["http.cors_origins"]);
}
