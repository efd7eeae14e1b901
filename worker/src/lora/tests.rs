//! Adapters of an engine: loaded when they are needed, evicted, waited for, and refused.

use super::*;
use crate::bring_up::{self, Loaded};
use crate::settings::{EngineSettings, ModelSettings};
use baton_engine::formats::{ModelSource as _, RandomModel};
use baton_node::TokioRuntime;
use baton_node::config::ByteSize;
use baton_types::TenantLabel;
use serde_json::json;
use std::path::{Path, PathBuf};
use tokio::time::timeout;

const MODEL: &str = "random:hidden=32,layers=2,heads=2,kv_heads=1,ffn=48,vocab=60,context=64,seed=3";
const FOREVER: Duration = Duration::from_secs(60);

/// Writes an adapter of all queries, of rank 1, whose elements are `value`.
fn write(folder: &Path, value: f32) {
    let spec = RandomModel::parse(MODEL).unwrap().spec().clone();
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (which, shape) in [("A", [1, spec.hidden]), ("B", [spec.layers[0].attention.query_dim(), 1])] {
        let begin = data.len();
        data.extend((0..shape[0] * shape[1]).flat_map(|_| value.to_le_bytes()));
        let name = format!("base_model.model.model.layers.0.self_attn.q_proj.lora_{which}.weight");
        header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
    }
    let header = serde_json::Value::from(header).to_string().into_bytes();
    std::fs::create_dir_all(folder).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    std::fs::write(folder.join("adapter_model.safetensors"), file).unwrap();
    let config = json!({"peft_type": "LORA", "r": 1, "lora_alpha": 1});
    std::fs::write(folder.join("adapter_config.json"), config.to_string()).unwrap();
}

struct World {
    root: tempfile::TempDir,
    loaded: Loaded,
    settings: LoraSettings,
}

impl World {
    fn new(change: impl FnOnce(&mut LoraSettings)) -> Self {
        let root = tempfile::tempdir().unwrap();
        let mut settings =
            LoraSettings { folder: Some(root.path().to_owned()), max_loras: 1, ..LoraSettings::default() };
        change(&mut settings);
        let model =
            ModelSettings { model: MODEL.into(), served_names: vec!["base".into()], ..ModelSettings::default() };
        let engine = EngineSettings {
            threads: 1.into(),
            kv_cache_bytes: ByteSize(1 << 20),
            lora: settings.clone(),
            ..EngineSettings::default()
        };
        Self { root, loaded: bring_up::load(&model, &engine, &|_, _| ()).unwrap(), settings }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.root.path().join(name)
    }

    fn start(&self) -> Result<Adapters, WorkerError> {
        let runtime = Arc::new(TokioRuntime::current());
        let names = self.loaded.card.names().map(str::to_owned).collect();
        let started = Adapters::start(&self.settings, &self.loaded.engine, self.loaded.spec.clone(), names, runtime);
        started.map(|adapters| adapters.expect("a folder is set"))
    }
}

fn names(adapters: &Adapters) -> Vec<String> {
    adapters.cards().borrow().iter().map(|card| card.name.clone()).collect()
}

fn digest(adapters: &Adapters, name: &str) -> Digest {
    adapters.cards().borrow().iter().find(|card| card.name == name).expect("it is known").digest
}

async fn hold(adapters: &Adapters, digest: Digest) -> Result<AdapterUse, RequestError> {
    timeout(FOREVER, adapters.hold(digest, TenantLabel::default(), Instant::now() + FOREVER)).await.expect("it ends")
}

#[tokio::test]
async fn a_slot_is_shared_waited_for_and_taken_over() {
    let world = World::new(|settings| settings.wait_ms_max = 200);
    write(&world.path("a"), 0.1);
    write(&world.path("b"), 0.2);
    let adapters = world.start().unwrap();
    assert_eq!(names(&adapters), ["a", "b"]);
    let (a, b) = (digest(&adapters, "a"), digest(&adapters, "b"));
    let first = hold(&adapters, a).await.unwrap();
    let second = hold(&adapters, a).await.unwrap();
    assert_eq!((first.slot, second.slot, first.digest), (AdapterSlot(0), AdapterSlot(0), a));
    let refused = hold(&adapters, b).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Overloaded);
    assert!(refused.message.contains("--max-loras") && refused.retry_after.is_some(), "{refused:?}");
    drop(first);
    let waiting = tokio::spawn({
        let adapters = adapters.clone();
        async move { hold(&adapters, b).await }
    });
    tokio::time::sleep(Duration::from_millis(20)).await;
    drop(second);
    let third = waiting.await.unwrap().unwrap();
    assert_eq!(
        (third.slot, third.digest, {
            let counts = adapters.counts();
            (counts.loaded, counts.bytes)
        }),
        (AdapterSlot(0), b, (1, 4 * (32 + 32)))
    );
    drop(third);
    hold(&adapters, a).await.unwrap();
}

#[tokio::test]
async fn what_was_announced_is_what_is_loaded() {
    let world = World::new(|_| ());
    write(&world.path("a"), 0.1);
    write(&world.path("b"), 0.2);
    let adapters = world.start().unwrap();
    let (a, b) = (digest(&adapters, "a"), digest(&adapters, "b"));
    let held = hold(&adapters, a).await.unwrap();
    // Changed, and not read again yet.
    write(&world.path("b"), 0.3);
    drop(held);
    let refused = hold(&adapters, b).await.unwrap_err();
    assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused:?}");
    assert!(!refused.message.contains(world.root.path().to_str().unwrap()), "paths are told to nobody: {refused:?}");
    // The slot is free again.
    let held = hold(&adapters, a).await.unwrap();
    let unknown = hold(&adapters, Digest([9; 32])).await.unwrap_err();
    assert_eq!(unknown.kind, ErrorKind::Unavailable);
    assert!(unknown.message.contains("has no adapter"), "{unknown:?}");

    // Read again: another content, one that is gone but loaded, and a new one.
    std::fs::remove_dir_all(world.path("a")).unwrap();
    write(&world.path("c"), 0.4);
    let following = tokio::spawn(adapters.clone().follow_folder(Duration::from_millis(10)));
    let mut cards = adapters.cards();
    let news = cards.wait_for(|cards| cards.iter().map(|card| card.name.as_str()).eq(["b", "c"]));
    timeout(FOREVER, news).await.unwrap().unwrap();
    assert_ne!(digest(&adapters, "b"), b);
    drop(held);
    drop(hold(&adapters, a).await.unwrap());
    hold(&adapters, digest(&adapters, "c")).await.unwrap();
    let gone = hold(&adapters, a).await.unwrap_err();
    assert!(gone.message.contains("has no adapter"), "{gone:?}");
    following.abort();
}

#[tokio::test]
async fn what_is_wrong_in_the_settings_ends_the_start_and_what_is_wrong_in_the_folder_does_not() {
    let mut world = World::new(|_| ());
    write(&world.path("good"), 0.1);
    write(&world.path("no name"), 0.1);
    write(&world.path(".hidden"), 0.1);
    write(&world.path("broken"), 0.1);
    std::fs::write(world.path("broken").join("adapter_model.safetensors"), b"no").unwrap();
    write(&world.path("infinite"), f32::INFINITY);
    write(&world.path("base"), 0.1);
    std::fs::write(world.path("file"), b"").unwrap();
    assert_eq!(names(&world.start().unwrap()), ["good"]);

    let mut check = |part: &str, change: &dyn Fn(&mut LoraSettings, &Path)| {
        let mut settings = LoraSettings { folder: None, ..world.settings.clone() };
        change(&mut settings, world.root.path());
        let before = std::mem::replace(&mut world.settings, settings);
        let error = anyhow::Error::from(world.start().err().expect("it is refused"));
        assert!(format!("{error:#}").contains(part), "{part}: {error:#}");
        world.settings = before;
    };
    let module = |name: &str, folder: PathBuf| format!("{name}={}", folder.display());
    check("\"x\" of engine.lora.modules cannot be served: ", &|settings, root| {
        settings.modules = vec![module("x", root.join("broken"))];
    });
    check("is a name of the model", &|settings, root| settings.modules = vec![module("base", root.join("good"))]);
    check("cannot list it", &|settings, root| settings.folder = Some(root.join("nothing")));
    // A module keeps its name, whatever is in the folder.
    world.settings.modules = vec![module("broken", world.path("good"))];
    assert_eq!(names(&world.start().unwrap()), ["broken", "good"]);
}
