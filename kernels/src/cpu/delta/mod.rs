//! The gated delta rule and its convolution: tasks have channels, or columns of the states of heads. Rows of a sequence follow one another in every
//! task, so that the bits do not depend on how a sequence is cut into steps.

mod convolution;
mod known;
mod rule;

use super::elementwise::{pieces, rows_of};
use super::simd::{Kernel, Simd};
use super::{CpuKernels, Shared};
use crate::host::DeltaOf;
use crate::kv::KvBinding;
use crate::numerics;
use baton_types::BlockId;

pub(super) use convolution::convolve;
pub(super) use known::known_answers;
pub(super) use rule::delta_rule;

/// Address of a plane of a state, after checking that all of it is within the pool. Nothing promises its alignment.
fn plane(pool: &KvBinding, layer: usize, plane: usize, block: BlockId) -> *mut u8 {
    let offset = pool.offset(layer, plane, block, 0);
    assert!(offset + pool.plane_bytes(plane) <= pool.memory.bytes());
    // SAFETY: within the region, as just checked.
    unsafe { pool.memory.base().add(offset) }
}

/// Decay and beta of each row and value head, in place of their products.
pub(super) fn decays(kernels: &CpuKernels, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]) {
    let heads = op.rates.len();
    assert!(decay.len() == beta.len() && op.decay_bias.len() == heads);
    let (rows, decay, beta) = (decay.len() / heads, Shared(decay.as_mut_ptr()), Shared(beta.as_mut_ptr()));
    pieces(kernels, rows, heads, &|start, end| {
        // SAFETY: `pieces` gives each row to one task.
        let (decay, beta) = unsafe { (rows_of(decay, heads, start, end), rows_of(beta, heads, start, end)) };
        kernels.level.run(Decays { op, decay, beta });
    });
}

struct Decays<'a> {
    op: &'a DeltaOf<'a>,
    decay: &'a mut [f32],
    beta: &'a mut [f32],
}

impl Kernel for Decays<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _: S) {
        // Scalar code: every element is independent, so the compiler's vectorization rounds alike.
        let DeltaOf { rates, decay_bias, .. } = *self.op;
        for row in self.decay.chunks_exact_mut(rates.len()) {
            for ((a, rate), bias) in row.iter_mut().zip(rates).zip(decay_bias) {
                *a = numerics::decay(*a, *rate, *bias);
            }
        }
        self.beta.iter_mut().for_each(|b| *b = numerics::sigmoid(*b));
    }
}
