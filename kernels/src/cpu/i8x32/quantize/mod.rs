//! Activations in the kernels' layout, quantized once per GEMM input.

use super::BLOCK;
use super::level::Level;
use crate::cpu::buffer::Buffer;
use crate::cpu::source::Source;
use crate::numerics::LARGEST_MIN;
use std::ops::Range;

#[cfg(target_arch = "x86_64")]
mod simd;

/// Most rows of a tile.
pub(crate) const ROWS_MAX: usize = 16;

/// Fewest rows that tiles take: unpacking a panel has to pay (48 rows gain little, 32 nothing).
pub(crate) const TILED_ROWS: usize = 4 * ROWS_MAX;

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
    /// Quantizes `m` rows of `k` elements into the memory of earlier rows where it suffices. All levels give equal bits.
    ///
    /// # Panics
    /// If k is not whole blocks, or the processor lacks the level.
    pub(in crate::cpu) fn quantize(&mut self, level: Level, m: usize, k: usize, source: &mut Source<'_>) {
        assert!(k.is_multiple_of(BLOCK) && level.available(), "{k} elements");
        let blocks = k / BLOCK;
        // Even heights: 17 rows are 9 and 8, not 16 and 1. Tiles take 16.
        let even = m.div_ceil(m.div_ceil(ROWS_MAX).max(1)).max(1);
        let height = if level.has_tiles() && m >= TILED_ROWS { ROWS_MAX } else { even };
        let bytes = m * blocks * size_of::<Record>();
        if self.records.bytes().len() < bytes {
            self.records = Buffer::zeroed(bytes / size_of::<u32>());
        }
        (self.m, self.k, self.height) = (m, k, height);
        let to = self.records.as_mut_ptr().cast::<Record>();
        for first in (0..m).step_by(height) {
            let count = height.min(m - first);
            for (row, x) in source.rows(first..first + count).chunks_exact(k).enumerate() {
                // SAFETY: records `[blocks, count]` of this block of rows begin at `first * blocks`; a row has every `count`-th of them.
                // `level` is available.
                unsafe { quantize_row(level, x, to.add(first * blocks + row), count) };
            }
        }
    }

    /// Rows.
    pub(crate) fn m(&self) -> usize {
        self.m
    }

    /// Elements of a row.
    pub(crate) fn k(&self) -> usize {
        self.k
    }

    /// How many blocks tiles can take: all or all but the last, or none where rows are few.
    pub(crate) fn tiled_blocks(&self) -> usize {
        if self.m >= TILED_ROWS && self.height == ROWS_MAX { self.m / ROWS_MAX } else { 0 }
    }

    /// Blocks of rows.
    pub(crate) fn blocks(&self) -> usize {
        self.m.div_ceil(self.height)
    }

    /// The rows of block `block`.
    pub(crate) fn block_rows(&self, block: usize) -> Range<usize> {
        (block * self.height).min(self.m)..((block + 1) * self.height).min(self.m)
    }

    /// Records `[k / 32, rows]` of block `block`.
    pub(crate) fn block(&self, block: usize) -> &[Record] {
        self.records_of(self.block_rows(block))
    }

    /// Records `[blocks, k / 32, rows]` of blocks of equal height.
    pub(crate) fn whole_blocks(&self, blocks: Range<usize>) -> &[Record] {
        self.records_of(self.block_rows(blocks.start).start..self.block_rows(blocks.end - 1).end)
    }

    /// Records of the rows of whole blocks.
    fn records_of(&self, rows: Range<usize>) -> &[Record] {
        let blocks = self.k / BLOCK;
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
            Level::Avx512Vnni | Level::Amx | Level::AmxScalar => simd::row_avx512(x, to, stride),
            #[cfg(target_arch = "x86_64")]
            Level::Avx2 => simd::row_avx2(x, to, stride),
            _ => row(x, to, stride),
        }
    }
}

/// # Safety
/// As [`quantize_row`].
unsafe fn row(x: &[f32], to: *mut Record, stride: usize) {
    for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
        // SAFETY: the caller's promise.
        unsafe { to.add(block * stride).write(record(x)) };
    }
}

/// The scale of a block whose largest value is `amax`, and what its values are multiplied by.
#[inline(always)]
fn scale(amax: f32) -> (f32, f32) {
    if amax < LARGEST_MIN {
        (0.0, 0.0)
    } else if amax < f32::INFINITY {
        (amax / 127.0, 127.0 / amax)
    } else {
        (f32::NAN, 0.0)
    }
}

/// Quantizes a block.
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
    let (d, inverse) = scale(amax);
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_level_gives_equal_records() {
        let mut x: Vec<f32> = (0..64 * BLOCK as u32)
            .map(|i| {
                let bits = i.wrapping_mul(0x9e37_79b1).rotate_left(15).wrapping_mul(0x85eb_ca77);
                // Blocks of any magnitude, then of any bits.
                let wild = f32::from_bits(bits);
                if i < 48 * 32 {
                    (bits >> 8) as f32 * 2f32.powi(i as i32 / 32 * 4 - 110) * if bits & 1 == 0 { 1.0 } else { -1.0 }
                } else {
                    wild
                }
            })
            .collect();
        x[..6].copy_from_slice(&[127.0, 0.5, 1.5, 2.5, -0.5, -3.5]);
        x[6..32].fill(0.25);
        x[32..64].fill(f32::MAX);
        x[64..96].fill(-LARGEST_MIN);
        x[96..128].fill(f32::from_bits(LARGEST_MIN.to_bits() - 1));
        for (block, x) in x.as_chunks::<BLOCK>().0.iter().enumerate() {
            let want = crate::reference::quantized::Activations::new(x);
            let sum = |range: Range<usize>| want.ints[range].iter().map(|q| i32::from(*q)).sum::<i32>();
            for level in [Level::Portable, Level::Avx2, Level::Avx512Vnni].into_iter().filter(|level| level.available())
            {
                let mut got = [record(&[1.0; BLOCK]); 2];
                // SAFETY: room for one record; the level is available.
                unsafe { quantize_row(level, x, got.as_mut_ptr(), 1) };
                let [got, other] = got;
                assert_eq!((got.d.to_bits(), got.q), (want.scale.to_bits(), want.ints), "{level:?} block {block}");
                assert_eq!(got.sum, sum(0..32) as f32);
                for (offset, minus) in [(8, got.minus_8), (32, got.minus_32), (128, got.minus_128)] {
                    assert_eq!(minus, [-offset * sum(0..16), -offset * sum(16..32)]);
                }
                assert_eq!(other.d, 1.0 / 127.0, "nothing else is written");
            }
        }
    }
}
