//! Products of fixed shapes in each numerics class, against the lower of two roofs: the peak of the class's instructions, and the bandwidth of
//! reading weights that lie in no cache. Products and roofs take turns in every round.

use super::{Gemm, check, data};
use crate::THREADS;
use crate::statistics::{median, paired_ratio_at_least};
use crate::summary::{Figure, Summary, Target};
use baton_kernels::cpu::{CpuConfig, CpuKernels};
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline::{self, MatrixInstruction};
use baton_kernels::storage::StorageFormat;
use baton_tests::promised;
use baton_types::Dtype;
use std::time::{Duration, Instant};

const ROUNDS: usize = 5;

/// A product is repeated for so long in each round.
const ROUND: Duration = Duration::from_millis(400);

/// Bytes of weights that are walked in turn, more than a cache holds.
const WALKED_BYTES: usize = 96 << 20;

/// A class, and the weights that it is measured with: as kept in memory, and their bits.
struct Subject {
    numerics: Numerics,
    format: StorageFormat,
    weight_bits: usize,
}

const SUBJECTS: [Subject; 4] = [
    Subject { numerics: Numerics::F32Fma { weights: Dtype::Bf16 }, format: StorageFormat::F32, weight_bits: 16 },
    Subject { numerics: Numerics::Bf16x32, format: StorageFormat::F32, weight_bits: 16 },
    Subject { numerics: Numerics::Bf16x32, format: StorageFormat::Q4_1, weight_bits: 5 },
    Subject { numerics: Numerics::I8x32, format: StorageFormat::Q4_1, weight_bits: 5 },
];

/// `[m, k] x [n, k]`
#[derive(Clone, Copy)]
struct Shape {
    m: usize,
    n: usize,
    k: usize,
}

const SHAPES: [Shape; 4] = [
    Shape { m: 2048, n: 2048, k: 2048 },
    Shape { m: 512, n: 1536, k: 576 },
    Shape { m: 32, n: 1536, k: 576 },
    Shape { m: 8, n: 1536, k: 576 },
];

impl Subject {
    fn measure(&self, shape: Shape, summary: &mut Summary) -> anyhow::Result<()> {
        let Shape { m, n, k } = shape;
        let kernels = CpuKernels::new(CpuConfig { threads: THREADS, numerics: self.numerics, ..CpuConfig::default() })?;
        let (input, bytes) = (data(m * k, 2), n * k * self.weight_bits / 8);
        check(&kernels, self.numerics, self.format, n, k, &input)?;
        let mut gemm = Gemm::new(&kernels, self.format, (n, k), &input, WALKED_BYTES.div_ceil(bytes))?;
        let operations = (2 * m * n * k) as f64;
        let (mut rates, mut roofs) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            let peak = roofline::matrix_peak(self.numerics, THREADS);
            let read = roofline::read_bandwidth_of(WALKED_BYTES, THREADS);
            roofs.push(peak.min(read * operations / bytes as f64));
            let (begin, mut count) = (Instant::now(), 0);
            while begin.elapsed() < ROUND {
                gemm.run(&kernels);
                count += 1;
            }
            rates.push(f64::from(count) * operations / begin.elapsed().as_secs_f64() / 1e9);
        }
        let (ratio, roof) = (paired_ratio_at_least(&rates, &roofs), median(roofs));
        let instruction = MatrixInstruction::of(self.numerics);
        let of = format!(
            "the lower of the peak of {} and bandwidth, {roof:.0} GFLOP/s; lower end of the 90% interval of {ROUNDS} pairs",
            instruction.name()
        );
        let target = promised::product(self.numerics, self.format, m, instruction).map(Target::AtLeast);
        let weights = if self.format == StorageFormat::F32 { "" } else { "_q4_1" };
        let name = format!("{}{weights}_gemm_{m}x{n}x{k}", self.numerics);
        summary.add(&name, Figure::ratio(median(rates), "GFLOP/s", ratio, of), target);
        Ok(())
    }
}

pub(crate) fn measure(summary: &mut Summary) -> anyhow::Result<()> {
    eprintln!("matrix products on {THREADS} threads");
    for shape in SHAPES {
        SUBJECTS.iter().try_for_each(|subject| subject.measure(shape, summary))?;
    }
    Ok(())
}
