//! Products of heads, each with a matrix of its own.

use super::fused::share;
use super::matrix::{Input, Matrix};
use super::source::Source;
use super::target::Target;
use super::threads::TASKS_PER_THREAD;
use super::{CpuKernels, Shared};
use crate::host::{HeadProducts, Store};
use std::cell::RefCell;

/// Rows of a task: with a head's matrix they stay in the second-level cache.
const TASK_ROWS: usize = 256;

/// Products that tasks take together: whole panels of every class.
const UNIT: usize = 32;

thread_local! {
    static LANE: RefCell<(Vec<f32>, Input)> = RefCell::default();
}

/// As [`parts::by_head`](crate::host::parts::by_head). A task has some rows of one head; with few rows, as in decode, also some of its products.
pub(super) fn by_head(kernels: &CpuKernels, w: &Matrix, of: HeadProducts, x: &[f32], out: &mut [f32]) {
    let HeadProducts { rows, heads, k, n, rest } = of;
    let [columns, out_columns] = of.columns();
    assert_eq!((x.len(), out.len()), (rows * columns, rows * out_columns));
    assert!(w.k() == k && (0..heads).all(|head| w.height(head) == n));
    if rows == 0 {
        return;
    }
    let blocks = rows.div_ceil(TASK_ROWS);
    let wanted = kernels.threads.count() * TASKS_PER_THREAD;
    let (units, each) = (n.div_ceil(UNIT), wanted.div_ceil(heads * blocks));
    let parts = each.clamp(1, units);
    let shared = Shared(out.as_mut_ptr());
    kernels.threads.run(heads * blocks * parts, &|task| {
        let (part, block, head) = (task % parts, task / parts % blocks, task / parts / blocks);
        let of_block = share(rows, block, blocks);
        let units = share(units, part, parts);
        let features = units.start * UNIT..(units.end * UNIT).min(n);
        LANE.with_borrow_mut(|(gathered, input)| {
            gathered.clear();
            for row in of_block.clone() {
                let at = row * columns + head * (k + rest);
                gathered.extend_from_slice(&x[at..at + k]);
                if part == 0 {
                    let to = row * out_columns + head * (n + rest) + n;
                    // SAFETY: `rest` elements of a head of a row, which no other task writes; `x` is another slice.
                    unsafe {
                        std::ptr::copy_nonoverlapping(x[at + k..at + k + rest].as_ptr(), shared.get().add(to), rest)
                    };
                }
            }
            input.fill(kernels, w, of_block.len(), &mut Source::dense(gathered, k));
            let to = of_block.start * out_columns + head * (n + rest) + features.start;
            // SAFETY: these features of a head of rows of `out_columns`, which no other task writes.
            let target = unsafe { Target::new(shared.get().add(to), out_columns, features, Store::Set) };
            w.product(kernels, input, head, 1, target);
        });
    });
}
