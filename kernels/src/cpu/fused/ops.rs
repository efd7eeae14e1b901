//! The operations, and how each finishes its products.

use super::{Columns, Fused, Piece};
#[cfg(target_arch = "x86_64")]
use crate::cpu::SimdLevel;
use crate::cpu::elementwise::{ActivateGate, RmsNorm, Rotate, Rows};
use crate::cpu::matrix::Matrix;
use crate::cpu::pool_memory::StoreColumns;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::avx512;
use crate::cpu::simd::{Kernel, Simd};
use crate::cpu::target::Target;
use crate::cpu::{CpuKernels, Shared};
use crate::device::RopeTable;
use crate::host::{GateUpOf, KvStep, NormOf, ProjectOf, QkvOf, RotatedHeads, Store, parts};
use crate::program::Activation;
use baton_types::TokenId;
use std::ops::Range;

/// Columns that tasks take together where nothing else demands more: whole panels of every class.
const UNIT: usize = 32;

/// The part of attention's projections that is a gate: behind query, key and value.
const GATE: usize = 3;

/// Most parts of a matrix whose products are not finished: those of a gated delta rule.
const PARTS_MAX: usize = 6;

/// Rows of one task of `Embed`.
const EMBED_ROWS: usize = 4;

pub(in crate::cpu) fn embed(kernels: &CpuKernels, table: &Matrix, factor: f32, ids: &[TokenId], residual: &mut [f32]) {
    let k = table.k();
    assert_eq!(residual.len(), ids.len() * k);
    let out = Shared(residual.as_mut_ptr());
    kernels.threads.run(ids.len().div_ceil(EMBED_ROWS), &|task| {
        let ids = ids.iter().enumerate().skip(task * EMBED_ROWS).take(EMBED_ROWS);
        for (row, id) in ids {
            // SAFETY: a row of the residual stream, of one task.
            let out = unsafe { std::slice::from_raw_parts_mut(out.get().add(row * k), k) };
            table.row(*id as usize, out);
            parts::scale(out, factor);
        }
    });
}

pub(in crate::cpu) fn project(kernels: &CpuKernels, w: &Matrix, op: &ProjectOf<'_>, x: &[f32], residual: &mut [f32]) {
    let fused = Fused { kernels, w, x: &x[..op.rows * w.k()], norm: None };
    fused.whole(op.partitions, Store::Add, residual);
}

pub(in crate::cpu) fn head(kernels: &CpuKernels, w: &Matrix, norm: NormOf<'_>, residual: &[f32], logits: &mut [f32]) {
    let fused = Fused { kernels, w, x: residual, norm: Some(norm) };
    fused.whole(1, Store::Set, logits);
}

pub(in crate::cpu) fn normed_linear(
    kernels: &CpuKernels,
    w: &Matrix,
    norm: Option<NormOf<'_>>,
    x: &[f32],
    outs: &mut [&mut [f32]],
) {
    // Arrays, since a step allocates nothing.
    let (mut heights, mut to) = ([0; PARTS_MAX], [Shared(std::ptr::null_mut()); PARTS_MAX]);
    let heights = &mut heights[..outs.len()];
    for (part, out) in outs.iter_mut().enumerate() {
        (heights[part], to[part]) = (w.height(part), Shared(out.as_mut_ptr()));
        assert_eq!(out.len() * w.k(), x.len() * heights[part]);
    }
    let (heights, outs) = (&*heights, to);
    Fused { kernels, w, x, norm }.run(Columns { parts: heights, unit: UNIT }, false, &|piece| {
        // SAFETY: rows and columns of a part's output, of one piece.
        let target = unsafe { piece.target_in(outs[piece.part], heights[piece.part], Store::Set) };
        w.product(kernels, piece.input, piece.part, 1, target);
    });
}

impl Fused<'_> {
    /// Products with the only part of the matrix, which nothing follows.
    fn whole(&self, partitions: usize, store: Store, out: &mut [f32]) {
        let (kernels, w, n) = (self.kernels, self.w, self.w.height(0));
        assert_eq!(out.len() * w.k(), self.x.len() * n);
        let out = Shared(out.as_mut_ptr());
        self.run(Columns { parts: &[n], unit: UNIT }, false, &|piece| {
            // SAFETY: rows and columns of the output, of one piece.
            let target = unsafe { piece.target_in(out, n, store) };
            w.product(kernels, piece.input, 0, partitions, target);
        });
    }
}

impl Piece<'_> {
    /// Its rows and columns of an output of `n` columns.
    ///
    /// # Safety
    /// The output has them, and no other piece has the same.
    unsafe fn target_in(&self, out: Shared<f32>, n: usize, store: Store) -> Target {
        // SAFETY: the caller's promise.
        unsafe { Target::new(out.get().add(self.rows.start * n + self.columns.start), n, self.columns.clone(), store) }
    }

    /// Its rows and columns in memory of the thread.
    fn target_in_tile(&mut self) -> Target {
        let [target] = self.targets_in_tile();
        target
    }

    /// Several of them, one behind another.
    fn targets_in_tile<const N: usize>(&mut self) -> [Target; N] {
        let each = self.rows.len() * self.columns.len();
        let to = self.tile.room::<f32>(N * each);
        // SAFETY: room for as many; the memory is of this thread, and nothing else uses it during the piece.
        std::array::from_fn(|i| unsafe {
            Target::new(to.add(i * each), self.columns.len(), self.columns.clone(), Store::Set)
        })
    }
}

pub(in crate::cpu) fn qkv(
    kernels: &CpuKernels,
    w: &Matrix,
    op: &QkvOf<'_>,
    step: KvStep<'_>,
    residual: &[f32],
    query: &mut [f32],
    gate: &mut [f32],
) {
    let dim = step.kv.dim();
    let parts = [op.query, op.kv, op.kv, op.query];
    let parts = if op.gate { &parts[..] } else { &parts[..3] };
    assert!(query.len() == step.rows() * op.query && (!op.gate || gate.len() == query.len()));
    let (query, gate) = (Shared(query.as_mut_ptr()), Shared(gate.as_mut_ptr()));
    // Whole heads.
    let columns = Columns { parts, unit: dim * (UNIT / gcd(dim, UNIT)) };
    let fused = Fused { kernels, w, x: residual, norm: op.norm };
    fused.run(columns, true, &|mut piece| {
        let target = match piece.part {
            // SAFETY: rows and columns of the query, of one piece.
            0 => unsafe { piece.target_in(query, op.query, Store::Set) },
            // SAFETY: as many of the gate.
            GATE => unsafe { piece.target_in(gate, op.query, Store::Set) },
            _ => piece.target_in_tile(),
        };
        w.product(kernels, piece.input, piece.part, 1, target);
        let first = [0, op.query, op.query + op.kv, op.query + 2 * op.kv][piece.part];
        let of_part = first + piece.columns.start..first + piece.columns.end;
        kernels.level.run(Heads {
            step,
            target,
            rows: piece.rows,
            columns: piece.columns,
            bias: op.bias.map(|bias| &bias[of_part]),
            norm: op.norms.and_then(|norms| norms.get(piece.part).copied()),
            rope: (piece.part < 2).then_some(op.rope),
            plane: piece.part.checked_sub(1).filter(|plane| *plane < 2),
        });
    });
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

/// Finishes heads of query, key, value or gate.
struct Heads<'a> {
    step: KvStep<'a>,
    /// The products.
    target: Target,
    rows: Range<usize>,
    columns: Range<usize>,
    bias: Option<&'a [f32]>,
    norm: Option<NormOf<'a>>,
    rope: Option<&'a RopeTable>,
    /// Where they are stored, if the products are dense and neither the query's nor the gate's.
    plane: Option<usize>,
}

impl Kernel for Heads<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Self { step, target, rows, columns, bias, norm, rope, plane } = self;
        let dim = step.kv.dim();
        if bias.is_some() || norm.is_some() || rope.is_some() {
            for (row, position) in step.positions_of(rows.clone()).enumerate() {
                // SAFETY: a row of the piece's target.
                let x = unsafe { std::slice::from_raw_parts_mut(target.at(row, columns.start), columns.len()) };
                if let Some(bias) = bias {
                    x.iter_mut().zip(bias).for_each(|(x, b)| *x += b);
                }
                if let Some(norm) = norm {
                    RmsNorm { rows: Rows::InPlace(x), norm }.call(s);
                }
                if let Some(rope) = rope {
                    Rotate::new(x, RotatedHeads { dim, first: 0 }, rope, position).call(s);
                }
            }
        }
        if let Some(plane) = plane {
            // SAFETY: the piece's tile, `[rows, columns]`.
            let data = unsafe {
                std::slice::from_raw_parts(target.at(0, columns.start).cast_const(), rows.len() * columns.len())
            };
            StoreColumns { step, plane, rows, first: columns.start, data }.call(s);
        }
    }
}

pub(in crate::cpu) fn gate_up(
    kernels: &CpuKernels,
    w: &Matrix,
    op: &GateUpOf<'_>,
    residual: &[f32],
    inner: &mut [f32],
) {
    let ffn = w.height(0);
    assert_eq!(inner.len() * w.k(), residual.len() * ffn);
    let inner = Shared(inner.as_mut_ptr());
    let fused = Fused { kernels, w, x: residual, norm: op.norm };
    fused.run(Columns { parts: &[ffn], unit: UNIT }, true, &|mut piece| {
        // SAFETY: rows and columns of the output, of one piece.
        let out = unsafe { piece.target_in(inner, ffn, Store::Set) };
        let [gate, up] = piece.targets_in_tile();
        w.product(kernels, piece.input, 0, 1, gate);
        w.product(kernels, piece.input, 1, 1, up);
        let activate = Activate { activation: op.activation, gate, up, out, rows: piece.rows.len() };
        #[cfg(target_arch = "x86_64")]
        if op.activation == Activation::Silu && kernels.simd >= SimdLevel::Avx512 {
            // SAFETY: kernels exist only for levels that the processor has.
            return unsafe { activate.avx512() };
        }
        kernels.level.run(activate);
    });
}

/// `out = activation(gate) * up` for all rows. Rows of the output lie so far apart that the first-level cache holds few: it is written once.
struct Activate {
    activation: Activation,
    gate: Target,
    up: Target,
    out: Target,
    rows: usize,
}

impl Activate {
    /// Gate, up and output of a row.
    #[inline(always)]
    fn row(&mut self, row: usize) -> (&mut [f32], &[f32], &mut [f32]) {
        let columns = self.gate.features();
        // SAFETY: a row of three targets, which do not overlap.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.gate.at(row, columns.start), columns.len()),
                std::slice::from_raw_parts(self.up.at(row, columns.start).cast_const(), columns.len()),
                std::slice::from_raw_parts_mut(self.out.at(row, columns.start), columns.len()),
            )
        }
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx512f")]
    fn avx512(mut self) {
        for row in 0..self.rows {
            let (gate, up, out) = self.row(row);
            avx512::silu_mul(gate, up, out);
        }
    }
}

impl Kernel for Activate {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(mut self, s: S) {
        for row in 0..self.rows {
            let activation = self.activation;
            let (gate, up, out) = self.row(row);
            ActivateGate { activation, gate, up }.call(s);
            out.copy_from_slice(gate);
        }
    }
}
