//! A wrong shape, handle or id is refused at enqueue, by every backend, with the operation named.

mod common;

use baton_kernels::cpu::{CpuBackend, CpuConfig, HeapPool, SimdLevel};
use baton_kernels::ops::{Ops, OpsError, Plan, PlanSegment, RopeTable, Store};
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap};
use common::{cpu, lagging, reference};
use std::sync::Arc;

/// Runs each call and checks that it is refused in the name of its operation.
fn refuses(ops: &Arc<dyn Ops>) {
    let [x, y] = [ops.alloc(4, 8).unwrap(), ops.alloc(4, 8).unwrap()];
    let wide = ops.alloc(4, 12).unwrap();
    let w = ops.prepare("w", 8, 8, Dtype::F32, &[0.0; 64]).unwrap();
    let gain = ops.prepare("g", 1, 8, Dtype::F32, &[1.0; 8]).unwrap();
    let map = KvPoolMap::try_new(KvLayout::llama(16, 1, 1, 4, Dtype::F32).unwrap(), 2).unwrap();
    let kv = ops.bind_kv(Arc::new(HeapPool::new(map.bytes(), 0)), &map).unwrap();
    let rope = ops.upload_rope(&RopeTable { cos: vec![1.0; 64], sin: vec![0.0; 64], dim: 4 }).unwrap();
    let [k, v] = [ops.alloc(4, 4).unwrap(), ops.alloc(4, 4).unwrap()];
    let ids = ops.upload_ids(&[7, 8]).unwrap();
    let segment = |position, rows, block| PlanSegment { position, rows, blocks: vec![BlockId(block)] };
    let plan = |segment| ops.plan(&Plan { segments: vec![segment] }).unwrap();

    let mut refused = 0;
    let mut check = |op: &str, result: Result<(), OpsError>| match result {
        Err(OpsError::Shape { op: named, message }) => {
            assert_eq!(named, op, "{message}");
            refused += 1;
        }
        other => panic!("{op}: {other:?}"),
    };
    check("prepare", ops.prepare("w", 3, 8, Dtype::F32, &[0.0; 25]).map(|_| ()));
    check("alloc", ops.alloc(usize::MAX, 2).map(|_| ()));
    check("upload_rope", ops.upload_rope(&RopeTable { cos: vec![1.0; 3], sin: vec![0.0; 4], dim: 4 }).map(|_| ()));
    check("upload", ops.upload(x, &[0.0; 9]));
    check("upload", ops.upload(x, &[0.0; 40]));
    check("download", ops.download(x, 1, &mut [0.0; 9]));
    check("embed", ops.embed(w, ids, x, 2));
    check("embed", ops.embed(w, ids, x, 3));
    check("rms_norm", ops.rms_norm(x, gain, 0.0, x, 1));
    check("rms_norm", ops.rms_norm(x, w, 0.0, y, 1));
    check("linear", ops.linear(x, w, 1, Store::Set, y, 5));
    check("linear", ops.linear(x, w, 3, Store::Set, y, 1));
    check("linear", ops.linear(x, w, 16, Store::Set, y, 1));
    check("linear", ops.linear(wide, w, 1, Store::Set, y, 1));
    check("silu_mul", ops.silu_mul(x, wide, 1));
    check("gather_rows", ops.gather_rows(x, &[4], y));
    check("plan", ops.plan(&Plan { segments: vec![segment(0, 0, 0)] }).map(|_| ()));
    let old = plan(segment(0, 1, 0));
    let short = plan(segment(15, 2, 0));
    check("attend", ops.attend(kv, 0, old, x, 1.0, y));
    check("attend", ops.attend(kv, 0, short, x, 1.0, y));
    let stranger = plan(segment(0, 1, 2));
    check("rope_store", ops.rope_store(kv, 0, stranger, rope, x, k, v));
    let good = plan(segment(0, 1, 1));
    check("rope_store", ops.rope_store(kv, 1, good, rope, x, k, v));
    check("rope_store", ops.rope_store(kv, 0, good, rope, x, k, k));
    check("attend", ops.attend(kv, 0, good, x, 1.0, wide));
    let copy = |from, to, tokens| ops.copy_kv(kv, BlockId(from), BlockId(to), tokens);
    check("copy_kv", copy(1, 1, 4));
    check("copy_kv", copy(0, 2, 4));
    check("copy_kv", copy(0, 1, 0));
    check("copy_kv", copy(0, 1, 17));
    assert_eq!(refused, 27);
    ops.rope_store(kv, 0, good, rope, x, k, v).unwrap();
    ops.attend(kv, 0, good, x, 1.0, y).unwrap();
    ops.download(y, 1, &mut [0.0; 8]).unwrap();
}

#[test]
fn misuse_is_refused_alike() {
    for ops in [reference(), cpu(1, SimdLevel::Portable).unwrap(), lagging(reference())] {
        refuses(&ops);
    }
}

#[test]
fn impossible_configurations_are_refused() {
    for threads in [0, CpuConfig::THREADS_MAX + 1] {
        assert!(CpuBackend::new(CpuConfig { threads, simd: None }).is_err());
    }
}
