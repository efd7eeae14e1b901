//! Loads from and stores to a KV pool through raw pointers: a NIC may be writing other blocks of it at the same time.

use crate::cpu::simd::{Kernel, LANES, Simd};
use crate::host::KvStep;
use crate::kv::KvBinding;
use baton_types::{BlockId, BlockTable, Dtype};
use half::{bf16, f16};
use std::ops::Range;

/// Columns of rows of a plane (0: keys, 1: values), to be stored at their positions, rounded to the plane's type.
pub(super) struct StoreColumns<'a> {
    pub(super) step: KvStep<'a>,
    pub(super) plane: usize,
    /// Rows of the batch.
    pub(super) rows: Range<usize>,
    /// The first column.
    pub(super) first: usize,
    /// `[rows, columns]`
    pub(super) data: &'a [f32],
}

impl Kernel for StoreColumns<'_> {
    type Out = ();

    #[inline(always)]
    fn call<S: Simd>(self, _: S) {
        let Self { step, rows, first, data, .. } = self;
        let pool = step.kv;
        let plane = pool.planes()[self.plane];
        let (dtype, columns) = (pool.dtype(plane), data.len() / rows.len().max(1));
        assert!(first + columns <= pool.heads() * pool.dim());
        let mut data = data.chunks_exact(columns.max(1));
        for (segment, positions) in step.parts(rows) {
            for run in pool.runs(&segment.table, positions) {
                let block = address(pool, step.layer, plane, run.block, run.token, run.tokens);
                for (token, data) in data.by_ref().take(run.tokens).enumerate() {
                    // SAFETY: `address` checked room for `run.tokens` whole rows, and the columns are of a row; the plan's blocks belong to
                    // this engine to write.
                    unsafe {
                        let to = block.add(token * pool.token_stride(plane) + first * dtype.bytes());
                        match dtype {
                            Dtype::F32 => put(data, to, |x| x),
                            Dtype::F16 => put(data, to, |x| f16::from_f32(x).to_bits()),
                            Dtype::Bf16 => put(data, to, to_bf16),
                        }
                    }
                }
            }
        }
    }
}

/// Rounds to bf16 as [`half::bf16::from_f32`] does, without a branch on the rounding.
#[inline(always)]
fn to_bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    let nearest = bits.wrapping_add(0x7fff + (bits >> 16 & 1));
    ((if x.is_nan() { bits | 0x40_0000 } else { nearest }) >> 16) as u16
}

/// # Safety
/// `to` is writable for as many `T` as `data` has elements.
#[inline(always)]
unsafe fn put<T>(data: &[f32], to: *mut u8, round: impl Fn(f32) -> T) {
    for (i, &x) in data.iter().enumerate() {
        // SAFETY: the caller's promise; planes are aligned to their element, but nothing here needs it.
        unsafe { to.cast::<T>().add(i).write_unaligned(round(x)) };
    }
}

/// Address of head 0 of a token, after checking that `tokens` tokens from there are within the pool.
fn address(pool: &KvBinding, layer: usize, plane: usize, block: BlockId, token: usize, tokens: usize) -> *mut u8 {
    let offset = pool.offset(layer, plane, block, token);
    assert!(token + tokens <= pool.block_tokens());
    assert!(offset + tokens * pool.token_stride(plane) <= pool.memory.bytes());
    // SAFETY: within the region, as just checked.
    unsafe { pool.memory.base().add(offset) }
}

/// One KV head of one plane of one sequence.
#[derive(Clone, Copy)]
pub(super) struct HeadSource<'a> {
    pub(super) pool: &'a KvBinding,
    pub(super) layer: usize,
    pub(super) plane: usize,
    pub(super) head: usize,
    pub(super) table: &'a BlockTable,
}

impl HeadSource<'_> {
    /// Widens `tokens` into `out`, rows of `stride` elements (`stride >= dim`); elements beyond `dim` are not written.
    #[inline(always)]
    pub(super) fn widen<S: Simd>(&self, simd: S, tokens: Range<usize>, stride: usize, out: &mut [f32]) {
        let (pool, dtype, dim) = (self.pool, self.pool.dtype(self.plane), self.pool.dim());
        assert!(stride >= dim && out.len() >= tokens.len() * stride);
        let mut row = 0;
        for run in pool.runs(self.table, tokens) {
            let base = address(pool, self.layer, self.plane, run.block, run.token, run.tokens);
            for t in 0..run.tokens {
                // SAFETY: a token of the run just checked, and a head within its stride; `out` has the row, see above.
                unsafe {
                    let from = base.add(t * pool.token_stride(self.plane) + self.head * dim * dtype.bytes());
                    widen_row(simd, dtype, from, &mut out[row * stride..row * stride + dim]);
                }
                row += 1;
            }
        }
    }
}

impl HeadSource<'_> {
    /// Prefetches `tokens` for [`HeadSource::widen`]: blocks are scattered, so the hardware prefetcher cannot predict them.
    #[inline(always)]
    pub(super) fn prefetch<S: Simd>(&self, simd: S, tokens: Range<usize>) {
        let pool = self.pool;
        let head_bytes = pool.dim() * pool.dtype(self.plane).bytes();
        for run in pool.runs(self.table, tokens) {
            let base = address(pool, self.layer, self.plane, run.block, run.token, run.tokens);
            for t in 0..run.tokens {
                let head = base.wrapping_add(t * pool.token_stride(self.plane) + self.head * head_bytes);
                for line in (0..head_bytes).step_by(64) {
                    simd.prefetch(head.wrapping_add(line));
                }
            }
        }
    }
}

/// Addresses of one KV head of one plane of one sequence.
#[cfg(target_arch = "x86_64")]
#[derive(Clone, Copy)]
pub(super) struct HeadRows<'a> {
    /// Of the head in the first token of block 0.
    base: *const u8,
    block_bytes: usize,
    token_bytes: usize,
    block_tokens: usize,
    /// Blocks of the pool.
    total: u32,
    table: &'a BlockTable,
}

#[cfg(target_arch = "x86_64")]
impl<'a> HeadRows<'a> {
    /// The map is asked once, since it checks and multiplies anew for every block: its blocks of a layer follow one another.
    pub(super) fn new(source: HeadSource<'a>) -> Self {
        let HeadSource { pool, layer, plane, head, table } = source;
        let total = pool.blocks();
        let offset = |block| pool.offset(layer, plane, BlockId(block), 0);
        let block_bytes = if total > 1 { offset(1) - offset(0) } else { 0 };
        assert_eq!(offset(total - 1), offset(0) + (total as usize - 1) * block_bytes);
        assert!(pool.pool_bytes() <= pool.memory.bytes());
        let head_bytes = pool.dim() * pool.dtype(plane).bytes();
        Self {
            base: pool.memory.base().cast_const().wrapping_add(offset(0) + head * head_bytes),
            block_bytes,
            token_bytes: pool.token_stride(plane),
            block_tokens: pool.block_tokens(),
            total,
            table,
        }
    }

    /// The head's elements in each of `tokens`.
    #[inline]
    pub(super) fn addresses(&self, tokens: Range<usize>, out: &mut [*const u8]) {
        assert_eq!(tokens.len(), out.len());
        if tokens.is_empty() {
            return;
        }
        let (mut index, mut within) =
            (tokens.start / self.block_tokens - self.table.first, tokens.start % self.block_tokens);
        let mut out = out;
        while !out.is_empty() {
            let BlockId(block) = self.table.blocks[index];
            assert!(block < self.total, "block {block} of a pool of {}", self.total);
            let first = self.base.wrapping_add(block as usize * self.block_bytes + within * self.token_bytes);
            let (now, later) = out.split_at_mut((self.block_tokens - within).min(out.len()));
            for (t, out) in now.iter_mut().enumerate() {
                *out = first.wrapping_add(t * self.token_bytes);
            }
            (out, index, within) = (later, index + 1, 0);
        }
    }
}

/// # Safety
/// `from` is readable for as many elements of `dtype` as `out` has.
#[inline(always)]
unsafe fn widen_row<S: Simd>(simd: S, dtype: Dtype, from: *const u8, out: &mut [f32]) {
    let (whole, tail) = out.as_chunks_mut::<LANES>();
    let done = whole.len() * LANES;
    // SAFETY: every access stays below `out.len()` elements: the caller's promise.
    unsafe {
        match dtype {
            Dtype::F32 => {
                let from = from.cast::<f32>();
                std::ptr::copy_nonoverlapping(from.cast::<u8>(), whole.as_mut_ptr().cast(), done * 4);
                for (i, x) in tail.iter_mut().enumerate() {
                    *x = from.add(done + i).read_unaligned();
                }
            }
            Dtype::F16 => {
                let from = from.cast::<u16>();
                for (i, x) in whole.as_flattened_mut().iter_mut().chain(tail).enumerate() {
                    *x = f16::from_bits(from.add(i).read_unaligned()).to_f32();
                }
            }
            Dtype::Bf16 => {
                let from = from.cast::<u16>();
                for (i, chunk) in whole.iter_mut().enumerate() {
                    simd.store(chunk.as_mut_ptr(), simd.load_bf16(from.add(i * LANES)));
                }
                for (i, x) in tail.iter_mut().enumerate() {
                    *x = bf16::from_bits(from.add(done + i).read_unaligned()).to_f32();
                }
            }
        }
    }
}
