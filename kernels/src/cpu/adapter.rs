//! Low-rank changes of linears: vectors along a row, rows and columns divided among threads.
//!
//! First `A x` of all rows, then what `B` makes of it: a region each. So few rows of decode, each perhaps with another adapter, keep all
//! threads busy.

use super::fused::Grid;
use super::lines::Lines;
use super::matrix::Tiles;
use super::simd::{Kernel, LANES, Simd};
use super::{CpuKernels, Shared};
use crate::host::Changes;
use std::cell::RefCell;
use std::ops::Range;

/// Products and sums below which two regions cost more than they save: some microseconds of one thread.
const ALONE: usize = 128 << 10;

/// Columns of the output that tasks take together: two cache lines.
const UNIT: usize = 32;

thread_local! {
    /// `A x` of all rows, in the caller's memory.
    static DOWN: RefCell<Lines> = const { RefCell::new(Lines::new()) };
}

/// Adds the changes to their rows of `y`.
pub(super) fn adapt(kernels: &CpuKernels, x: &[f32], changes: Changes<'_>, y: &mut [f32]) {
    let Some((_, first)) = changes.iter().next() else { return };
    let (k, n, level) = (first.k, first.n, kernels.level);
    let (mut rows, mut rank, mut work) = (0, 0, 0);
    for (of, change) in changes.iter() {
        assert!((change.k, change.n) == (k, n) && of.end * k <= x.len() && of.end * n <= y.len());
        rows += of.len();
        rank = rank.max(change.rank);
        work += of.len() * change.rank * (k + n);
    }
    let threads = if work < ALONE { 1 } else { kernels.threads.count() };
    let run = |tasks: usize, task: &(dyn Fn(usize) + Sync)| match threads {
        1 => (0..tasks).for_each(task),
        _ => kernels.threads.run(tasks, task),
    };
    let grid =
        |units| Grid::new(threads, rows, Tiles { rows_max: 1, row_bytes: k * size_of::<f32>(), rows_min: 1 }, units);
    DOWN.with_borrow_mut(|down| {
        let (down, y) = (Shared(down.room::<f32>(rows * rank)), Shared(y.as_mut_ptr()));
        let of_rank = grid(rank);
        run(of_rank.tasks(), &|task| {
            let (block, units) = (of_rank.rows(of_rank.block(task)), of_rank.units(task));
            for (at, (row, change)) in block.clone().zip(changes.rows().skip(block.start)) {
                let of = units.start.min(change.rank)..units.end.min(change.rank);
                // SAFETY: elements of one row, which no other task has.
                let down = unsafe { std::slice::from_raw_parts_mut(down.get().add(at * rank + of.start), of.len()) };
                level.run(Down { x: &x[row * k..(row + 1) * k], a: &change.a[of.start * k..of.end * k], down });
            }
        });
        let of_columns = grid(n.div_ceil(UNIT));
        run(of_columns.tasks(), &|task| {
            let (block, units) = (of_columns.rows(of_columns.block(task)), of_columns.units(task));
            let columns = units.start * UNIT..(units.end * UNIT).min(n);
            for (at, (row, change)) in block.clone().zip(changes.rows().skip(block.start)) {
                // SAFETY: the first region has written them, and nobody writes them now.
                let down = unsafe { std::slice::from_raw_parts(down.get().add(at * rank).cast_const(), change.rank) };
                // SAFETY: columns of a row of `y`, which no other task has.
                let y = unsafe { std::slice::from_raw_parts_mut(y.get().add(row * n + columns.start), columns.len()) };
                level.run(Up { down, b: &change.b, n, columns: columns.clone(), scale: change.scale, y });
            }
        });
    });
}

/// Rows of `A` times `x`.
struct Down<'a> {
    x: &'a [f32],
    /// `[rows, k]`
    a: &'a [f32],
    down: &'a mut [f32],
}

impl Kernel for Down<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        for (down, a) in self.down.iter_mut().zip(self.a.chunks_exact(self.x.len())) {
            *down = s.merge(dot_lanes(s, self.x, a));
        }
    }
}

/// Some columns of a row.
struct Up<'a> {
    down: &'a [f32],
    /// `[rank, n]`
    b: &'a [f32],
    n: usize,
    columns: Range<usize>,
    scale: f32,
    /// The columns of the output.
    y: &'a mut [f32],
}

impl Kernel for Up<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, s: S) {
        let Self { down, b, n, columns, scale, y } = self;
        assert!(columns.end <= n && y.len() == columns.len() && b.len() == down.len() * n);
        let (whole, tail) = y.as_chunks_mut::<LANES>();
        let first_of_tail = columns.start + whole.len() * LANES;
        for (at, y) in (columns.start..).step_by(LANES).zip(whole) {
            let mut up = s.splat(0.0);
            for (j, down) in down.iter().enumerate() {
                // SAFETY: `at + LANES <= n`, and `b` has as many rows of `n` as `down` elements.
                up = s.fma(unsafe { s.load(b.as_ptr().add(j * n + at)) }, s.splat(*down), up);
            }
            // SAFETY: one vector.
            unsafe { s.store(y.as_mut_ptr(), s.add(s.load(y.as_ptr()), s.mul(s.splat(scale), up))) };
        }
        for (at, y) in (first_of_tail..).zip(tail) {
            let mut up = 0.0f32;
            for (j, down) in down.iter().enumerate() {
                up = b[j * n + at].mul_add(*down, up);
            }
            *y += scale * up;
        }
    }
}

/// Lanes of the dot product, the tail padded with zeros.
#[inline(always)]
fn dot_lanes<S: Simd>(s: S, a: &[f32], b: &[f32]) -> S::F {
    let mut acc = s.splat(0.0);
    let ((a_whole, a_tail), (b_whole, b_tail)) = (a.as_chunks::<LANES>(), b.as_chunks::<LANES>());
    for (a, b) in a_whole.iter().zip(b_whole) {
        // SAFETY: chunks are one vector each.
        acc = unsafe { s.fma(s.load(a.as_ptr()), s.load(b.as_ptr()), acc) };
    }
    if !a_tail.is_empty() {
        let mut padded = [[0.0; LANES]; 2];
        padded[0][..a_tail.len()].copy_from_slice(a_tail);
        padded[1][..b_tail.len()].copy_from_slice(b_tail);
        // SAFETY: as above.
        acc = unsafe { s.fma(s.load(padded[0].as_ptr()), s.load(padded[1].as_ptr()), acc) };
    }
    acc
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::adapter::{Adapter, AdapterLinear, Linear, PackedAdapter};
    use crate::cpu::CpuConfig;
    use crate::host::{AdaptedRows, HostKernels as _};
    use crate::numerics::Numerics;
    use crate::reference::ReferenceKernels;

    /// Any fixed numbers between -1 and 1.
    fn floats(len: usize, seed: usize) -> Vec<f32> {
        let mix =
            |i: usize| ((i + seed * 977) as u32).wrapping_mul(0x9e37_79b9).rotate_left(15).wrapping_mul(0x85eb_ca6b);
        (0..len).map(|i| (mix(i) >> 8) as f32 / (1 << 23) as f32 - 1.0).collect()
    }

    fn adapter(rank: usize, k: usize, n: usize) -> PackedAdapter {
        let (a, b) = (floats(rank * k, rank), floats(n * rank, rank + 1));
        let change = AdapterLinear { layer: 0, linear: Linear::Up, a, b, scale: 0.3 };
        Adapter { rank, linears: vec![change] }.pack().unwrap()
    }

    #[test]
    fn rows_shared_by_any_number_of_threads_have_the_bits_of_the_reference() {
        let numerics = Numerics::Bf16x32;
        for (k, n) in [(130, 67), (576, 1536), (33, 900)] {
            let adapters = [3, 20, 256].map(|rank| adapter(rank, k, n));
            // Rows of each segment and its adapter: decode, chunks beside it, one row.
            let steps: [&[(usize, Option<usize>)]; 4] = [
                &[(1, Some(2)), (1, None), (1, Some(0)), (1, Some(1)), (1, Some(2))],
                &[(1, Some(1)), (150, Some(0)), (7, None), (9, Some(2))],
                &[(1, Some(2))],
                &[(3, None)],
            ];
            for step in steps {
                let adapted = AdaptedRows::new(step.iter().map(|(rows, i)| (*rows, i.map(|i| &adapters[i]))));
                let changes = |linear| adapted.of(0, &[linear]).map(|layer| layer.changes(linear));
                let rows: usize = step.iter().map(|(rows, _)| rows).sum();
                let (x, start) = (floats(rows * k, 1), floats(rows * n, 2));
                let Some(of_up) = changes(Linear::Up) else { continue };
                let mut want = start.clone();
                ReferenceKernels::new(numerics).adapt(&x, of_up, &mut want);
                assert_ne!(want, start);
                for threads in [1, 2, 3, 8] {
                    let kernels = CpuKernels::new(CpuConfig { threads, simd: None, numerics }).unwrap();
                    let mut got = start.clone();
                    adapt(&kernels, &x, of_up, &mut got);
                    let same = got.iter().zip(&want).all(|(got, want)| got.to_bits() == want.to_bits());
                    assert!(same, "[{n}, {k}], {rows} rows, {threads} threads");
                    let Some(of_gate) = changes(Linear::Gate) else { continue };
                    adapt(&kernels, &x, of_gate, &mut got);
                    assert!(got == want, "a linear that no adapter changes");
                }
            }
        }
    }
}
