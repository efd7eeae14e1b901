//! The lagging backend: nothing is there before its fence, everything is there behind it, failures are late but typed.

mod common;

use baton_kernels::lagging::{LagConfig, Lagging};
use baton_kernels::ops::{Ops, OpsError};
use baton_types::{Dtype, FenceStatus};
use common::{Chunk, Layer, Shape, reference};
use std::sync::Arc;
use std::time::{Duration, Instant};

const SHAPE: Shape = Shape {
    hidden: 20,
    kv_heads: 2,
    group: 1,
    head_dim: 8,
    rope_dim: 8,
    ffn: 9,
    vocab: 11,
    weights: Dtype::F32,
    kv: Dtype::Bf16,
    seed: 3,
};

fn all_nan(kv: &[u8]) -> bool {
    kv.chunks_exact(2).all(|b| half::bf16::from_le_bytes([b[0], b[1]]).is_nan())
}

fn wait_done(ops: &dyn Ops) {
    let (fence, until) = (ops.fence(), Instant::now() + Duration::from_secs(20));
    while fence.poll() == FenceStatus::Pending && Instant::now() < until {
        std::thread::yield_now();
    }
    assert_eq!(fence.poll(), FenceStatus::Done);
}

#[test]
fn kv_is_poison_until_its_fence() {
    let lagging = Lagging::new(reference(), LagConfig::default()).unwrap();
    let layer = Layer::new(lagging.clone(), SHAPE, 16, 1);
    let chunk = [Chunk { sequence: 0, position: 0, rows: 20 }];
    layer.step(&chunk);
    let want = layer.kv_bytes(0, 20);
    assert!(!all_nan(&want));

    // The same rows again: stale bytes would be the right ones, so only poison can show that they are not there yet.
    lagging.hold();
    let plan = lagging.plan(&layer.plan(&chunk)).unwrap();
    let [q, k, v] = [(); 3].map(|()| lagging.alloc(20, 16).unwrap());
    let data: Vec<f32> = (0..20 * 16).map(|i| i as f32).collect();
    for tensor in [q, k, v] {
        lagging.upload(tensor, &data).unwrap();
    }
    let rope =
        lagging.upload_rope(&baton_kernels::ops::RopeTable { cos: vec![1.0; 80], sin: vec![0.0; 80], dim: 8 }).unwrap();
    let kv = lagging.bind_kv(layer.pool.clone(), &layer.map).unwrap();
    for l in 0..2 {
        lagging.rope_store(kv, l, plan, rope, q, k, v).unwrap();
    }
    let fence = lagging.fence();
    assert_eq!(fence.poll(), FenceStatus::Pending);
    assert!(all_nan(&layer.kv_bytes(0, 20)));
    lagging.release();
    wait_done(lagging.as_ref());
    assert_eq!(fence.poll(), FenceStatus::Done);
    let stored = layer.kv_bytes(0, 20);
    assert_eq!(&stored[2 * 16..2 * 17], &half::bf16::from_f32(16.0).to_le_bytes());
}

#[test]
fn copies_are_poison_until_their_fence_and_right_behind_it() {
    const TOKENS: usize = 11;
    let lagging = Lagging::new(reference(), LagConfig::default()).unwrap();
    for ops in [lagging.clone() as Arc<dyn Ops>, reference()] {
        let layer = Layer::new(ops.clone(), SHAPE, 16, 2);
        layer.step(&[Chunk { sequence: 0, position: 0, rows: 16 }]);
        let kv = ops.bind_kv(layer.pool.clone(), &layer.map).unwrap();
        let [from, to] = [0, 1].map(|sequence| {
            let plan = layer.plan(&[Chunk { sequence, position: 0, rows: 1 }]);
            plan.segments[0].blocks[0]
        });
        // As if the right bytes were there from before: only poison can show that they are not there yet.
        ops.copy_kv(kv, from, to, 16).unwrap();
        wait_done(&*ops);
        lagging.hold();
        ops.copy_kv(kv, from, to, TOKENS).unwrap();
        let is_late = ops.fence().poll() == FenceStatus::Pending;
        assert_eq!(all_nan(&layer.kv_bytes(1, TOKENS)), is_late);
        lagging.release();
        wait_done(&*ops);
        assert_eq!(layer.kv_bytes(1, 16), layer.kv_bytes(0, 16), "what it does not copy stays");
        layer.step(&[Chunk { sequence: 1, position: 0, rows: 16 }]);
        let before = layer.kv_bytes(1, 16);
        ops.copy_kv(kv, from, to, TOKENS).unwrap();
        wait_done(&*ops);
        let row = |sequence, token| layer.kv_bytes(sequence, token + 1);
        assert_eq!(row(1, TOKENS - 1), row(0, TOKENS - 1));
        assert_ne!(layer.kv_bytes(1, 16), layer.kv_bytes(0, 16), "the other sequence's tokens behind");
        assert_ne!(layer.kv_bytes(1, 16), before);
    }
}

#[test]
fn reuse_of_blocks_does_not_poison_what_earlier_work_reads() {
    let lagging = Lagging::new(reference(), LagConfig::default()).unwrap();
    let layer = Layer::new(lagging.clone(), SHAPE, 16, 1);
    let calm = Layer::new(reference(), SHAPE, 16, 1);
    let first = [Chunk { sequence: 0, position: 0, rows: 18 }];
    assert_eq!(layer.step(&first), calm.step(&first));

    // Attention over the old rows is pending while the same blocks are stored anew.
    let plan = layer.plan(&first);
    let run = |ops: &dyn Ops, layer: &Layer| {
        let kv = ops.bind_kv(layer.pool.clone(), &layer.map).unwrap();
        let [q, k, v, out] = [(); 4].map(|()| ops.alloc(18, 16).unwrap());
        let rope = baton_kernels::ops::RopeTable { cos: vec![1.0; 80], sin: vec![0.0; 80], dim: 8 };
        let rope = ops.upload_rope(&rope).unwrap();
        ops.upload(q, &[0.5; 18 * 16]).unwrap();
        let handle = ops.plan(&plan).unwrap();
        ops.attend(kv, 0, handle, q, 1.0, out).unwrap();
        ops.rope_store(kv, 0, handle, rope, q, k, v).unwrap();
        out
    };
    lagging.hold();
    let late = run(lagging.as_ref(), &layer);
    lagging.release();
    let now = run(calm.ops.as_ref(), &calm);
    let (mut a, mut b) = ([0.0; 18 * 16], [0.0; 18 * 16]);
    lagging.download(late, 18, &mut a).unwrap();
    calm.ops.download(now, 18, &mut b).unwrap();
    assert_eq!(a, b);
}

#[test]
fn every_wait_ends() {
    let config = LagConfig { queue_max: 2, deadline: Duration::from_millis(20), ..LagConfig::default() };
    let lagging: Arc<Lagging> = Lagging::new(reference(), config).unwrap();
    let tensor = lagging.alloc(1, 1).unwrap();
    lagging.hold();
    lagging.upload(tensor, &[1.0]).unwrap();
    assert!(matches!(lagging.download(tensor, 1, &mut [0.0]), Err(OpsError::Device(_))));
    lagging.upload(tensor, &[2.0]).unwrap();
    assert!(matches!(lagging.upload(tensor, &[3.0]), Err(OpsError::Device(_))));
    lagging.release();
    wait_done(lagging.as_ref());
    let mut out = [0.0];
    lagging.download(tensor, 1, &mut out).unwrap();
    assert_eq!(out, [2.0]);
}
