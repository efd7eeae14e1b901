//! Attention whose slabs are divided between threads and merged afterwards, and buffers that threads keep between heads of other sizes.

mod common;

use baton_kernels::cpu::{HeapPool, SimdLevel};
use baton_kernels::numerics::ATTENTION_SLAB;
use baton_kernels::ops::{Ops, Plan, PlanSegment, RopeTable};
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap};
use common::{Random, cpu, reference};
use std::sync::Arc;

const BLOCK: usize = 64;
/// Rows that end right before, at, and right behind the end of a slab.
const AROUND: std::ops::RangeInclusive<usize> = 509..=516;

/// Query heads of one KV head, their size, and the sign of all scores.
#[derive(Clone, Copy, Debug)]
struct Heads {
    group: usize,
    dim: usize,
    scores: Scores,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Scores {
    Any,
    /// Below the maximum that a state begins with: what is merged although nothing was ever seen of it shows.
    Negative,
}

/// Bits of the rows that see `seen` tokens, all in one step behind a prompt of the others: `[row][query head and element]`.
fn rows(ops: &Arc<dyn Ops>, heads: Heads, seen: std::ops::RangeInclusive<usize>) -> Vec<Vec<u32>> {
    let (tokens, first, cols) = (*seen.end(), seen.start() - 1, heads.group * heads.dim);
    let mut random = Random(5 + heads.dim as u64);
    let blocks = tokens.div_ceil(BLOCK);
    let layout = KvLayout::llama(BLOCK as u32, 1, 1, heads.dim as u32, Dtype::F32).unwrap();
    let map = KvPoolMap::try_new(layout, blocks as u32).unwrap();
    // NaN everywhere: what was never stored cannot go unnoticed.
    let kv = ops.bind_kv(Arc::new(HeapPool::new(map.bytes(), 0xff)), &map).unwrap();
    let angles = tokens * heads.dim / 2;
    let rope = RopeTable { cos: vec![1.0; angles], sin: vec![0.0; angles], dim: heads.dim };
    let rope = ops.upload_rope(&rope).unwrap();
    let table: Vec<BlockId> = (0..blocks as u32).rev().map(BlockId).collect();
    let plan = |position, rows| {
        ops.plan(&Plan { segments: vec![PlanSegment { position, rows, blocks: table.clone() }] }).unwrap()
    };
    let mut upload = |rows: usize, cols: usize, sign: f32| {
        let tensor = ops.alloc(rows, cols).unwrap();
        let mut data = random.floats(rows * cols, 1.0);
        if heads.scores == Scores::Negative && sign != 0.0 {
            data.iter_mut().for_each(|x| *x = sign * (0.1 + x.abs()));
        }
        ops.upload(tensor, &data).unwrap();
        tensor
    };
    let (k, v, prompt) = (upload(tokens, heads.dim, -1.0), upload(tokens, heads.dim, 0.0), upload(tokens, cols, 1.0));
    let whole = plan(0, tokens);
    ops.rope_store(kv, 0, whole, rope, prompt, k, v).unwrap();
    let count = tokens - first;
    let (q, out) = (upload(count, cols, 1.0), ops.alloc(count, cols).unwrap());
    ops.attend(kv, 0, plan(first, count), q, 0.3, out).unwrap();
    let mut data = vec![0.0; count * cols];
    ops.download(out, count, &mut data).unwrap();
    assert!(data.iter().all(|x| !x.is_nan()), "{heads:?}");
    data.chunks_exact(cols).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Backends of each level with each number of threads. With one KV head, 3 threads divide what has eight slabs and more; one thread
/// never does with so few.
fn backends() -> Vec<(String, Arc<dyn Ops>)> {
    let all = [(SimdLevel::Avx2Fma, 3), (SimdLevel::Avx2Fma, 1), (SimdLevel::Portable, 3)];
    all.into_iter().filter_map(|(level, n)| Some((format!("{level:?}, {n} threads"), cpu(n, level)?))).collect()
}

#[test]
fn rows_around_the_end_of_a_slab_merge_the_slabs_that_they_see() {
    assert_eq!(512 % ATTENTION_SLAB, 0, "the rows are chosen around the end of a slab");
    let shapes = [(1, 16), (3, 10)].into_iter().flat_map(|shape| [(shape, Scores::Any), (shape, Scores::Negative)]);
    for ((group, dim), scores) in shapes {
        let heads = Heads { group, dim, scores };
        let want = rows(&reference(), heads, AROUND);
        for (name, ops) in backends() {
            let together = rows(&ops, heads, AROUND);
            let differing: Vec<usize> =
                AROUND.zip(together.iter().zip(&want)).filter(|(_, (a, b))| a != b).map(|(seen, _)| seen).collect();
            assert!(differing.is_empty(), "{name}, {heads:?}: rows that see {differing:?} tokens");
        }
    }
}

#[test]
fn a_row_alone_around_the_end_of_a_slab_has_the_same_bits() {
    let heads = Heads { group: 2, dim: 12, scores: Scores::Negative };
    for seen in AROUND {
        let want = rows(&reference(), heads, seen..=seen);
        for (name, ops) in backends() {
            assert!(rows(&ops, heads, seen..=seen) == want, "{name}: the row that sees {seen} tokens");
        }
    }
}

#[test]
fn heads_of_one_size_leave_nothing_to_those_of_another() {
    // 16 fills the buffers; 10 and 12 are padded to 16 with zeros that must be there again.
    for (name, ops) in backends() {
        for dim in [16, 10, 16, 12, 6, 12] {
            let heads = Heads { group: 3, dim, scores: Scores::Any };
            assert!(rows(&ops, heads, 60..=70) == rows(&reference(), heads, 60..=70), "{name}: heads of {dim}");
        }
    }
}
