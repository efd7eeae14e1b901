//! The reference computes what its names say: compared with the textbook formulas in f64.

mod common;

use baton_kernels::device::RopeTable;
use baton_kernels::host::{KvStep, Scores, Store};
use baton_kernels::numerics::Numerics;
use baton_kernels::program::Activation;
use baton_kernels::step::StepSegment;
use baton_types::{BlockId, BlockTable, Dtype, KvLayout};
use common::{Random, pool, reference};

const F32: Numerics = Numerics::F32Fma { weights: Dtype::F32 };

fn close(what: &str, got: &[f32], want: &[f64]) {
    assert_eq!(got.len(), want.len());
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        assert!((f64::from(got) - want).abs() <= 2e-5 * (1.0 + want.abs()), "{what}[{i}]: {got} is not {want}");
    }
}

fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|&x| f64::from(x)).collect()
}

#[test]
fn linear_norm_and_swiglu() {
    let (rows, k, n) = (3, 600, 5);
    let mut random = Random(11);
    let (x, w, g) = (random.floats(rows * k, 1.0), random.floats(n * k, 0.1), random.floats(k, 1.0));
    let kernels = reference(F32);
    let weight = kernels.pack(n, k, &w);
    let (mut out, mut up, mut normed) = (vec![0.0; rows * n], vec![0.0; rows * n], vec![0.0; rows * k]);

    kernels.linear(&x, &weight, 4, Store::Set, &mut out);
    kernels.linear(&x, &weight, 1, Store::Add, &mut out);
    let dot = |m: usize, i: usize| (0..k).map(|j| f64::from(x[m * k + j]) * f64::from(w[i * k + j])).sum::<f64>();
    let product: Vec<f64> = (0..rows * n).map(|i| 2.0 * dot(i / n, i % n)).collect();
    close("linear", &out, &product);

    kernels.linear(&x, &weight, 1, Store::Set, &mut up);
    kernels.activate(Activation::Silu, &mut out, &up);
    let silu: Vec<f64> = product.iter().map(|p| p / (1.0 + (-p).exp()) * (p / 2.0)).collect();
    close("activate", &out, &silu);

    kernels.rms_norm(&x, &g, 1e-5, &mut normed);
    let mut want = Vec::new();
    for row in wide(&x).chunks_exact(k) {
        let rms = (row.iter().map(|x| x * x).sum::<f64>() / k as f64 + 1e-5).sqrt();
        want.extend(row.iter().zip(wide(&g)).map(|(x, g)| x / rms * g));
    }
    close("rms_norm", &normed, &want);
}

#[test]
fn rope_and_grouped_causal_attention() {
    let (tokens, kv_heads, group, dim) = (150, 2, 3, 6);
    let (heads, half) = (kv_heads * group, dim / 2);
    let mut random = Random(5);
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|h| random.floats(tokens * h * dim, 1.0));
    let angle = |t: usize, i: usize| t as f64 * 0.5f64.powi(i as i32);
    let table = |f: fn(f64) -> f64| (0..tokens * half).map(|i| f(angle(i / half, i % half)) as f32).collect();

    let kernels = reference(F32);
    let layout = KvLayout::llama(16, 1, kv_heads as u32, dim as u32, Dtype::F32).unwrap();
    let (_, _, kv) = pool(layout, 10);
    let rope = RopeTable { cos: table(f64::cos), sin: table(f64::sin), dim };
    let segments = [StepSegment {
        position: 0,
        rows: tokens,
        table: BlockTable::from_start((0..10).rev().map(BlockId).collect()),
    }];
    let step = KvStep { kv: &kv, layer: 0, segments: &segments };
    let (mut turned_q, mut turned_k) = (q.clone(), k.clone());
    kernels.rope_store(step, &rope, &mut turned_q, &mut turned_k, &v);

    // A pair (i, i + half) is a complex number, turned by the angle of its position.
    let rotated = |x: &[f32], heads: usize, t: usize, h: usize| -> Vec<f64> {
        let head = wide(&x[(t * heads + h) * dim..(t * heads + h + 1) * dim]);
        let turn = |i: usize| angle(t, i).sin_cos();
        let low = (0..half).map(|i| head[i] * turn(i).1 - head[i + half] * turn(i).0);
        let high = (0..half).map(|i| head[i + half] * turn(i).1 + head[i] * turn(i).0);
        low.chain(high).collect()
    };
    let sinks = [-1.0, 0.5, 2.0, -40.0, 0.0, 50.0];
    let windows = [None, Some(1), Some(20), Some(64), Some(100)];
    for (window, sinks) in windows.into_iter().flat_map(|window| [(window, None), (window, Some(&sinks[..]))]) {
        let mut got = vec![0.0; tokens * heads * dim];
        kernels.attend(step, &turned_q, Scores { scale: 0.4, window, soft_cap: None, sinks }, &mut got);
        let mut want = Vec::new();
        for t in 0..tokens {
            let first = window.map_or(0, |window: usize| (t + 1).saturating_sub(window));
            for h in 0..heads {
                let query = rotated(&q, heads, t, h);
                let score = |j| query.iter().zip(rotated(&k, kv_heads, j, h / group)).map(|(a, b)| a * b).sum::<f64>();
                let weights: Vec<f64> = (first..=t).map(|j| (0.4 * score(j)).exp()).collect();
                let sink = sinks.map_or(0.0, |sinks| f64::from(sinks[h]).exp());
                let sum = weights.iter().sum::<f64>() + sink;
                let value = |j: usize, d: usize| f64::from(v[(j * kv_heads + h / group) * dim + d]);
                want.extend(
                    (0..dim).map(|d| weights.iter().zip(first..).map(|(w, j)| w * value(j, d)).sum::<f64>() / sum),
                );
            }
        }
        close(&format!("attention, window {window:?}, sinks {sinks:?}"), &got, &want);
    }
}
