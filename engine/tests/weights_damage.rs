//! Damaged files: cut at any place, with any bit turned, with random headers. None may panic, and none may make opening
//! allocate more than a fixed multiple of its size, whatever lengths it claims.
//!
//! One test in a binary of its own, since the allocator is watched process-wide.

#[path = "weights/folder.rs"]
#[allow(dead_code, reason = "shared with the other tests")]
mod folder;
#[path = "weights/support.rs"]
mod support;

use baton_engine::formats::{GgufModel, HuggingFaceModel, ModelSource};
use peak_alloc::PeakAlloc;
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use std::path::Path;
use support::{File, Meta, fixture};

#[global_allocator]
static HEAP: PeakAlloc = PeakAlloc;

/// Heap that opening may take: per byte of the files (the most seen is 5, for headers of JSON), and apart from that.
const PER_BYTE: usize = 16;
const FIXED: usize = 64 << 10;
/// Every how many bytes a file is cut, in its header and in its data. Odd, so that all alignments come up.
const CUT_STEP: usize = 11;
const CUT_STEP_DATA: usize = 997;
/// Bits turned and lengths replaced, per file.
const DRAWS: usize = 200;

/// Opens what lies at `path`, checks the allocations and, where it still opens, reads every tensor.
fn open(path: &Path, size: usize, what: &str) -> bool {
    HEAP.reset_peak_usage();
    let before = HEAP.current_usage();
    let (opened, peak) = if path.is_dir() {
        let model = HuggingFaceModel::open(path, None);
        let peak = HEAP.peak_usage();
        (model.map(|m| Box::new(m) as Box<dyn ModelSource>), peak)
    } else {
        let model = GgufModel::open(path, None);
        let peak = HEAP.peak_usage();
        (model.map(|m| Box::new(m) as Box<dyn ModelSource>), peak)
    };
    let (taken, allowed) = (peak - before, PER_BYTE * size + FIXED);
    assert!(taken <= allowed, "{what}: {taken} bytes allocated for a file of {size}, {allowed} allowed");
    let Ok(model) = opened else { return false };
    for name in model.spec().tensor_names() {
        model.tensor(name).unwrap_or_else(|error| panic!("{what}: opened, but {name}: {error}"));
    }
    true
}

/// Feeds damaged versions of `good` to `open`: cut, with bits turned, with eight bytes of a length replaced.
fn damage(name: &str, good: &[u8], header: usize, mut open: impl FnMut(&[u8], &str) -> bool) {
    assert!(open(good, name), "{name} is good");
    let cuts = (0..header).step_by(CUT_STEP).chain((header..good.len()).step_by(CUT_STEP_DATA));
    for length in cuts {
        assert!(!open(&good[..length], &format!("{name} cut to {length}")), "{name} opened when cut to {length}");
    }
    let mut random = StdRng::seed_from_u64(4);
    let mut refused = 0;
    for _ in 0..DRAWS {
        let mut bytes = good.to_vec();
        let at = random.random_range(0..header);
        let what = if random.random() {
            bytes[at] ^= 1 << random.random_range(0..8);
            format!("{name} with a bit turned at {at}")
        } else {
            let absurd = [0, 1, u64::from(u32::MAX), 1 << 40, u64::MAX / 8, u64::MAX][random.random_range(0..6)];
            let end = (at + 8).min(bytes.len());
            bytes[at..end].copy_from_slice(&absurd.to_le_bytes()[..end - at]);
            format!("{name} with {absurd} at {at}")
        };
        refused += usize::from(!open(&bytes, &what));
    }
    assert!(refused > DRAWS / 4, "{name}: only {refused} of {DRAWS} were refused, so the damage is too gentle");
}

#[test]
fn damaged_files_neither_panic_nor_allocate() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("damaged.gguf");
    let mut open_gguf = |bytes: &[u8], what: &str| {
        std::fs::write(&path, bytes).unwrap();
        open(&path, bytes.len(), what)
    };
    let mut small = File::llama();
    small.set("tokenizer.ggml.model", Meta::Text("gpt2"));
    small.set("tokenizer.ggml.tokens", Meta::Texts(["a", "b", "c", "d", "e"].map(str::to_owned).to_vec()));
    small.set("tokenizer.ggml.token_type", Meta::I32s(vec![1; 5]));
    small.add("rope_freqs.weight", &[2]);
    let small = small.bytes();
    damage("small.gguf", &small, small.len() - 1000, &mut open_gguf);
    let tiny = std::fs::read(fixture("tiny.gguf")).unwrap();
    damage("tiny.gguf", &tiny, 3000, &mut open_gguf);

    let quantized = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/families/gptq");
    for (name, mut folder) in [("tiny", folder::Folder::tiny()), ("gptq", folder::Folder::of(&quantized))] {
        let weights = folder.read("model.safetensors");
        let config = folder.read("config.json");
        let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        damage(&format!("{name}/model.safetensors"), &weights, header, |bytes, what| {
            folder.write("model.safetensors", bytes);
            open(folder.path(), bytes.len() + config.len(), what)
        });
        folder.write("model.safetensors", &weights);
        let trimmed = config.trim_ascii_end();
        damage(&format!("{name}/config.json"), trimmed, trimmed.len(), |bytes, what| {
            folder.write("config.json", bytes);
            open(folder.path(), bytes.len() + weights.len(), what)
        });
    }
}
