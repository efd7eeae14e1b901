//! The recurrence of the gated delta rule.
//!
//! Columns of a state are independent, and vectors run over them. While the rows of a segment are computed, the columns of a task are in memory of its
//! thread. They are passed over once a row: a pass adds what the row stores, sums what its query reads, and prepares the next row, whose
//! decay and whose sums with its key it computes.

use super::plane;
use crate::cpu::lines::Lines;
use crate::cpu::simd::{Pass, WIDEST, Wide, Width};
use crate::cpu::{CpuKernels, Shared};
use crate::host::{DeltaHeads, DeltaRows, KvStep};
use std::cell::RefCell;

/// Vectors of columns that are computed side by side: with two sums each, they hide the latency of an addition.
const VECTORS: usize = 4;

/// Columns of a task.
const COLUMNS: usize = VECTORS * WIDEST;

thread_local! {
    static LANE: RefCell<Lines> = const { RefCell::new(Lines::new()) };
}

/// As [`HostKernels::delta_rule`](crate::host::HostKernels::delta_rule). A task has all rows of a segment, and some columns of one head.
pub(in crate::cpu) fn delta_rule(
    kernels: &CpuKernels,
    step: KvStep<'_>,
    heads: DeltaHeads,
    rows: DeltaRows<'_>,
    out: &mut [f32],
) {
    let DeltaHeads { key_heads, value_heads, key_dim, value_dim } = heads;
    let count = step.rows();
    assert_eq!([rows.query.len(), rows.key.len()], [count * key_heads * key_dim; 2]);
    assert_eq!([rows.value.len(), out.len()], [count * value_heads * value_dim; 2]);
    assert_eq!([rows.decay.len(), rows.beta.len()], [count * value_heads; 2]);
    let of_states = step.kv.planes()[1];
    assert_eq!(step.kv.plane_bytes(of_states), value_heads * key_dim * value_dim * size_of::<f32>());
    let (width, strips, out) = (Width::of(kernels.simd), value_dim.div_ceil(COLUMNS), Shared(out.as_mut_ptr()));
    kernels.threads.run(step.segments.len() * value_heads * strips, &|task| {
        let (index, head, strip) = (task / strips / value_heads, task / strips % value_heads, task % strips);
        let segment = &step.segments[index];
        let first: usize = step.segments[..index].iter().map(|segment| segment.rows).sum();
        let column = strip * COLUMNS;
        let state = |block| {
            let states = plane(step.kv, step.layer, of_states, block).cast::<f32>();
            states.wrapping_add(head * key_dim * value_dim + column)
        };
        let (read, written) = segment.states();
        let of_key = (first * key_heads + head / (value_heads / key_heads)) * key_dim;
        let of_value = (first * value_heads + head) * value_dim + column;
        LANE.with_borrow_mut(|room| {
            width.run(Strip {
                rows: segment.rows,
                query: &rows.query[of_key..],
                key: &rows.key[of_key..],
                key_stride: key_heads * key_dim,
                key_dim,
                value: &rows.value[of_value..],
                // The rows and columns of one task.
                out: out.get().wrapping_add(of_value),
                value_stride: value_heads * value_dim,
                columns: COLUMNS.min(value_dim - column),
                decay: &rows.decay[first * value_heads + head..],
                beta: &rows.beta[first * value_heads + head..],
                head_stride: value_heads,
                read: read.map(|block| state(block).cast_const()),
                written: state(written),
                state_stride: value_dim,
                room: room.room(key_dim * COLUMNS),
            });
        });
    });
}

/// Some columns of a head's state, and the rows of a segment. Rows are `stride` elements apart.
pub(super) struct Strip<'a> {
    pub(super) rows: usize,
    pub(super) query: &'a [f32],
    pub(super) key: &'a [f32],
    pub(super) key_stride: usize,
    pub(super) key_dim: usize,
    pub(super) value: &'a [f32],
    /// Nobody else touches these columns of the rows.
    pub(super) out: *mut f32,
    pub(super) value_stride: usize,
    pub(super) columns: usize,
    pub(super) decay: &'a [f32],
    pub(super) beta: &'a [f32],
    pub(super) head_stride: usize,
    /// The state before, `[key_dim, columns]`; `None`: zeros. And the state behind the rows, which may be in the same place.
    pub(super) read: Option<*const f32>,
    pub(super) written: *mut f32,
    pub(super) state_stride: usize,
    /// `[key_dim, COLUMNS]`, aligned to a vector.
    pub(super) room: *mut f32,
}

impl Pass for Strip<'_> {
    type Out = ();

    #[inline(always)]
    fn call<W: Wide>(self, w: W) {
        let width = VECTORS * W::LANES;
        for first in (0..self.columns).step_by(width) {
            self.vectors(w, first, width.min(self.columns - first));
        }
    }
}

impl Strip<'_> {
    /// The columns from `first` on, at most as many as vectors have. Those that vectors have beyond them are zero.
    #[inline(always)]
    fn vectors<W: Wide>(&self, w: W, first: usize, columns: usize) {
        let width = VECTORS * W::LANES;
        let bytes = columns * size_of::<f32>();
        for i in 0..self.key_dim {
            // SAFETY: `columns` columns of row `i` of the state, whose alignment nothing promises, and of the room.
            unsafe {
                let to = self.room.add(i * width);
                if columns < width || self.read.is_none() {
                    to.write_bytes(0, width);
                }
                if let Some(read) = self.read {
                    let from = read.wrapping_add(i * self.state_stride + first);
                    std::ptr::copy_nonoverlapping(from.cast::<u8>(), to.cast::<u8>(), bytes);
                }
            }
        }
        let mut padded = [0.0; COLUMNS];
        let mut sums = self.begin(w);
        for row in 0..self.rows {
            padded[..columns].copy_from_slice(&self.value[row * self.value_stride + first..][..columns]);
            let beta = w.splat(self.beta[row * self.head_stride]);
            let mut stored = sums;
            // Loops, since closures do not inherit the instructions.
            for (c, stored) in stored.iter_mut().enumerate() {
                // SAFETY: as many vectors as the columns have room for.
                let value = unsafe { w.load(padded[..width].as_ptr().add(c * W::LANES)) };
                *stored = w.mul(beta, w.sub(value, *stored));
            }
            let out;
            (out, sums) =
                if row + 1 < self.rows { self.pass(w, row, stored) } else { (self.end(w, row, stored), sums) };
            // SAFETY: as above; then `columns` elements of a row of the output, which only this task has.
            unsafe {
                let all = &mut padded[..width];
                for (c, out) in out.into_iter().enumerate() {
                    w.store(all.as_mut_ptr().add(c * W::LANES), out);
                }
                let to = self.out.add(row * self.value_stride + first);
                std::ptr::copy_nonoverlapping(all.as_ptr(), to, columns);
                all[columns..].fill(0.0);
            }
        }
        for i in 0..self.key_dim {
            // SAFETY: as at the beginning.
            unsafe {
                let to = self.written.wrapping_add(i * self.state_stride + first);
                std::ptr::copy_nonoverlapping(self.room.add(i * width).cast::<u8>(), to.cast::<u8>(), bytes);
            }
        }
    }

    #[inline(always)]
    fn row<'a>(&self, of: &'a [f32], row: usize) -> &'a [f32] {
        &of[row * self.key_stride..][..self.key_dim]
    }

    /// Decay of the first row; its sums with the key.
    #[inline(always)]
    fn begin<W: Wide>(&self, w: W) -> [W::F; VECTORS] {
        let decay = w.splat(self.decay[0]);
        let mut sums = [w.splat(0.0); VECTORS];
        for (i, key) in self.row(self.key, 0).iter().enumerate() {
            let key = w.splat(*key);
            for (c, sum) in sums.iter_mut().enumerate() {
                // SAFETY: a vector of the room, which has `VECTORS` of them in each row.
                unsafe {
                    let at = self.room.add((i * VECTORS + c) * W::LANES);
                    let state = w.mul(w.load(at), decay);
                    w.store(at, state);
                    *sum = w.fma(key, state, *sum);
                }
            }
        }
        sums
    }

    /// Adds what a row stores to the state. Returns the output, and the next row's sums with its key, after its decay.
    #[inline(always)]
    fn pass<W: Wide>(&self, w: W, row: usize, stored: [W::F; VECTORS]) -> ([W::F; VECTORS], [W::F; VECTORS]) {
        let (query, key, next) = (self.row(self.query, row), self.row(self.key, row), self.row(self.key, row + 1));
        let decay = w.splat(self.decay[(row + 1) * self.head_stride]);
        let (mut out, mut sums) = ([w.splat(0.0); VECTORS], [w.splat(0.0); VECTORS]);
        for i in 0..self.key_dim {
            let (query, key, next) = (w.splat(query[i]), w.splat(key[i]), w.splat(next[i]));
            for c in 0..VECTORS {
                // SAFETY: as in `begin`.
                unsafe {
                    let at = self.room.add((i * VECTORS + c) * W::LANES);
                    let state = w.fma(key, stored[c], w.load(at));
                    out[c] = w.fma(query, state, out[c]);
                    let state = w.mul(state, decay);
                    sums[c] = w.fma(next, state, sums[c]);
                    w.store(at, state);
                }
            }
        }
        (out, sums)
    }

    /// The same of the last row.
    #[inline(always)]
    fn end<W: Wide>(&self, w: W, row: usize, stored: [W::F; VECTORS]) -> [W::F; VECTORS] {
        let (query, key) = (self.row(self.query, row), self.row(self.key, row));
        let mut out = [w.splat(0.0); VECTORS];
        for i in 0..self.key_dim {
            let (query, key) = (w.splat(query[i]), w.splat(key[i]));
            for c in 0..VECTORS {
                // SAFETY: as in `begin`.
                unsafe {
                    let at = self.room.add((i * VECTORS + c) * W::LANES);
                    let state = w.fma(key, stored[c], w.load(at));
                    out[c] = w.fma(query, state, out[c]);
                    w.store(at, state);
                }
            }
        }
        out
    }
}
