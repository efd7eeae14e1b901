//! The GEMMs of prefill against the processor's peak of fused multiply-adds.

use crate::THREADS;
use crate::statistics::best;
use crate::summary::{Figure, Summary, Target};
use anyhow::ensure;
use baton_engine::models::DecoderSpec;
use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::device::{Role, StoredRows};
use baton_kernels::host::{HostKernels, Store};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::roofline;
use baton_kernels::storage::StorageFormat;
use std::time::Instant;

/// Rows of one prefill chunk, as the engine cuts them by default.
const ROWS: usize = 256;
/// Layers whose weights are walked in turn: together larger than the caches.
const LAYERS: usize = 8;
const ROUNDS: usize = 12;

struct Gemm<K: HostKernels> {
    weight: K::Matrix,
    x: K::Input,
    out: Vec<f32>,
}

/// Any fixed values without structure, in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    let mix = |i: u32| i.wrapping_add(salt).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    (0..len as u32).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn gemm<K: HostKernels>(kernels: &K, n: usize, k: usize, input: &[f32]) -> anyhow::Result<Gemm<K>> {
    let weights = data(n * k, 1);
    let bytes: Vec<u8> = weights.iter().flat_map(|x| x.to_le_bytes()).collect();
    let stored = StoredRows { rows: n, format: StorageFormat::F32, bytes: &bytes };
    let weight = kernels.pack(Role::Out, k, &[stored])?;
    let (rows, mut x) = (input.len() / k, K::Input::default());
    kernels.input(input, rows, &weight, &mut x);
    Ok(Gemm { weight, x, out: vec![0.0; rows * n] })
}

/// The last row, which the tile of a ragged end computes, must have the bits of the reference.
fn check(kernels: &CpuKernels, n: usize, k: usize, input: &[f32]) -> anyhow::Result<()> {
    let mut got = gemm(kernels, n, k, input)?;
    kernels.linear(&got.x, &got.weight, 1, Store::Set, &mut [&mut got.out]);
    let slow = ReferenceKernels::new(Numerics::default());
    let mut want = gemm(&slow, n, k, &input[(ROWS - 1) * k..])?;
    slow.linear(&want.x, &want.weight, 1, Store::Set, &mut [&mut want.out]);
    ensure!(got.out[(ROWS - 1) * n..] == want.out, "the GEMM {n} x {k} differs from the reference: not timed");
    Ok(())
}

pub(crate) fn measure(spec: &DecoderSpec, summary: &mut Summary) -> anyhow::Result<()> {
    let kernels = CpuKernels::new(CpuConfig { threads: THREADS, ..CpuConfig::default() })?;
    let layer = &spec.layers[0];
    let (q, kv) = (layer.attention.query_dim(), layer.attention.kv_dim());
    let (hidden, ffn) = (spec.hidden, layer.ffn);
    let dims = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn)];
    let mut gemms = Vec::new();
    for layer in 0..LAYERS {
        for (n, k) in dims {
            let input = data(ROWS * k, 2);
            if layer == 0 {
                check(&kernels, n, k, &input)?;
            }
            gemms.push(gemm(&kernels, n, k, &input)?);
        }
    }
    let flops = (dims.iter().map(|(n, k)| 2 * n * k).sum::<usize>() * ROWS * LAYERS) as f64;
    let (mut peaks, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        peaks.push(roofline::fma_peak(THREADS));
        let begin = Instant::now();
        for gemm in &mut gemms {
            kernels.linear(&gemm.x, &gemm.weight, 1, Store::Set, &mut [&mut gemm.out]);
        }
        rates.push(flops / begin.elapsed().as_secs_f64() / 1e9);
    }
    let (peak, rate) = (best(peaks), best(rates));
    let of = format!("peak of fused multiply-adds, {peak:.0} GFLOP/s; {ROWS} rows, best of {ROUNDS} rounds each");
    summary.add("prefill_gemm", Figure::ratio(rate, "GFLOP/s", rate / peak, of), Target::AtLeast(0.4));
    Ok(())
}
