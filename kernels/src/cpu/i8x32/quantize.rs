//! Activations in the kernels' layout, quantized once per GEMM input.

use super::level::Level;
use super::{BLOCK, Shared, Threads};
use crate::cpu::buffer::Buffer;
use crate::quantized::LARGEST_MIN;

/// Most rows of a tile.
pub(crate) const ROWS_MAX: usize = 16;

/// Elements below which waking threads costs more than the work.
const TASK_ELEMENTS: usize = 16 << 10;

/// 32 activations of one row and what kernels need of them: 64 bytes.
#[repr(C, align(64))]
#[derive(Clone, Copy, Debug)]
pub(crate) struct Record {
    pub(crate) q: [i8; BLOCK],
    pub(crate) d: f32,
    /// Sum of the integers.
    pub(crate) sum: f32,
    /// -8 times the sums of the first and of the second 16 integers: the correction of weights that are stored 8 too large.
    pub(crate) minus_8: [i32; 2],
    /// -32 times.
    pub(crate) minus_32: [i32; 2],
    /// -128 times.
    pub(crate) minus_128: [i32; 2],
}

/// Activations `[m, k]` as blocks of at most [`ROWS_MAX`] rows that a tile takes at once, each `[k / 32, rows]` records of 64 bytes.
#[derive(Debug)]
pub(crate) struct Rows {
    m: usize,
    k: usize,
    /// Rows of a block; the last may have fewer.
    height: usize,
    records: Buffer,
}

impl Default for Rows {
    fn default() -> Self {
        Self { m: 0, k: 0, height: 1, records: Buffer::zeroed(0) }
    }
}

impl Rows {
    /// Quantizes `x`, `[m, k]`, into the memory of earlier rows where it suffices. All levels give equal bits.
    ///
    /// # Panics
    /// If `x` is not of length m * k, k is not whole blocks, or the processor lacks the level.
    pub(crate) fn quantize(&mut self, threads: &Threads, level: Level, x: &[f32], m: usize, k: usize) {
        assert!(x.len() == m * k && k.is_multiple_of(BLOCK) && level.available(), "[{m}, {k}] of {}", x.len());
        let blocks = k / BLOCK;
        // Even heights: 17 rows are 9 and 8, not 16 and 1.
        let height = m.div_ceil(m.div_ceil(ROWS_MAX).max(1)).max(1);
        let bytes = m * blocks * size_of::<Record>();
        if self.records.bytes().len() < bytes {
            self.records = Buffer::zeroed(bytes / size_of::<u32>());
        }
        (self.m, self.k, self.height) = (m, k, height);
        let to = Shared(self.records.as_mut_ptr().cast::<Record>());
        let per_task = (TASK_ELEMENTS / (height * k).max(1)).max(1) * height;
        threads.run(m.div_ceil(per_task), &|task| {
            for row in task * per_task..((task + 1) * per_task).min(m) {
                let first = row / height * height;
                let rows = height.min(m - first);
                // SAFETY: records `[blocks, rows]` of this row's block begin at `first * blocks`; only this task writes those of its rows.
                let to = unsafe { to.get().add(first * blocks + row - first) };
                // SAFETY: as above, every `rows`-th of `blocks`; `level` is available.
                unsafe { quantize_row(level, &x[row * k..(row + 1) * k], to, rows) };
            }
        });
    }

    /// Rows.
    pub(crate) fn m(&self) -> usize {
        self.m
    }

    /// Elements of a row.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// Blocks of rows.
    pub(crate) fn blocks(&self) -> usize {
        self.m.div_ceil(self.height)
    }

    /// The rows of block `block`.
    pub(crate) fn block_rows(&self, block: usize) -> std::ops::Range<usize> {
        (block * self.height).min(self.m)..((block + 1) * self.height).min(self.m)
    }

    /// Records `[k / 32, rows]` of block `block`.
    pub(crate) fn block(&self, block: usize) -> &[Record] {
        let (rows, blocks) = (self.block_rows(block), self.k / BLOCK);
        assert!(rows.end * blocks * size_of::<Record>() <= self.records.bytes().len());
        // SAFETY: `quantize` has written these records; the buffer is aligned to 64.
        unsafe {
            std::slice::from_raw_parts(
                self.records.as_ptr().cast::<Record>().add(rows.start * blocks),
                rows.len() * blocks,
            )
        }
    }
}

/// # Safety
/// The level is available; `to` is valid for writes of every `stride`-th record, one for each 32 of x.
unsafe fn quantize_row(level: Level, x: &[f32], to: *mut Record, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match level {
            #[cfg(target_arch = "x86_64")]
            Level::Avx512Vnni => row_avx512(x, to, stride),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => row_avx2(x, to, stride),
            _ => row(x, to, stride),
        }
    }
}

/// # Safety
/// As [`quantize_row`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq")]
unsafe fn row_avx512(x: &[f32], to: *mut Record, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { row(x, to, stride) }
}

/// # Safety
/// As [`quantize_row`].
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn row_avx2(x: &[f32], to: *mut Record, stride: usize) {
    // SAFETY: the caller's promise.
    unsafe { row(x, to, stride) }
}

/// # Safety
/// As [`quantize_row`].
#[inline(always)]
unsafe fn row(x: &[f32], to: *mut Record, stride: usize) {
    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(block * stride).write(record(x)) };
    }
}

/// Quantizes a block. Loops over whole arrays without branches, which compile to vectors of any width: one code for all levels.
#[inline(always)]
fn record(x: &[f32; BLOCK]) -> Record {
    /// 1.5 * 2^23: added, it leaves an integer below 2^22 in the low bits, rounded to nearest even.
    const MAGIC: f32 = 12_582_912.0;
    // Magnitudes order like their bits, infinity and NaN last.
    let mut largest = [0u32; 16];
    for (i, largest) in largest.iter_mut().enumerate() {
        *largest = (x[i].to_bits() & 0x7fff_ffff).max(x[i + 16].to_bits() & 0x7fff_ffff);
    }
    for half in [8, 4, 2, 1] {
        for i in 0..half {
            largest[i] = largest[i].max(largest[i + half]);
        }
    }
    let amax = f32::from_bits(largest[0]);
    let finite = amax < f32::INFINITY;
    let (d, inverse) = if finite && amax >= LARGEST_MIN {
        (amax / 127.0, 127.0 / amax)
    } else {
        (if finite { 0.0 } else { f32::NAN }, 0.0)
    };
    let mut words = [0i32; BLOCK];
    for (word, x) in words.iter_mut().zip(x) {
        // A value that is not finite times 0 would be NaN: the mask makes its integer 0.
        let bits = (x * inverse + MAGIC).to_bits() as i32;
        *word = if finite { bits.wrapping_sub(MAGIC.to_bits() as i32) } else { 0 };
    }
    let q = words.map(|word| word as i8);
    let sum = |from: usize| words[from..from + 16].iter().fold(0i32, |sum, q| sum.wrapping_add(*q));
    let (first, second) = (sum(0), sum(16));
    let of = |offset: i32| [-offset * first, -offset * second];
    Record { q, d, sum: (first + second) as f32, minus_8: of(8), minus_32: of(32), minus_128: of(128) }
}
