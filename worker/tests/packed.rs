//! The cache of packed weights, as the settings name it.

use baton_node::config::ByteSize;
use baton_types::Digest;
use baton_worker::bring_up;
use baton_worker::settings::{EngineSettings, ModelSettings, PackedCacheSettings};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// A model of 12 tokens without text.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/weights/fixtures/tiny");
/// Longest wait for a thread that writes a small file.
const WRITE_MAX: Duration = Duration::from_secs(30);

struct World {
    root: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("model")).unwrap();
        for file in ["config.json", "model.safetensors"] {
            std::fs::copy(Path::new(TINY).join(file), root.path().join("model").join(file)).unwrap();
        }
        Self { root }
    }

    fn weights(&self) -> PathBuf {
        self.root.path().join("model/model.safetensors")
    }

    fn cache(&self) -> PathBuf {
        self.root.path().join("packed")
    }

    /// Starts an engine; the fingerprint of its model.
    fn start(&self, bytes_max: u64) -> Digest {
        self.start_of(self.root.path().join("model").to_str().unwrap(), bytes_max)
    }

    fn start_of(&self, model: &str, bytes_max: u64) -> Digest {
        let model = ModelSettings { model: model.to_owned(), ..ModelSettings::default() };
        let packed_cache = PackedCacheSettings { dir: self.cache(), bytes_max: ByteSize(bytes_max) };
        let engine = EngineSettings { threads: 1.into(), packed_cache, ..EngineSettings::default() };
        let loaded = bring_up::load(&model, &engine, &|_, _| ()).unwrap();
        assert!(loaded.engine.stop());
        loaded.compatibility.model
    }

    /// Files of packed weights, as soon as there are so many.
    fn kept(&self, count: usize) -> Vec<PathBuf> {
        let begin = Instant::now();
        loop {
            let entries = std::fs::read_dir(self.cache()).unwrap().map(|entry| entry.unwrap().path());
            let packed: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "packed")).collect();
            if packed.len() == count {
                return packed;
            }
            assert!(begin.elapsed() < WRITE_MAX, "{packed:?}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

#[test]
fn a_start_keeps_what_the_next_one_reads() {
    let world = World::new();
    let first = world.start(1 << 20);
    let [kept] = &world.kept(1)[..] else { panic!("one file") };
    let written = kept.metadata().unwrap();
    assert_eq!(written.permissions().mode() & 0o777, 0o600);
    assert_eq!(world.start(1 << 20), first);
    assert_eq!(kept.metadata().unwrap().ino(), written.ino(), "it is not written again");
}

#[test]
fn a_model_that_was_replaced_is_another_model() {
    let world = World::new();
    let first = world.start(1 << 20);
    world.kept(1);
    let mut other = std::fs::read(world.weights()).unwrap();
    let last = other.len() - 1;
    other[last] ^= 1;
    let new = world.weights().with_extension("new");
    std::fs::write(&new, other).unwrap();
    std::fs::rename(new, world.weights()).unwrap();
    let second = world.start(1 << 20);
    assert_ne!(first, second);
    world.kept(2);
}

#[test]
fn nothing_is_kept_where_that_is_configured_or_useless() {
    let world = World::new();
    world.start(0);
    assert!(!world.cache().exists());
    world.start_of("random:layers=1,seed=3", 1 << 20);
    world.kept(0);
    // Less than the weights take.
    world.start(100);
    std::thread::sleep(Duration::from_millis(100));
    world.kept(0);
}

#[test]
fn a_folder_of_others_is_no_reason_to_fail() {
    let world = World::new();
    std::fs::create_dir(world.cache()).unwrap();
    std::fs::set_permissions(world.cache(), std::fs::Permissions::from_mode(0o755)).unwrap();
    world.start(1 << 20);
    world.kept(0);
}
