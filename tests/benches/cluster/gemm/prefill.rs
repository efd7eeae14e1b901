//! The GEMMs of prefill in `f32fma` against the processor's peak of fused multiply-adds.

use super::{Gemm, check, data};
use crate::THREADS;
use crate::statistics::best;
use crate::summary::{Figure, Summary, Target};
use baton_engine::families::DecoderSpec;
use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline;
use baton_kernels::storage::StorageFormat;
use std::time::Instant;

/// Rows of one prefill chunk, as the engine cuts them by default.
const ROWS: usize = 256;
/// Layers whose weights are walked in turn: together larger than the caches.
const LAYERS: usize = 8;
const ROUNDS: usize = 12;

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
                check(&kernels, Numerics::default(), StorageFormat::F32, n, k, &input)?;
            }
            gemms.push(Gemm::new(&kernels, StorageFormat::F32, (n, k), &input, 1)?);
        }
    }
    let flops = (dims.iter().map(|(n, k)| 2 * n * k).sum::<usize>() * ROWS * LAYERS) as f64;
    let (mut peaks, mut rates) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        peaks.push(roofline::fma_peak(THREADS));
        let begin = Instant::now();
        gemms.iter_mut().for_each(|gemm| gemm.run(&kernels));
        rates.push(flops / begin.elapsed().as_secs_f64() / 1e9);
    }
    let (peak, rate) = (best(peaks), best(rates));
    let of = format!("peak of fused multiply-adds, {peak:.0} GFLOP/s; {ROWS} rows, best of {ROUNDS} rounds each");
    summary.add("prefill_gemm", Figure::ratio(rate, "GFLOP/s", rate / peak, of), Target::AtLeast(0.4));
    Ok(())
}
