//! Backends with deliberate defects: each breaks one guarantee of the canonical numerics, so that tests can prove that they would detect
//! it. Compiled only with the feature `testing`, which no shipped binary enables.

use crate::device::{Device, DeviceError, Role, RopeTable, StoredRows};
use crate::host::{
    Changes, DeltaHeads, DeltaOf, DeltaRows, HostDevice, HostKernels, KvStep, RotatedHeads, Scores, Store,
};
use crate::numerics::{ATTENTION_BLOCK, ATTENTION_SLAB, K_SLAB, KERNEL_REVISION, Numerics};
use crate::program::Activation;
use crate::reference::attention_splits::Cut;
use crate::reference::{Input, ReferenceKernels, Rows, attention, attention_splits, linear};
use crate::step::StepSegment;
use std::sync::Arc;

/// `cargo xtask hazards` searches binaries for this text.
#[used]
static MARKER: &str = "BATON_TESTING_HAZARD kernels";

/// What a mutant's reduction order wrongly depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MutantKind {
    /// GEMM slabs are shorter when there are several rows. Classes without slabs get some.
    RowCount,
    /// Attention slabs, or blocks, start at the segment's first position.
    ChunkStart,
    /// Splits of attention count from the block of the segment's first position; the first split has all tokens before too. Only contexts
    /// of more than one split show it, and `f32fma` has no splits.
    SplitStart,
    /// K is divided into as many slabs as there are threads.
    ThreadCount {
        /// Number of threads to assume.
        threads: usize,
    },
    /// A correct result in another order: GEMM slabs are half as long everywhere, as a later revision might define them. In every class the
    /// products are those of `f32fma`, so that tokens soon differ too.
    OtherRevision {
        /// The revision that it reports.
        says: u32,
    },
}

/// The reference with one seeded defect.
#[derive(Clone, Copy, Debug)]
pub struct Mutant {
    kind: MutantKind,
    reference: ReferenceKernels,
}

impl Mutant {
    /// Kernels with this defect.
    pub fn kernels(kind: MutantKind, numerics: Numerics) -> Self {
        Self { kind, reference: ReferenceKernels::new(numerics) }
    }

    /// A device with this defect.
    #[allow(clippy::new_ret_no_self)] // A mutant is only ever seen as a device.
    pub fn new(kind: MutantKind, numerics: Numerics) -> Arc<dyn Device> {
        Arc::new(HostDevice::with_kernels(Self::kernels(kind, numerics)))
    }
}

impl HostKernels for Mutant {
    type Matrix = Vec<Rows>;
    type Input = Input;

    fn name(&self) -> String {
        format!("mutant {:?}", self.kind)
    }

    fn revision(&self) -> u32 {
        if let MutantKind::OtherRevision { says } = self.kind { says } else { KERNEL_REVISION }
    }

    fn numerics(&self) -> Numerics {
        self.reference.numerics()
    }

    fn pack(&self, role: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Vec<Rows>, DeviceError> {
        self.reference.pack(role, k, parts)
    }

    fn row(&self, matrix: &Vec<Rows>, row: usize, out: &mut [f32]) {
        self.reference.row(matrix, row, out);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        self.reference.rms_norm(x, gain, eps, out);
    }

    fn input(&self, x: &[f32], rows: usize, w: &Vec<Rows>, input: &mut Input) {
        self.reference.input(x, rows, w, input);
    }

    fn linear(&self, x: &Input, w: &Vec<Rows>, first: usize, partitions: usize, store: Store, outs: &mut [&mut [f32]]) {
        let (k, half) = (w[0].k, K_SLAB / 2);
        let slab = match self.kind {
            MutantKind::RowCount if x.data.len() > k => Some(half),
            MutantKind::ThreadCount { threads } => Some(k.div_ceil(threads.max(1))),
            MutantKind::OtherRevision { .. } => {
                for (w, out) in w[first..].iter().zip(outs) {
                    linear::linear(&x.data, &w.data, k, w.n, store, out, |x, w| linear::dot(x, w, partitions, half));
                }
                return;
            }
            MutantKind::RowCount | MutantKind::ChunkStart | MutantKind::SplitStart => None,
        };
        self.reference.linear_in_slabs(x, &w[first..], partitions, slab, store, outs);
    }

    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
        self.reference.rotate(step, rope, heads, x);
    }

    fn store(&self, step: KvStep<'_>, plane: usize, x: &[f32]) {
        self.reference.store(step, plane, x);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        let class = self.numerics();
        let f32fma = matches!(class, Numerics::F32Fma { .. });
        match self.kind {
            MutantKind::ChunkStart if f32fma => {
                let starts = |segment: &StepSegment, t| t % ATTENTION_SLAB == segment.position % ATTENTION_SLAB;
                attention::attend(step, q, scores, out, starts);
            }
            MutantKind::ChunkStart => {
                let lead =
                    |segment: &StepSegment| segment.position.next_multiple_of(ATTENTION_BLOCK) - segment.position;
                attention_splits::attend_cut(class, step, q, scores, out, |segment| Cut {
                    lead: lead(segment),
                    before: 0,
                });
            }
            MutantKind::SplitStart if !f32fma => {
                let before = |segment: &StepSegment| segment.position - segment.position % ATTENTION_BLOCK;
                attention_splits::attend_cut(class, step, q, scores, out, |segment| Cut {
                    lead: 0,
                    before: before(segment),
                });
            }
            _ => self.reference.attend(step, q, scores, out),
        }
    }

    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
        self.reference.adapt(x, changes, y);
    }

    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        self.reference.activate(activation, gate, up);
    }

    fn gate(&self, gate: &[f32], x: &mut [f32]) {
        self.reference.gate(gate, x);
    }

    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
        self.reference.convolve(step, taps, x);
    }

    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
        self.reference.decays(op, decay, beta);
    }

    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
        self.reference.delta_rule(step, heads, rows, out);
    }
}
