//! Every model family: however a request is served, it has the bits that it has alone. That these are the family's logits is shown by the
//! engine's tests, on the same checkpoints.

use baton_engine::formats::{HuggingFaceModel, ModelSource, RandomModel};
use baton_kernels::numerics::Numerics;
use baton_tests::bits::{Case, Coverage, Dealer, Family, Read, Route, Truth, World};
use baton_types::{Dtype, GroupKind, TokenId};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Over the windows of all families, and on both sides of a block of 16.
const LENGTHS: [usize; 4] = [70, 16, 33, 5];

/// The checkpoints of the engine's tests.
fn folders() -> Vec<PathBuf> {
    let all = Path::new(env!("CARGO_MANIFEST_DIR")).join("../engine/tests/families");
    let folders = std::fs::read_dir(all).unwrap().map(|entry| entry.unwrap().path());
    let mut folders: Vec<_> = folders.filter(|path| path.join("config.json").exists()).collect();
    folders.sort_unstable();
    folders
}

fn check(model: Arc<dyn ModelSource>, class: Numerics, seed: u64) -> Coverage {
    let name = model.name().to_owned();
    let vocab = model.spec().vocab;
    // The second begins with tokens of the first, which a cache has then.
    let prompts = LENGTHS.map(|len| (0..len).map(|i| ((i * i + i / 7) % vocab) as TokenId).collect());
    let world = World::new(Family::Cpu, class, model, prompts.to_vec(), 6);
    let truth = Truth::compute(world).unwrap();
    let (sizes, mut dealer) = (truth.sizes(), Dealer::new(seed));
    let made = [
        Case::preempting(16, Route::Remote, &sizes),
        Case::preempting(64, Route::Local, &sizes),
        Case::getting((16, 64), false, Read::Undisturbed, &sizes),
    ];
    let dealt = (0..3).map(|_| dealer.deal(&sizes));
    let mut coverage = Coverage::default();
    for case in made.into_iter().chain(dealt) {
        let observed = truth.observe(&case).unwrap();
        let compared = observed.equal.unwrap_or_else(|differ| panic!("{differ}\n{class}, {name}\n{case:?}"));
        coverage.merge(&observed.coverage);
        coverage.add("equal", "rows of logits", compared.rows);
    }
    coverage
}

#[test]
fn every_family_has_the_same_bits_however_it_is_served() {
    let folders = folders();
    assert!(folders.len() >= 28, "{folders:?}");
    let mut coverage = Coverage::default();
    for (folder, seed) in folders.iter().zip(1..) {
        for class in [Numerics::Bf16x32, Numerics::F32Fma { weights: Dtype::F32 }] {
            let model = HuggingFaceModel::open(folder, None).unwrap();
            coverage.merge(&check(Arc::new(model), class, seed));
        }
    }
    println!("{coverage}");
    let wanted: [(_, &[_]); 4] = [
        ("P block", &["16", "64"]),
        ("D block", &["16", "64"]),
        ("shipped over", &["ucx", "tcp"]),
        ("requests", &["Remote fresh", "Got fresh", "Local fresh"]),
    ];
    assert_eq!(coverage.missing(&wanted), []);
}

/// A model whose layers have keys of two sizes, and windows: four groups of a pool.
#[test]
fn several_sizes_of_heads_have_the_same_bits_however_they_are_served() {
    let shape = "random:hidden=48,layers=5,heads=4,kv_heads=4,head_dim=16,ffn=64,window=20,full_every=2,full_head_dim=32,\
                 full_kv_heads=2,sinks=true";
    let mut spec = RandomModel::parse(shape).unwrap().spec().clone();
    // The last of the two full layers, and one with a window, as the others' counterparts.
    (spec.layers[3].attention.kv_heads, spec.layers[4].attention.kv_heads) = (1, 2);
    spec.check().unwrap();
    let kinds = spec.kv_layout(16, Dtype::Bf16).unwrap();
    assert_eq!(kinds.groups().len(), 4);
    for class in [Numerics::Bf16x32, Numerics::F32Fma { weights: Dtype::F32 }] {
        let coverage = check(Arc::new(RandomModel::new(spec.clone(), 5)), class, 21);
        println!("{coverage}");
        let wanted: [(_, &[_]); 2] =
            [("P block", &["16"]), ("requests", &["Remote fresh", "Got fresh", "Local fresh"])];
        assert_eq!(coverage.missing(&wanted), []);
    }
}

/// States in most layers: recurrent ones also before the first and behind the last one that attends.
#[test]
fn recurrent_layers_have_the_same_bits_however_they_are_served() {
    let shape = "random:hidden=48,layers=5,heads=4,kv_heads=2,head_dim=16,rope_dim=8,ffn=40,qk_norm=heads,gate=true,delta=6,delta_keys=2,\
                 delta_key_dim=10,delta_dim=12,attention_every=2";
    let spec = RandomModel::parse(shape).unwrap().spec().clone();
    let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
    let groups = layout.groups().iter().map(|group| (group.kind, group.layers.len())).collect::<Vec<_>>();
    assert_eq!(groups, [(GroupKind::Full, 2), (GroupKind::State, 3)]);
    for class in [Numerics::Bf16x32, Numerics::F32Fma { weights: Dtype::F32 }] {
        let coverage = check(Arc::new(RandomModel::new(spec.clone(), 7)), class, 23);
        println!("{coverage}");
        let wanted: [(_, &[_]); 2] =
            [("P block", &["16"]), ("requests", &["Remote fresh", "Got fresh", "Local fresh"])];
        assert_eq!(coverage.missing(&wanted), []);
    }
}

/// Latents with a window in some layers: one plane in both groups of a pool.
#[test]
fn latents_have_the_same_bits_however_they_are_served() {
    let shape = "random:hidden=48,layers=4,heads=4,head_dim=20,rope_dim=8,latent=24,query_rank=28,value_dim=12,ffn=40,window=20,\
                 full_every=2,experts=6,used=2,sigmoid=true,groups=3,groups_used=2,shared=24,dense=1";
    let spec = RandomModel::parse(shape).unwrap().spec().clone();
    let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
    let groups = layout.groups().iter().map(|group| (group.kind, group.planes.len())).collect::<Vec<_>>();
    assert_eq!(groups, [(GroupKind::Latent, 1), (GroupKind::Window(20), 1)]);
    for class in [Numerics::Bf16x32, Numerics::F32Fma { weights: Dtype::F32 }] {
        let coverage = check(Arc::new(RandomModel::new(spec.clone(), 6)), class, 22);
        println!("{coverage}");
        let wanted: [(_, &[_]); 2] =
            [("P block", &["16"]), ("requests", &["Remote fresh", "Got fresh", "Local fresh"])];
        assert_eq!(coverage.missing(&wanted), []);
    }
}
