//! Attention whose slabs are divided between threads and merged afterwards, and buffers that threads keep between heads of other sizes.

mod common;

use baton_kernels::cpu::SimdLevel;
use baton_kernels::device::RopeTable;
use baton_kernels::host::{KvStep, Scores};
use baton_kernels::numerics::{ATTENTION_SLAB, Numerics};
use baton_kernels::step::StepSegment;
use baton_types::{Attention, BlockId, BlockTable, Dtype, LayerKv};
use common::{Kernels, Random, cpu, pool, reference};

const BLOCK: usize = 64;
const F32: Numerics = Numerics::F32Fma { weights: Dtype::F32 };
/// Rows that end right before, at, and right behind the end of a slab.
const AROUND: std::ops::RangeInclusive<usize> = 509..=516;

/// Query heads of one KV head, their size, the sign of all scores, and the window.
#[derive(Clone, Copy, Debug)]
struct Heads {
    group: usize,
    dim: usize,
    /// Elements of a value, which are the first of a key.
    latent: Option<usize>,
    sign: Sign,
    window: Option<usize>,
    /// Of the heads, if they have some.
    sinks: Option<[f32; 3]>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Sign {
    Any,
    /// Below the maximum that a state begins with: what is merged although nothing was ever seen of it shows.
    Negative,
}

/// Bits of the rows that see `seen` tokens, all in one step behind a prompt of the others: `[row][query head and element]`.
fn rows(kernels: &dyn Kernels, heads: Heads, seen: std::ops::RangeInclusive<usize>) -> Vec<Vec<u32>> {
    let (tokens, first, cols) = (*seen.end(), seen.start() - 1, heads.group * heads.dim);
    let mut random = Random(5 + heads.dim as u64);
    let blocks = tokens.div_ceil(BLOCK);
    let dim = heads.dim as u32;
    let kv = match heads.latent {
        Some(_) => LayerKv::Latent { dim },
        None => LayerKv::Heads { kv_heads: 1, head_dim: dim },
    };
    let layout = Attention::alike(1, kv, None).layout(BLOCK as u32, Dtype::F32).unwrap();
    let (_, _, kv) = pool(layout, blocks);
    let angles = tokens * heads.dim / 2;
    let rope = RopeTable { cos: vec![1.0; angles], sin: vec![0.0; angles], dim: heads.dim };
    let table: Vec<BlockId> = (0..blocks as u32).rev().map(BlockId).collect();
    let segments = |position, rows| [StepSegment { position, rows, table: BlockTable::from_start(table.clone()) }];
    let mut values = |rows: usize, cols: usize, sign: f32| {
        let mut data = random.floats(rows * cols, 1.0);
        if heads.sign == Sign::Negative && sign != 0.0 {
            data.iter_mut().for_each(|x| *x = sign * (0.1 + x.abs()));
        }
        data
    };
    let mut k = values(tokens, heads.dim, -1.0);
    let v = if heads.latent.is_some() { k.clone() } else { values(tokens, heads.dim, 0.0) };
    let mut prompt = values(tokens, cols, 1.0);
    let whole = KvStep { kv: &kv, layer: 0, segments: &segments(0, tokens) };
    kernels.rope_store(whole, &rope, &mut prompt, &mut k, &v);
    let count = tokens - first;
    let out_cols = heads.group * heads.latent.unwrap_or(heads.dim);
    let (q, mut data) = (values(count, cols, 1.0), vec![0.0; count * out_cols]);
    let step = KvStep { kv: &kv, layer: 0, segments: &segments(first, count) };
    kernels.attend(
        step,
        &q,
        Scores {
            scale: 0.3,
            window: heads.window,
            soft_cap: None,
            sinks: heads.sinks.as_ref().map(|sinks| &sinks[..]),
        },
        &mut data,
    );
    assert!(data.iter().all(|x| !x.is_nan()), "{heads:?}");
    data.chunks_exact(out_cols).map(|row| row.iter().map(|x| x.to_bits()).collect()).collect()
}

/// Backends of each level with each number of threads. With one KV head, 3 threads divide what has eight slabs and more; one thread
/// never does with so few.
fn backends() -> Vec<(String, Box<dyn Kernels>)> {
    let all = [(SimdLevel::Avx2Fma, 3), (SimdLevel::Avx2Fma, 1), (SimdLevel::Portable, 3)];
    all.into_iter().filter_map(|(level, n)| Some((format!("{level:?}, {n} threads"), cpu(n, level, F32)?))).collect()
}

#[test]
fn rows_around_the_end_of_a_slab_merge_the_slabs_that_they_see() {
    assert_eq!(512 % ATTENTION_SLAB, 0, "the rows are chosen around the end of a slab");
    let shapes = [(1, 16), (3, 10)].into_iter().flat_map(|shape| [(shape, Sign::Any), (shape, Sign::Negative)]);
    for (((group, dim), sign), window) in shapes.flat_map(|shape| [None, Some(100), Some(449)].map(|w| (shape, w))) {
        let sinks = (window != Some(100)).then_some([0.5, -2.0, 9.0]);
        let latent = (window == Some(449)).then_some(dim * 3 / 4);
        let heads = Heads { group, dim, latent, sign, window, sinks };
        let want = rows(&*reference(F32), heads, AROUND);
        for (name, ops) in backends() {
            let together = rows(&*ops, heads, AROUND);
            let differing: Vec<usize> =
                AROUND.zip(together.iter().zip(&want)).filter(|(_, (a, b))| a != b).map(|(seen, _)| seen).collect();
            assert!(differing.is_empty(), "{name}, {heads:?}: rows that see {differing:?} tokens");
        }
    }
}

#[test]
fn a_row_alone_around_the_end_of_a_slab_has_the_same_bits() {
    let sinks = Some([-1.0, 3.0, 0.0]);
    let heads = Heads { group: 2, dim: 12, latent: None, sign: Sign::Negative, window: None, sinks };
    let latents = Heads { latent: Some(7), sinks: None, ..heads };
    for (seen, heads) in AROUND.flat_map(|seen| [heads, latents].map(|heads| (seen, heads))) {
        let want = rows(&*reference(F32), heads, seen..=seen);
        for (name, ops) in backends() {
            assert!(rows(&*ops, heads, seen..=seen) == want, "{name}: the row that sees {seen} tokens");
        }
    }
}

#[test]
fn heads_of_one_size_leave_nothing_to_those_of_another() {
    // 16 fills the buffers; 10 and 12 are padded to 16 with zeros that must be there again.
    for (name, ops) in backends() {
        for (dim, latent) in [(16, None), (10, None), (16, Some(9)), (12, None), (6, None), (12, Some(12)), (10, None)]
        {
            let heads = Heads { group: 3, dim, latent, sign: Sign::Any, window: None, sinks: None };
            assert!(rows(&*ops, heads, 60..=70) == rows(&*reference(F32), heads, 60..=70), "{name}: heads of {dim}");
        }
    }
}
