//! A folder that states an absurd context: what is allocated follows the pool, not the statement.
//!
//! One test in a binary of its own, since the allocator is watched process-wide.

use baton_node::config::ByteSize;
use baton_worker::bring_up;
use baton_worker::settings::{DeviceKind, EngineSettings, ModelSettings};
use peak_alloc::PeakAlloc;
use std::path::Path;

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// A model of 2 layers with one KV head of 16: a token's KV has 128 bytes, its rotary tables 64.
const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/weights/fixtures/tiny");
/// 256 MB of rotary tables, which a machine that tests has, and far beyond what is allowed.
const CONTEXT: usize = 4_000_000;
/// 8,192 tokens of KV.
const POOL: u64 = 1 << 20;
/// Weights, activations, threads and tables of the tiny model take under a quarter of this.
const HEAP_MAX: usize = 16 << 20;

#[test]
fn an_absurd_context_costs_no_more_than_the_pool() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::copy(Path::new(TINY).join("model.safetensors"), folder.path().join("model.safetensors")).unwrap();
    let mut config: serde_json::Value =
        serde_json::from_slice(&std::fs::read(Path::new(TINY).join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = CONTEXT.into();
    std::fs::write(folder.path().join("config.json"), config.to_string()).unwrap();

    let model = ModelSettings { model: folder.path().to_str().unwrap().into(), ..ModelSettings::default() };
    let engine =
        EngineSettings { device: DeviceKind::Reference, kv_cache_bytes: ByteSize(POOL), ..EngineSettings::default() };
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let loaded = bring_up::load(&model, &engine, &|_, _| ()).unwrap();
    let taken = HEAP.peak_usage() - before;
    assert!(taken < HEAP_MAX, "{taken} bytes allocated");
    assert_eq!((loaded.card.context_max, loaded.engine.len_max()), (8192, 8192));
}
