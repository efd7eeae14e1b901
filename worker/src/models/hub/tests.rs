//! Against the test hub: which files are downloaded, resumed after a cut, refused, and served without the network.

use super::stand_in::{Hub, MODEL, SHA};
use super::{HubId, HubSettings, fetch};
use crate::models::ModelsError;
use std::path::{Path, PathBuf};

fn settings(hub: &Hub, cache: &Path) -> HubSettings {
    HubSettings { endpoint: hub.endpoint(), token: None, cache_dir: cache.to_owned() }
}

fn get(model: &str, settings: &HubSettings) -> Result<PathBuf, ModelsError> {
    fetch(&HubId::parse(model).expect("an id"), settings, &|_, _| ())
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn needed_files_are_fetched_once() {
    let (hub, cache) = (Hub::start(|_| ()), tempfile::tempdir().unwrap());
    let seen = std::sync::Mutex::new(Vec::new());
    let progress = |what: &str, done: f32| seen.lock().unwrap().push((what.to_owned(), done));
    let folder = fetch(&HubId::parse(MODEL).unwrap(), &settings(&hub, cache.path()), &progress).unwrap();
    assert_eq!(folder, cache.path().join("hub/org--small").join(SHA));
    assert_eq!(names(&folder), [".complete", "config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), hub.weights());
    let seen = seen.into_inner().unwrap();
    assert!(seen.contains(&("downloading model.safetensors".into(), 1.0)), "{seen:?}");
    let before = hub.requests().len();
    assert_eq!(get(MODEL, &settings(&hub, cache.path())).unwrap(), folder);
    assert_eq!(hub.requests().len(), before + 1, "only the revision is looked up again");
}

#[test]
fn a_cut_download_goes_on_where_it_stopped() {
    let (hub, cache) = (Hub::start(|hub| hub.cuts = vec![70_000, 50_000]), tempfile::tempdir().unwrap());
    let folder = get(MODEL, &settings(&hub, cache.path())).unwrap();
    assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), hub.weights());
    let ranges: Vec<_> = hub.requests().into_iter().filter(|r| r.path.ends_with("model.safetensors")).collect();
    assert_eq!(ranges.len(), 3, "{ranges:?}");
    assert_eq!(ranges[0].range, None);
    assert!(ranges[1..].iter().all(|r| r.range.is_some()), "{ranges:?}");
}

#[test]
fn what_an_earlier_run_left_is_kept_or_thrown_away() {
    for (left, ranges) in [
        (Hub::start(|_| ()).weights()[..1000].to_vec(), vec![Some("bytes=1000-".to_owned())]),
        // More than the file has: the hub refuses the range, and the whole file is downloaded again.
        (vec![7; 300_000], vec![Some("bytes=300000-".to_owned()), None]),
    ] {
        let (hub, cache) = (Hub::start(|_| ()), tempfile::tempdir().unwrap());
        let folder = cache.path().join("hub/org--small").join(SHA);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join(".model.safetensors.part"), left).unwrap();
        get(MODEL, &settings(&hub, cache.path())).unwrap();
        assert_eq!(std::fs::read(folder.join("model.safetensors")).unwrap(), hub.weights());
        let asked: Vec<_> = hub.requests().into_iter().filter(|r| r.path.ends_with("model.safetensors")).collect();
        assert_eq!(asked.into_iter().map(|r| r.range).collect::<Vec<_>>(), ranges);
    }
}

#[test]
fn damage_is_noticed_and_not_kept() {
    let (hub, cache) = (Hub::start(|hub| hub.digest = "00".repeat(32)), tempfile::tempdir().unwrap());
    let message = get(MODEL, &settings(&hub, cache.path())).unwrap_err().to_string();
    assert!(message.contains("model.safetensors") && message.contains("SHA-256"), "{message}");
    let folder = cache.path().join("hub/org--small").join(SHA);
    assert_eq!(names(&folder), ["config.json", "tokenizer.json"]);
}

#[test]
fn a_template_for_tools_comes_with_its_folder() {
    let name = "additional_chat_templates/tool_use.jinja";
    let with = |hub: &mut super::stand_in::Content| {
        hub.add(name, "T");
        hub.add("additional_chat_templates/rag.jinja", "R");
    };
    let (hub, cache) = (Hub::start(with), tempfile::tempdir().unwrap());
    let folder = get(MODEL, &settings(&hub, cache.path())).unwrap();
    assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), "T");
    assert_eq!(names(&folder.join("additional_chat_templates")), ["tool_use.jinja"]);
}

#[test]
fn shards_come_by_the_index() {
    let (hub, cache) = (Hub::start(|hub| hub.split("b.safetensors")), tempfile::tempdir().unwrap());
    let folder = get(MODEL, &settings(&hub, cache.path())).unwrap();
    let expected = [
        ".complete",
        "a.safetensors",
        "b.safetensors",
        "config.json",
        "model.safetensors.index.json",
        "tokenizer.json",
    ];
    assert_eq!(names(&folder), expected);
    for bad in ["../b.safetensors", "none.safetensors"] {
        let (hub, cache) = (Hub::start(|hub| hub.split(bad)), tempfile::tempdir().unwrap());
        let message = get(MODEL, &settings(&hub, cache.path())).unwrap_err().to_string();
        assert!(message.contains(bad), "{message}");
    }
}

#[test]
fn refusals_say_what_to_do() {
    let check = |model: &str, change: fn(&mut super::stand_in::Content), parts: &[&str]| {
        let (hub, cache) = (Hub::start(change), tempfile::tempdir().unwrap());
        let message = get(model, &settings(&hub, cache.path())).unwrap_err().to_string();
        assert!(parts.iter().all(|part| message.contains(part)), "{parts:?} is not in: {message}");
    };
    check("org/small@nope", |_| (), &["404", "no revision `nope`"]);
    check("org/other", |_| (), &["404", "no such model"]);
    check(MODEL, |hub| hub.token = Some("secret"), &["401", "HF_TOKEN", "/org/small"]);
    check(MODEL, |hub| hub.remove("config.json"), &["no config.json"]);
    check(MODEL, |hub| hub.remove("model.safetensors"), &["neither model.safetensors nor"]);
    check(MODEL, |hub| hub.commit = "../../etc", &["no model's description"]);
}

#[test]
fn the_token_goes_to_the_hub_alone() {
    let storage = Hub::start(|_| ());
    let (elsewhere, cache) = (storage.endpoint().replace("127.0.0.1", "localhost"), tempfile::tempdir().unwrap());
    let hub = Hub::start(|hub| {
        hub.token = Some("secret");
        hub.redirect = Some(elsewhere);
    });
    let with_token = HubSettings { token: Some("secret".into()), ..settings(&hub, cache.path()) };
    get("org/small@refs/pr/1", &with_token).unwrap();
    assert!(hub.requests().iter().all(|r| r.authorized), "{:?}", hub.requests());
    let stored = storage.requests();
    assert!(!stored.is_empty() && stored.iter().all(|r| !r.authorized), "{stored:?}");
}

#[test]
fn without_the_hub_the_cache_serves() {
    let cache = tempfile::tempdir().unwrap();
    let hub = Hub::start(|_| ());
    let gone = settings(&hub, cache.path());
    let folder = get(MODEL, &gone).unwrap();
    drop(hub);
    assert_eq!(get(MODEL, &gone).unwrap(), folder, "a branch, as it last was");
    assert_eq!(get(&format!("{MODEL}@{SHA}"), &gone).unwrap(), folder, "a commit");
    let message = get("org/unknown", &gone).unwrap_err().to_string();
    assert!(message.contains("run again") && message.contains("hub_endpoint"), "{message}");
}
