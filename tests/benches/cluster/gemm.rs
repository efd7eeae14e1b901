//! The GEMMs of prefill against the processor's peak of fused multiply-adds.

use crate::THREADS;
use crate::statistics::best;
use crate::summary::{Figure, Summary, Target};
use anyhow::ensure;
use baton_engine::models::DecoderSpec;
use baton_kernels::cpu::{CpuBackend, CpuConfig};
use baton_kernels::ops::{Ops, Store, Tensor, Weight};
use baton_kernels::reference::ReferenceBackend;
use baton_kernels::roofline;
use baton_types::Dtype;
use std::sync::Arc;
use std::time::Instant;

/// Rows of one prefill chunk, as the engine cuts them by default.
const ROWS: usize = 256;
/// Layers whose weights are walked in turn: together larger than the caches.
const LAYERS: usize = 8;
const ROUNDS: usize = 12;

struct Gemm {
    weight: Weight,
    x: Tensor,
    out: Tensor,
}

/// Any fixed values without structure, in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    let mix = |i: u32| i.wrapping_add(salt).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77);
    (0..len as u32).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

fn gemm(ops: &dyn Ops, n: usize, k: usize, rows: usize, input: &[f32]) -> anyhow::Result<Gemm> {
    let weight = ops.prepare("bench", n, k, Dtype::Bf16, &data(n * k, 1))?;
    let (x, out) = (ops.alloc(rows, k)?, ops.alloc(rows, n)?);
    ops.upload(x, input)?;
    Ok(Gemm { weight, x, out })
}

/// The last row, which the tile of a ragged end computes, must have the bits of the reference.
fn check(ops: &dyn Ops, gemm: &Gemm, input: &[f32]) -> anyhow::Result<()> {
    let Weight { n, k, .. } = gemm.weight;
    ops.linear(gemm.x, gemm.weight, 1, Store::Set, gemm.out, ROWS)?;
    let mut got = vec![0.0; ROWS * n];
    ops.download(gemm.out, ROWS, &mut got)?;
    let slow = ReferenceBackend::new();
    let expected = self::gemm(&*slow, n, k, 1, &input[(ROWS - 1) * k..])?;
    slow.linear(expected.x, expected.weight, 1, Store::Set, expected.out, 1)?;
    let mut want = vec![0.0; n];
    slow.download(expected.out, 1, &mut want)?;
    ensure!(got[(ROWS - 1) * n..] == want, "the GEMM {n} x {k} differs from the reference: not timed");
    Ok(())
}

pub(crate) fn measure(spec: &DecoderSpec, summary: &mut Summary) -> anyhow::Result<()> {
    let ops: Arc<dyn Ops> = CpuBackend::new(CpuConfig { threads: THREADS, simd: None })?;
    let layer = &spec.layers[0];
    let (q, kv) = (layer.attention.query_dim(), layer.attention.kv_dim());
    let (hidden, ffn) = (spec.hidden, layer.ffn);
    let dims = [(q, hidden), (kv, hidden), (kv, hidden), (hidden, q), (ffn, hidden), (ffn, hidden), (hidden, ffn)];
    let mut gemms = Vec::new();
    for layer in 0..LAYERS {
        for (n, k) in dims {
            let input = data(ROWS * k, 2);
            let gemm = gemm(&*ops, n, k, ROWS, &input)?;
            if layer == 0 {
                check(&*ops, &gemm, &input)?;
            }
            gemms.push(gemm);
        }
    }
    let flops = (dims.iter().map(|(n, k)| 2 * n * k).sum::<usize>() * ROWS * LAYERS) as f64;
    let (mut peaks, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        peaks.push(roofline::fma_peak(THREADS));
        let begin = Instant::now();
        for gemm in &gemms {
            ops.linear(gemm.x, gemm.weight, 1, Store::Set, gemm.out, ROWS)?;
        }
        ops.download(gemms[gemms.len() - 1].out, 0, &mut [])?; // Waits.
        rates.push(flops / begin.elapsed().as_secs_f64() / 1e9);
    }
    let (peak, rate) = (best(peaks), best(rates));
    let of = format!("peak of fused multiply-adds, {peak:.0} GFLOP/s; {ROWS} rows, best of {ROUNDS} rounds each");
    summary.add("prefill_gemm", Figure::ratio(rate, "GFLOP/s", rate / peak, of), Target::AtLeast(0.4));
    Ok(())
}
