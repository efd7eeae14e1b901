//! Model folders that no router could serve: the worker refuses them at start, and names the key.

use baton_node::config::ByteSize;
use baton_worker::bring_up::{self, Loaded};
use baton_worker::settings::{DeviceKind, EngineSettings, ModelSettings};
use baton_worker::{WorkerError, models};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A model of 12 tokens without text.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/weights/fixtures/tiny");

/// A copy of the tiny model under this name, with these further files.
fn folder(name: &str, files: &[(&str, &str)]) -> (TempDir, PathBuf) {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join(name);
    std::fs::create_dir(&path).unwrap();
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(Path::new(TINY).join(file), path.join(file)).unwrap();
    }
    files.iter().for_each(|(file, content)| std::fs::write(path.join(file), content).unwrap());
    (parent, path)
}

fn load(path: &Path) -> Result<Loaded, WorkerError> {
    let model = ModelSettings { model: path.to_str().unwrap().into(), ..ModelSettings::default() };
    let engine = EngineSettings { device: DeviceKind::Reference, ..EngineSettings::default() };
    bring_up::load(&model, &engine, &|what, _| assert_ne!(what, "loading weights", "it is refused before"))
}

/// The error of a folder with these files, causes and all.
fn refusal(name: &str, files: &[(&str, &str)]) -> String {
    let (_parent, path) = folder(name, files);
    match load(&path) {
        Ok(_) => panic!("{files:?} can be served"),
        Err(error) => format!("{:#}", anyhow::Error::from(error)),
    }
}

fn tokenizer() -> Value {
    let vocab: Value =
        ["a", "b", "ab"].iter().enumerate().map(|(id, token)| ((*token).to_owned(), json!(id))).collect();
    json!({
        "version": "1.0",
        "added_tokens": [],
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false},
        "model": {"type": "BPE", "vocab": vocab, "merges": ["a b"]},
    })
}

#[test]
fn what_is_checked_is_what_is_loaded() {
    let settings = |model: &str, kv_cache_bytes: u64, max_model_len| {
        let model = ModelSettings { model: model.into(), max_model_len, ..ModelSettings::default() };
        let kv_cache_bytes = ByteSize(kv_cache_bytes);
        (model, EngineSettings { device: DeviceKind::Reference, kv_cache_bytes, ..EngineSettings::default() })
    };
    let large = "random:layers=64,hidden=256,heads=4,kv_heads=4,vocab=300";
    for (model, bytes, context, part) in [
        (large, 64 << 10, 0, "kv_cache_bytes"),
        (large, 16 << 40, 0, "lower --kv-cache-bytes"),
        (TINY, 1 << 20, 1_000_000, "lower --max-model-len"),
        ("/no/such/model.gguf", 1 << 20, 0, "no such file"),
    ] {
        let (model, engine) = settings(model, bytes, context);
        let checked = bring_up::check(&model, &engine, &|_, _| ()).unwrap_err();
        let loaded = bring_up::load(&model, &engine, &|_, _| ()).map(drop).unwrap_err();
        let [checked, loaded] = [checked, loaded].map(|error| format!("{:#}", anyhow::Error::from(error)));
        assert!(checked == loaded && checked.contains(part), "{checked}\n{loaded}");
    }
    let (model, engine) = settings(TINY, 1 << 20, 0);
    bring_up::check(&model, &engine, &|_, _| ()).unwrap();
}

#[test]
fn a_template_that_does_not_compile_is_refused() {
    let tokenizer = ("tokenizer.json", &*tokenizer().to_string());
    let config = r#"{"chat_template": "{% for"}"#;
    for bad in [("chat_template.jinja", "{{ messages"), ("tokenizer_config.json", config)] {
        let error = refusal("tiny", &[tokenizer, bad]);
        assert!(error.contains(bad.0) && error.contains("chat_template") && error.contains("compile"), "{error}");
    }
}

#[test]
fn a_tokenizer_that_cannot_be_loaded_is_refused() {
    let with = |path: &str, value: Value| {
        let mut tokenizer = tokenizer();
        *tokenizer.pointer_mut(path).unwrap() = value;
        tokenizer.to_string()
    };
    let added = json!([{"id": 12, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}]);
    let cases = [
        ("{}".to_owned(), "decoder"),
        (with("/model", json!({"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"})), "WordLevel"),
        (with("/model", json!({"type": "Unigram", "vocab": [["a", 0.5]], "unk_id": 0})), "Unigram"),
        (
            with(
                "/model",
                json!({"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "a", "continuing_subword_prefix": "#", "max_input_chars_per_word": 9}),
            ),
            "WordPiece",
        ),
        (with("/model/merges", json!(["a x"])), "x"),
        (with("/model/vocab/ab", json!(12)), "\"ab\" has id 12"),
        (with("/model/vocab/ab", json!(u32::MAX)), "vocabulary has 12 ids"),
        (with("/added_tokens", added), "\"<s>\" has id 12"),
    ];
    for (tokenizer, part) in cases {
        let error = refusal("tiny", &[("tokenizer.json", &tokenizer)]);
        assert!(error.starts_with("tokenizer.json cannot be served") && error.contains(part), "{error}");
    }
}

#[test]
fn a_name_that_no_record_holds_is_refused() {
    let error = refusal("ti\nny", &[]);
    assert!(error.contains("rename") && error.contains("id"), "{error}");
}

#[test]
fn what_is_servable_is_not_refused() {
    let files =
        [("tokenizer.json", &*tokenizer().to_string()), ("chat_template.jinja", "{{ messages[0]['content'] }}")];
    let (_parent, path) = folder("tiny", &files);
    let model = ModelSettings { model: path.to_str().unwrap().into(), ..ModelSettings::default() };
    let engine = EngineSettings { device: DeviceKind::Reference, ..EngineSettings::default() };
    let loaded = bring_up::load(&model, &engine, &|_, _| ()).unwrap();
    assert_eq!(loaded.card.served_names, ["tiny"]);
    assert!(loaded.card.bundle.is_some() && models::open(&model, &|_, _| ()).is_ok());
}
