//! What this machine can do at most, measured in turns with the works that are compared with it.

use crate::THREADS;
use crate::statistics::best;
use crate::summary::{Figure, Summary};
use baton_kernels::numerics::Numerics;
use baton_kernels::roofline::{self, MatrixInstruction};
use baton_tests::work::Work;

/// Peaks of instructions that a class may not use here.
#[derive(Default)]
pub(super) struct Peaks {
    fma: Vec<f64>,
    vdpbf16ps: Vec<f64>,
    amx_int8: Vec<f64>,
}

impl Peaks {
    pub(super) fn round(&mut self) {
        self.fma.push(roofline::fma_peak(THREADS));
        self.vdpbf16ps.extend(roofline::vdpbf16ps_peak(THREADS));
        self.amx_int8.extend(roofline::amx_int8_peak(THREADS));
    }

    /// Those of instructions that this processor has.
    pub(super) fn add(&self, summary: &mut Summary) {
        let peaks = [
            ("roof_fma", &self.fma, "GFLOP/s"),
            ("roof_vdpbf16ps", &self.vdpbf16ps, "GFLOP/s"),
            ("roof_amx_int8", &self.amx_int8, "GOP/s"),
        ];
        for (name, peaks, unit) in peaks.into_iter().filter(|(_, peaks, _)| !peaks.is_empty()) {
            summary.add(name, Figure::plain(best(peaks.clone()), unit), None);
        }
    }
}

/// Of operations per second: those of `i8x32` are on integers.
pub(super) fn unit(numerics: Numerics) -> &'static str {
    if numerics == Numerics::I8x32 { "GOP/s" } else { "GFLOP/s" }
}

/// What a class can reach here.
pub(super) struct Roofs {
    numerics: Numerics,
    /// What a decode step reads of weights.
    weight_bytes: usize,
    /// Of the instructions of the class.
    peaks: Vec<f64>,
    /// Of reading as much as the weights.
    reads: Vec<f64>,
}

impl Roofs {
    pub(super) fn new(numerics: Numerics, weight_bytes: usize) -> Self {
        Self { numerics, weight_bytes, peaks: Vec::new(), reads: Vec::new() }
    }

    pub(super) fn weight_bytes(&self) -> usize {
        self.weight_bytes
    }

    fn peak(&mut self) -> f64 {
        let peak = roofline::matrix_peak(self.numerics, THREADS);
        self.peaks.push(peak);
        peak
    }

    fn read(&mut self) -> f64 {
        let read = roofline::read_bandwidth_of(self.weight_bytes, THREADS);
        self.reads.push(read);
        read
    }

    /// Measures both.
    pub(super) fn round(&mut self) {
        self.peak();
        self.read();
    }

    /// The one that a work is compared with: prefill with the peak, decode of one sequence with the bandwidth.
    pub(super) fn of(&mut self, work: Work) -> Option<f64> {
        match work {
            Work::Prefill(_) => Some(self.peak()),
            Work::Decode(1, _) => Some(self.read()),
            Work::Decode(..) => None,
        }
    }

    /// The best rounds of what was measured, of a class with this name.
    pub(super) fn add(&self, name: &str, summary: &mut Summary) {
        if !self.peaks.is_empty() {
            let of = format!("peak of {}", MatrixInstruction::of(self.numerics).name());
            let peak = Figure { of: Some(of), ..Figure::plain(best(self.peaks.clone()), unit(self.numerics)) };
            summary.add(&format!("roof_{name}"), peak, None);
        }
        if !self.reads.is_empty() {
            let of = format!("reading {:.0} MB on huge pages", self.weight_bytes as f64 / 1e6);
            let read = Figure { of: Some(of), ..Figure::plain(best(self.reads.clone()), "GB/s") };
            summary.add(&format!("roof_read_{name}"), read, None);
        }
    }
}
