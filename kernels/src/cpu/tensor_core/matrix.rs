//! Packed weights, and their products.

use super::Arithmetic;
use super::operand::Operand;
use super::products::Products;
use super::step::LANES;
use crate::cpu::Shared;
use crate::cpu::buffer::{Buffer, Words};
use crate::cpu::fused::{Columns, share};
use crate::cpu::target::Target;
use crate::cpu::threads::{TASKS_PER_THREAD, Threads};
use crate::device::{DeviceError, PartShape, StoredRows};
use crate::host::Store;
use crate::numerics::Half;

/// Rows that pass over a group of weights together: it is decoded once for all of them, and their sums stay in L1.
const ROWS: usize = 64;

/// Stacked weights `[n, k]`, each as panels of [`LANES`] features: `[panel][k][LANES]`, k padded to whole groups. What is padded is zero.
#[derive(Debug)]
pub struct Matrix {
    half: Half,
    k: usize,
    /// `k` padded.
    depth: usize,
    parts: Vec<Part>,
}

#[derive(Debug)]
struct Part {
    n: usize,
    panels: Buffer,
}

// SAFETY: integers, one behind another; any bits are a value.
unsafe impl Words for [u16; LANES] {}

impl Part {
    fn words(&self) -> &[[u16; LANES]] {
        self.panels.steps()
    }
}

impl Matrix {
    /// Name of the packed layout.
    pub(super) fn packing(half: Half) -> String {
        format!("tensor core, {half:?}, panels of {LANES}, 1")
    }

    /// A matrix of zeros.
    pub(super) fn zeroed(arithmetic: Arithmetic, k: usize, parts: &[PartShape]) -> Result<Self, DeviceError> {
        let depth = k.next_multiple_of(arithmetic.cores.group());
        let part = |part: &PartShape| {
            let bytes = part.rows.div_ceil(LANES) * depth * size_of::<[u16; LANES]>();
            Ok(Part { n: part.rows, panels: Buffer::for_weights(bytes / size_of::<u32>())? })
        };
        let parts = parts.iter().map(part).collect::<Result<_, DeviceError>>()?;
        Ok(Self { half: arithmetic.half, k, depth, parts })
    }

    /// Rounds and packs.
    pub(super) fn pack(arithmetic: Arithmetic, k: usize, stored: &[StoredRows<'_>]) -> Result<Self, DeviceError> {
        let shapes: Vec<_> = stored.iter().map(|s| PartShape { rows: s.rows, format: s.format }).collect();
        let mut matrix = Self::zeroed(arithmetic, k, &shapes)?;
        let Self { half, depth, parts, .. } = &mut matrix;
        let mut wide = vec![0.0; k];
        for (part, stored) in parts.iter_mut().zip(stored) {
            for (index, panel) in part.panels.steps_mut::<[u16; LANES]>().chunks_exact_mut(*depth).enumerate() {
                for (lane, row) in (index * LANES..part.n).take(LANES).enumerate() {
                    stored.read(row, &mut wide);
                    panel.iter_mut().zip(&wide).for_each(|(to, x)| to[lane] = half.from_f32(*x));
                }
            }
        }
        Ok(matrix)
    }

    /// The packed form as bytes, in order.
    pub(super) fn bytes(&self) -> Vec<&[u8]> {
        self.parts.iter().map(|part| part.panels.bytes()).collect()
    }

    /// As [`Matrix::bytes`], to be written.
    pub(super) fn bytes_mut(&mut self) -> Vec<&mut [u8]> {
        self.parts.iter_mut().map(|part| part.panels.bytes_mut()).collect()
    }

    /// Elements of a row.
    pub(super) fn k(&self) -> usize {
        self.k
    }

    /// Widens a row of the first part.
    pub(super) fn row(&self, row: usize, out: &mut [f32]) {
        let panel = &self.parts[0].words()[row / LANES * self.depth..][..self.k];
        out.iter_mut().zip(panel).for_each(|(out, lanes)| *out = self.half.to_f32(lanes[row % LANES]));
    }
}

/// `out = x * w^T` for each part.
pub(super) fn linear(
    threads: &Threads,
    arithmetic: Arithmetic,
    x: &Operand,
    w: &Matrix,
    first_part: usize,
    store: Store,
    outs: &mut [&mut [f32]],
) {
    let parts = &w.parts[first_part..first_part + outs.len()];
    let heights: Vec<usize> = parts.iter().map(|part| part.n).collect();
    assert!(outs.iter().zip(&heights).all(|(out, n)| out.len() == x.rows * n));
    assert_eq!(x.bits.len(), x.rows * w.depth);
    let outs: Vec<_> = outs.iter_mut().map(|out| Shared(out.as_mut_ptr())).collect();
    let columns = Columns { parts: &heights, unit: LANES };
    let tasks = (threads.count() * TASKS_PER_THREAD).min(columns.units());
    threads.run(tasks, &|task| {
        columns.each(share(columns.units(), task, tasks), usize::MAX, |part, features| {
            let Part { n, .. } = parts[part];
            // SAFETY: the output is `[rows, n]`, and no two tasks have the same features of a part.
            let target = unsafe { Target::new(outs[part].get().add(features.start), n, features.clone(), store) };
            for feature in features.step_by(LANES) {
                let panel = &parts[part].words()[feature / LANES * w.depth..][..w.depth];
                for first in (0..x.rows).step_by(ROWS) {
                    let mut sums = [[0.0; LANES]; ROWS];
                    let sums = &mut sums[..(x.rows - first).min(ROWS)];
                    arithmetic.width.run(Products { arithmetic, x, first, panel, live: None, sums });
                    for (row, sums) in sums.iter().enumerate() {
                        target.put(first + row, feature, sums);
                    }
                }
            }
        });
    });
}
