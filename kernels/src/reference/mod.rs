//! The scalar backend: the orders of `f32fma` in the [crate] docs, and those of the other classes in `docs/numerics.md`. They are
//! implemented literally, without `unsafe` and without optimization.

pub(crate) mod adapter;
pub(crate) mod attention;
pub(crate) mod attention_splits;
pub(crate) mod delta;
pub(crate) mod elementwise;
pub(crate) mod linear;
pub(crate) mod quantized;

use crate::device::{DeviceError, Role, RopeTable, StoredRows};
use crate::host::{
    Changes, DeltaHeads, DeltaOf, DeltaRows, HostDevice, HostKernels, KvStep, RotatedHeads, Scores, Store,
};
use crate::numerics::{ATTENTION_SLAB, Half, K_SLAB, Numerics, QUANTIZED_BLOCK, flushed, gated, round};
use crate::program::Activation;
use baton_types::{Dtype, WeightFormat};
use quantized::{Activations, Block};
use std::sync::Arc;

/// A row-major weight.
#[derive(Clone, Debug)]
pub struct Rows {
    pub(crate) n: usize,
    pub(crate) k: usize,
    /// Rounded to the format of the weights, or expanded.
    pub(crate) data: Vec<f32>,
    /// The same in 16 bits, where products are computed so.
    half: Vec<u16>,
    /// `[n, k / 32]` in class `i8x32`, if the file stores integers.
    quantized: Vec<Block>,
}

/// Rows as they enter a product.
#[derive(Clone, Debug, Default)]
pub struct Input {
    pub(crate) data: Vec<f32>,
    half: Vec<u16>,
    quantized: Vec<Activations>,
}

/// Scalar loops in the canonical reduction order.
#[derive(Clone, Copy, Debug, Default)]
pub struct ReferenceKernels {
    numerics: Numerics,
}

impl ReferenceKernels {
    /// Kernels of this arithmetic.
    pub fn new(numerics: Numerics) -> Self {
        Self { numerics }
    }

    fn rows(&self, k: usize, stored: &StoredRows<'_>) -> Rows {
        let n = stored.rows;
        let mut data = vec![0.0; n * k];
        data.chunks_exact_mut(k).enumerate().for_each(|(row, out)| stored.read(row, out));
        if self.numerics == Numerics::I8x32 && stored.format.is_quantized() {
            let quantized = quantized::blocks(stored.format, stored.bytes);
            return Rows { n, k, data, half: Vec::new(), quantized };
        }
        let dtype = if let WeightFormat::Elements(dtype) = self.numerics.weights() { dtype } else { Dtype::Bf16 };
        data.iter_mut().for_each(|x| *x = round::through(dtype, *x));
        let half = if self.is_f32() { Vec::new() } else { self.halves(&data) };
        Rows { n, k, data, half, quantized: Vec::new() }
    }

    /// Rounds to the operands of products.
    fn halves(&self, data: &[f32]) -> Vec<u16> {
        let half = if let Numerics::TensorCore { half, .. } = self.numerics { half } else { Half::Bf16 };
        data.iter().map(|x| half.from_f32(*x)).collect()
    }

    /// Products, each row of which is added up in slabs of `slab` of its products, slab after slab. `None` is the class's own: [`K_SLAB`] in
    /// `f32fma`, and all of K in the others.
    pub(crate) fn linear_in_slabs(
        &self,
        x: &Input,
        w: &[Rows],
        partitions: usize,
        slab: Option<usize>,
        store: Store,
        outs: &mut [&mut [f32]],
    ) {
        for (w, out) in w.iter().zip(outs) {
            let slab = slab.unwrap_or(if self.is_f32() { K_SLAB } else { w.k });
            if !w.quantized.is_empty() {
                let (blocks, slab) = (w.k.div_ceil(QUANTIZED_BLOCK), slab.div_ceil(QUANTIZED_BLOCK));
                let dot = |x: &[Activations], w: &[Block]| linear::in_slabs(x, w, slab, quantized::dot);
                linear::linear(&x.quantized, &w.quantized, blocks, w.n, store, out, dot);
                continue;
            }
            match self.numerics {
                Numerics::F32Fma { .. } => {
                    let dot = |x: &[f32], w: &[f32]| linear::dot(x, w, partitions, slab);
                    linear::linear(&x.data, &w.data, w.k, w.n, store, out, dot);
                }
                Numerics::Bf16x32 | Numerics::I8x32 => {
                    let dot = |x: &[u16], w: &[u16]| linear::in_slabs(x, w, slab, flushed::dot);
                    linear::linear(&x.half, &w.half, w.k, w.n, store, out, dot);
                }
                Numerics::TensorCore { cores, half } => {
                    let dot = |x: &[u16], w: &[u16]| linear::in_slabs(x, w, slab, |x, w| cores.dot(half, 0.0, x, w));
                    linear::linear(&x.half, &w.half, w.k, w.n, store, out, dot);
                }
            }
        }
    }

    fn is_f32(&self) -> bool {
        matches!(self.numerics, Numerics::F32Fma { .. })
    }
}

/// The reference that other backends must equal.
pub type ReferenceDevice = HostDevice<ReferenceKernels>;

impl ReferenceDevice {
    /// A new, empty device.
    #[allow(clippy::new_ret_no_self)] // Devices are shared by nature.
    pub fn new(numerics: Numerics) -> Arc<Self> {
        Arc::new(Self::with_kernels(ReferenceKernels::new(numerics)))
    }
}

impl HostKernels for ReferenceKernels {
    type Matrix = Vec<Rows>;
    type Input = Input;

    fn name(&self) -> String {
        "cpu reference (scalar)".into()
    }

    fn numerics(&self) -> Numerics {
        self.numerics
    }

    fn pack(&self, _: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Vec<Rows>, DeviceError> {
        Ok(parts.iter().map(|stored| self.rows(k, stored)).collect())
    }

    fn row(&self, matrix: &Vec<Rows>, row: usize, out: &mut [f32]) {
        let Rows { k, data, .. } = &matrix[0];
        out.copy_from_slice(&data[row * k..(row + 1) * k]);
    }

    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]) {
        elementwise::rms_norm(self.numerics, x, gain, eps, out);
    }

    fn input(&self, x: &[f32], rows: usize, w: &Vec<Rows>, input: &mut Input) {
        let k = w[0].k;
        let data = x[..rows * k].to_vec();
        let blocks = data.chunks_exact(k).flat_map(|row| row.chunks(QUANTIZED_BLOCK));
        let quantized = blocks.map(Activations::new).collect();
        *input = Input { half: self.halves(&data), quantized, data };
    }

    fn linear(&self, x: &Input, w: &Vec<Rows>, first: usize, partitions: usize, store: Store, outs: &mut [&mut [f32]]) {
        self.linear_in_slabs(x, &w[first..], partitions, None, store, outs);
    }

    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]) {
        elementwise::rope_rows(step, rope, heads, x);
    }

    fn store(&self, step: KvStep<'_>, plane: usize, x: &[f32]) {
        attention::store(step, plane, x);
    }

    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]) {
        match self.numerics {
            Numerics::F32Fma { .. } => {
                attention::attend(step, q, scores, out, |_, t| t.is_multiple_of(ATTENTION_SLAB));
            }
            class => attention_splits::attend(class, step, q, scores, out),
        }
    }

    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
        for (rows, change) in changes.iter() {
            let (k, n) = (change.k, change.n);
            adapter::adapt(&x[rows.start * k..rows.end * k], change, &mut y[rows.start * n..rows.end * n]);
        }
    }

    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]) {
        elementwise::activate(activation, gate, up);
    }

    fn gate(&self, gate: &[f32], x: &mut [f32]) {
        x.iter_mut().zip(gate).for_each(|(x, gate)| *x = gated(*x, *gate));
    }

    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]) {
        delta::convolve(step, taps, x);
    }

    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
        delta::decays(op, decay, beta);
    }

    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]) {
        delta::delta_rule(step, heads, rows, out);
    }
}
