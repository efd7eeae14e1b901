//! The reference computes what its names say: compared with the textbook formulas in f64.

mod common;

use baton_kernels::cpu::HeapPool;
use baton_kernels::ops::{Plan, PlanSegment, RopeTable, Store};
use baton_types::{BlockId, Dtype, KvLayout, KvPoolMap};
use common::{Random, reference};
use std::sync::Arc;

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
    let ops = reference();
    let [tensor, normed] = [k, k].map(|cols| ops.alloc(rows, cols).unwrap());
    let [out, up] = [n, n].map(|cols| ops.alloc(rows, cols).unwrap());
    let weight = ops.prepare("w", n, k, Dtype::F32, &w).unwrap();
    let gain = ops.prepare("g", 1, k, Dtype::F32, &g).unwrap();
    ops.upload(tensor, &x).unwrap();
    let get = |tensor, cols| {
        let mut data = vec![0.0; rows * cols];
        ops.download(tensor, rows, &mut data).unwrap();
        data
    };

    ops.linear(tensor, weight, 4, Store::Set, out, rows).unwrap();
    ops.linear(tensor, weight, 1, Store::Add, out, rows).unwrap();
    let dot = |m: usize, i: usize| (0..k).map(|j| f64::from(x[m * k + j]) * f64::from(w[i * k + j])).sum::<f64>();
    let product: Vec<f64> = (0..rows * n).map(|i| 2.0 * dot(i / n, i % n)).collect();
    close("linear", &get(out, n), &product);

    ops.linear(tensor, weight, 1, Store::Set, up, rows).unwrap();
    ops.silu_mul(out, up, rows).unwrap();
    let silu: Vec<f64> = product.iter().map(|p| p / (1.0 + (-p).exp()) * (p / 2.0)).collect();
    close("silu_mul", &get(out, n), &silu);

    ops.rms_norm(tensor, gain, 1e-5, normed, rows).unwrap();
    let mut want = Vec::new();
    for row in wide(&x).chunks_exact(k) {
        let rms = (row.iter().map(|x| x * x).sum::<f64>() / k as f64 + 1e-5).sqrt();
        want.extend(row.iter().zip(wide(&g)).map(|(x, g)| x / rms * g));
    }
    close("rms_norm", &get(normed, k), &want);
}

#[test]
fn rope_and_grouped_causal_attention() {
    let (tokens, kv_heads, group, dim) = (150, 2, 3, 6);
    let (heads, half) = (kv_heads * group, dim / 2);
    let mut random = Random(5);
    let [q, k, v] = [heads, kv_heads, kv_heads].map(|h| random.floats(tokens * h * dim, 1.0));
    let angle = |t: usize, i: usize| t as f64 * 0.5f64.powi(i as i32);
    let table = |f: fn(f64) -> f64| (0..tokens * half).map(|i| f(angle(i / half, i % half)) as f32).collect();

    let ops = reference();
    let map = KvPoolMap::try_new(KvLayout::llama(16, 1, kv_heads as u32, dim as u32, Dtype::F32).unwrap(), 10).unwrap();
    let kv = ops.bind_kv(Arc::new(HeapPool::new(map.bytes(), 0xff)), &map).unwrap();
    let rope = ops.upload_rope(&RopeTable { cos: table(f64::cos), sin: table(f64::sin), dim }).unwrap();
    let upload = |data: &[f32]| {
        let tensor = ops.alloc(tokens, data.len() / tokens).unwrap();
        ops.upload(tensor, data).unwrap();
        tensor
    };
    let ([tq, tk, tv], out) = ([&q, &k, &v].map(|x| upload(x)), ops.alloc(tokens, heads * dim).unwrap());
    let blocks = (0..10).rev().map(BlockId).collect();
    let plan = ops.plan(&Plan { segments: vec![PlanSegment { position: 0, rows: tokens, blocks }] }).unwrap();
    ops.rope_store(kv, 0, plan, rope, tq, tk, tv).unwrap();
    ops.attend(kv, 0, plan, tq, 0.4, out).unwrap();
    let mut got = vec![0.0; tokens * heads * dim];
    ops.download(out, tokens, &mut got).unwrap();

    // A pair (i, i + half) is a complex number, turned by the angle of its position.
    let rotated = |x: &[f32], heads: usize, t: usize, h: usize| -> Vec<f64> {
        let head = wide(&x[(t * heads + h) * dim..(t * heads + h + 1) * dim]);
        let turn = |i: usize| angle(t, i).sin_cos();
        let low = (0..half).map(|i| head[i] * turn(i).1 - head[i + half] * turn(i).0);
        let high = (0..half).map(|i| head[i + half] * turn(i).1 + head[i] * turn(i).0);
        low.chain(high).collect()
    };
    let mut want = Vec::new();
    for t in 0..tokens {
        for h in 0..heads {
            let query = rotated(&q, heads, t, h);
            let score = |j| query.iter().zip(rotated(&k, kv_heads, j, h / group)).map(|(a, b)| a * b).sum::<f64>();
            let weights: Vec<f64> = (0..=t).map(|j| (0.4 * score(j)).exp()).collect();
            let sum: f64 = weights.iter().sum();
            let value = |j: usize, d: usize| f64::from(v[(j * kv_heads + h / group) * dim + d]);
            want.extend((0..dim).map(|d| (0..=t).map(|j| weights[j] * value(j, d)).sum::<f64>() / sum));
        }
    }
    close("attention", &got, &want);
}
