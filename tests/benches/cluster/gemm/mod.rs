//! Matrix products alone, against the peak of the processor's instructions.

mod prefill;
mod shapes;

use anyhow::ensure;
use baton_kernels::cpu::CpuKernels;
use baton_kernels::device::{Role, StoredRows};
use baton_kernels::host::{HostKernels, Store};
use baton_kernels::numerics::Numerics;
use baton_kernels::reference::ReferenceKernels;
use baton_kernels::storage::StorageFormat;

pub(crate) use prefill::measure as measure_prefill;
pub(crate) use shapes::measure as measure_shapes;

/// Products `[rows, k] x [n, k]`, packed: of the same rows into the same memory, as in the steps of a model, with several weights in turn.
struct Gemm<K: HostKernels> {
    weights: Vec<K::Matrix>,
    at: usize,
    x: K::Input,
    out: Vec<f32>,
}

impl<K: HostKernels> Gemm<K> {
    /// Of the rows of `input`, with `copies` of weights in `format`.
    fn new(
        kernels: &K,
        format: StorageFormat,
        (n, k): (usize, usize),
        input: &[f32],
        copies: usize,
    ) -> anyhow::Result<Self> {
        let bytes = weights(format, n, k);
        let stored = StoredRows { rows: n, format, bytes: &bytes };
        let weights = (0..copies).map(|_| kernels.pack(Role::Out, k, &[stored])).collect::<Result<Vec<_>, _>>()?;
        let (rows, mut x) = (input.len() / k, K::Input::default());
        kernels.input(input, rows, &weights[0], &mut x);
        Ok(Self { weights, at: 0, x, out: vec![0.0; rows * n] })
    }

    /// With the next weights.
    fn run(&mut self, kernels: &K) {
        kernels.linear(&self.x, &self.weights[self.at], 0, 1, Store::Set, &mut [&mut self.out]);
        self.at = (self.at + 1) % self.weights.len();
    }
}

/// Any fixed value without structure.
fn mix(i: u32) -> u32 {
    i.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77)
}

/// Such values in -1 .. 1.
fn data(len: usize, salt: u32) -> Vec<f32> {
    (0..len as u32).map(|i| (mix(i.wrapping_add(salt)) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
}

/// Weights `[n, k]` as a file stores them, in F32 or Q4_1.
fn weights(format: StorageFormat, n: usize, k: usize) -> Vec<u8> {
    if format == StorageFormat::F32 {
        return data(n * k, 1).into_iter().flat_map(f32::to_le_bytes).collect();
    }
    let (elements, bytes) = format.block();
    let mut out: Vec<u8> = (0..(n * k / elements * bytes) as u32).map(|i| (mix(i) >> 11) as u8).collect();
    // Scale and minimum of each block, in f16.
    out.chunks_exact_mut(bytes).for_each(|block| block[..4].copy_from_slice(&[0x00, 0x18, 0x00, 0x98]));
    out
}

/// The last row, which the tile of a ragged end computes, must have the bits of the reference.
fn check(
    kernels: &CpuKernels,
    numerics: Numerics,
    format: StorageFormat,
    n: usize,
    k: usize,
    input: &[f32],
) -> anyhow::Result<()> {
    let mut got = Gemm::new(kernels, format, (n, k), input, 1)?;
    got.run(kernels);
    let slow = ReferenceKernels::new(numerics);
    let mut want = Gemm::new(&slow, format, (n, k), &input[input.len() - k..], 1)?;
    want.run(&slow);
    let is_same = got.out[got.out.len() - n..] == want.out;
    ensure!(is_same, "{numerics}: the GEMM {n} x {k} differs from the reference: not timed");
    Ok(())
}
