//! A test hub in this process: one repository, with injected faults.

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use serde_json::json;
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::runtime::Runtime;

pub(in crate::models) const MODEL: &str = "org/small";
pub(in crate::models) const SHA: &str = "0123456789012345678901234567890123456789";

/// What the hub serves, and its faults.
pub(in crate::models) struct Content {
    files: BTreeMap<String, Vec<u8>>,
    pub(in crate::models) commit: &'static str,
    /// SHA-256 stated for the weights.
    pub(in crate::models) digest: String,
    /// The token that requests must carry.
    pub(in crate::models) token: Option<&'static str>,
    /// Files are served by this other server.
    pub(in crate::models) redirect: Option<String>,
    /// The next answers with weights break off after this many bytes.
    pub(in crate::models) cuts: Vec<usize>,
}

impl Content {
    pub(in crate::models) fn add(&mut self, name: &str, content: &str) {
        self.files.insert(name.into(), content.into());
    }

    pub(in crate::models) fn remove(&mut self, name: &str) {
        self.files.remove(name);
    }

    /// Two files instead of one; the index names the second as given.
    pub(in crate::models) fn split(&mut self, second: &str) {
        self.remove("model.safetensors");
        let index = json!({"weight_map": {"x": "a.safetensors", "y": second}});
        self.files.insert("model.safetensors.index.json".into(), index.to_string().into());
        self.files.insert("a.safetensors".into(), b"a".to_vec());
        self.files.insert("b.safetensors".into(), b"b".to_vec());
    }
}

/// A request that the stand-in received.
#[derive(Clone, Debug)]
pub(in crate::models) struct Seen {
    pub(in crate::models) path: String,
    pub(in crate::models) range: Option<String>,
    pub(in crate::models) authorized: bool,
}

#[derive(Clone)]
struct Shared(Arc<(Mutex<Content>, Mutex<Vec<Seen>>)>);

/// A running server; stopped when dropped.
pub(in crate::models) struct Hub {
    shared: Shared,
    address: std::net::SocketAddr,
    _runtime: Runtime,
}

impl Hub {
    pub(in crate::models) fn start(change: impl FnOnce(&mut Content)) -> Self {
        let weights: Vec<u8> = (0..200_000u32).map(|i| (i % 251) as u8).collect();
        let digest = hex::encode(Sha256::digest(&weights));
        let small = ["config.json", "tokenizer.json", "README.md", "pytorch_model.bin"];
        let mut files: BTreeMap<_, _> = small.map(|name| (name.to_owned(), b"{}".to_vec())).into();
        files.insert("model.safetensors".into(), weights);
        let mut content = Content { files, commit: SHA, digest, token: None, redirect: None, cuts: Vec::new() };
        change(&mut content);
        let shared = Shared(Arc::new((Mutex::new(content), Mutex::default())));
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let address = listener.local_addr().unwrap();
        let router = Router::new().fallback(answer).with_state(shared.clone());
        runtime.spawn(async move { axum::serve(listener, router).await });
        Self { shared, address, _runtime: runtime }
    }

    pub(in crate::models) fn endpoint(&self) -> String {
        format!("http://{}", self.address)
    }

    pub(in crate::models) fn weights(&self) -> Vec<u8> {
        self.shared.0.0.lock().unwrap().files["model.safetensors"].clone()
    }

    pub(in crate::models) fn requests(&self) -> Vec<Seen> {
        self.shared.0.1.lock().unwrap().clone()
    }
}

async fn answer(State(shared): State<Shared>, request: Request) -> Response {
    let (content, log) = &*shared.0;
    let mut content = content.lock().unwrap();
    let text = |name| request.headers().get(name).and_then(|value| value.to_str().ok()).map(str::to_owned);
    let (path, range) = (request.uri().path().to_owned(), text(header::RANGE));
    let authorization = text(header::AUTHORIZATION);
    log.lock().unwrap().push(Seen { path: path.clone(), range: range.clone(), authorized: authorization.is_some() });
    if content.token.is_some_and(|token| authorization != Some(format!("Bearer {token}"))) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if let Some(revision) = path.strip_prefix("/api/models/org/small/revision/") {
        return describe(&content, revision);
    }
    let Some(name) = path.strip_prefix(&format!("/org/small/resolve/{SHA}/")) else {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RepoNotFound")]).into_response();
    };
    if let Some(elsewhere) = &content.redirect {
        return (StatusCode::FOUND, [(header::LOCATION, format!("{elsewhere}{path}"))]).into_response();
    }
    let Some(file) = content.files.get(name).cloned() else { return StatusCode::NOT_FOUND.into_response() };
    let cut = (name == "model.safetensors" && !content.cuts.is_empty()).then(|| content.cuts.remove(0));
    serve(&file, range.as_deref(), cut)
}

fn describe(content: &Content, revision: &str) -> Response {
    if !["main", SHA, "refs%2Fpr%2F1"].contains(&revision) {
        return (StatusCode::NOT_FOUND, [("x-error-code", "RevisionNotFound")]).into_response();
    }
    let siblings = content.files.iter().map(|(name, bytes)| {
        let lfs = (name == "model.safetensors").then(|| json!({"sha256": content.digest, "size": bytes.len()}));
        json!({"rfilename": name, "size": bytes.len(), "lfs": lfs})
    });
    axum::Json(json!({"id": MODEL, "sha": content.commit, "siblings": siblings.collect::<Vec<_>>()})).into_response()
}

/// The file from the start of the range. With a cut, the whole length is promised and only a part is sent.
pub(in crate::models) fn serve(file: &[u8], range: Option<&str>, cut: Option<usize>) -> Response {
    let from = range.and_then(|range| range.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()).unwrap_or(0);
    if from > 0 && from >= file.len() {
        return StatusCode::RANGE_NOT_SATISFIABLE.into_response();
    }
    let rest = &file[from..];
    let mut headers = HeaderMap::new();
    headers.insert(header::CONTENT_LENGTH, rest.len().into());
    let range = format!("bytes {from}-{}/{}", file.len() - 1, file.len());
    headers.insert(header::CONTENT_RANGE, range.parse().unwrap());
    let status = if from > 0 { StatusCode::PARTIAL_CONTENT } else { StatusCode::OK };
    let sent = Bytes::copy_from_slice(&rest[..cut.unwrap_or(rest.len()).min(rest.len())]);
    // When a body breaks, the server drops what it has not written yet; so break only after a time in which it can write.
    let broken = cut.map(|_| async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        Err(std::io::Error::other("cut"))
    });
    let body = futures::stream::once(async { Ok(sent) }).chain(futures::stream::iter(broken).then(|cut| cut));
    (status, headers, Body::from_stream(body)).into_response()
}
