//! Formats in which files store weights, and their exact expansion to f32.
//!
//! The quantized formats are GGML's. Formulas: `dequantize_row_*` of ggml's `ggml-quants.c`; each product and sum is rounded in the same
//! order as there, so results equal those of PyPI `gguf` as bits (checked by the engine's tests of weights).

use half::{bf16, f16};

/// Elements of a K-quant super-block.
const SUPER_BLOCK: usize = 256;

/// A format of stored rows.
#[allow(missing_docs, reason = "GGML's names of the formats")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StorageFormat {
    F32,
    F16,
    Bf16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

impl StorageFormat {
    const ALL: [Self; 9] =
        [Self::F32, Self::F16, Self::Bf16, Self::Q4_0, Self::Q4_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    /// The quantized ones.
    #[cfg(test)]
    pub(crate) const QUANTIZED: [Self; 6] = [Self::Q4_0, Self::Q4_1, Self::Q8_0, Self::Q4K, Self::Q5K, Self::Q6K];

    /// A name without blanks.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::F16 => "f16",
            Self::Bf16 => "bf16",
            Self::Q4_0 => "q4_0",
            Self::Q4_1 => "q4_1",
            Self::Q8_0 => "q8_0",
            Self::Q4K => "q4_k",
            Self::Q5K => "q5_k",
            Self::Q6K => "q6_k",
        }
    }

    /// The format of this name.
    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|format| format.name() == name)
    }

    /// (elements, bytes) of one block.
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q4_0 => (32, 2 + 16),
            Self::Q4_1 => (32, 4 + 16),
            Self::Q8_0 => (32, 2 + 32),
            Self::Q4K => (SUPER_BLOCK, 4 + 12 + 128),
            Self::Q5K => (SUPER_BLOCK, 4 + 12 + 32 + 128),
            Self::Q6K => (SUPER_BLOCK, 128 + 64 + 16 + 2),
        }
    }

    /// Whether elements are integers with shared scales.
    pub fn is_quantized(self) -> bool {
        !matches!(self, Self::F32 | Self::F16 | Self::Bf16)
    }

    /// Bytes of a row of `k` elements; `None` if the row is not whole blocks.
    pub fn row_bytes(self, k: usize) -> Option<usize> {
        let (elements, bytes) = self.block();
        k.is_multiple_of(elements).then(|| k / elements * bytes)
    }

    /// Expands whole blocks. `bytes` holds exactly the blocks of `out`.
    ///
    /// # Panics
    /// If it does not.
    pub fn expand(self, bytes: &[u8], out: &mut [f32]) {
        let (elements, size) = self.block();
        assert_eq!(out.len() / elements * size, bytes.len(), "whole blocks");
        let expand_block = match self {
            Self::F32 => |b: &[u8], out: &mut [f32]| out[0] = f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Self::F16 => |b: &[u8], out: &mut [f32]| out[0] = half_at(b, 0),
            Self::Bf16 => |b: &[u8], out: &mut [f32]| out[0] = bf16::from_le_bytes([b[0], b[1]]).to_f32(),
            Self::Q4_0 => q4_0,
            Self::Q4_1 => q4_1,
            Self::Q8_0 => q8_0,
            Self::Q4K => q4_k,
            Self::Q5K => q5_k,
            Self::Q6K => q6_k,
        };
        for (block, out) in bytes.chunks_exact(size).zip(out.chunks_exact_mut(elements)) {
            expand_block(block, out);
        }
    }
}

pub(crate) fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// Scale, then 16 bytes: low nibbles are the first half of the block, high nibbles the second.
fn q4_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (i, &q) in block[2..].iter().enumerate() {
        out[i] = f32::from(i16::from(q & 15) - 8) * d;
        out[i + 16] = f32::from(i16::from(q >> 4) - 8) * d;
    }
}

/// Scale and minimum, then nibbles as in Q4_0.
fn q4_1(block: &[u8], out: &mut [f32]) {
    let (d, m) = (half_at(block, 0), half_at(block, 2));
    for (i, &q) in block[4..].iter().enumerate() {
        out[i] = f32::from(q & 15) * d + m;
        out[i + 16] = f32::from(q >> 4) * d + m;
    }
}

fn q8_0(block: &[u8], out: &mut [f32]) {
    let d = half_at(block, 0);
    for (out, &q) in out.iter_mut().zip(&block[2..]) {
        *out = f32::from(q as i8) * d;
    }
}

/// The 6-bit scale and minimum of sub-block `j` of 8, packed into 12 bytes.
pub(crate) fn scale_min(j: usize, packed: &[u8]) -> (f32, f32) {
    let (scale, min) = if j < 4 {
        (packed[j] & 63, packed[j + 4] & 63)
    } else {
        ((packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4)
    };
    (f32::from(scale), f32::from(min))
}

fn q4_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    let (scales, quants) = (&block[4..16], &block[16..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(sub, scales);
        let (d, m) = (d * scale, d_min * min);
        let shift = 4 * (sub % 2);
        for (out, &q) in out.iter_mut().zip(&quants[sub / 2 * 32..]) {
            *out = d * f32::from(q >> shift & 15) - m;
        }
    }
}

/// As Q4_K, with the fifth bit of sub-block `s` in bit `s` of 32 shared bytes.
fn q5_k(block: &[u8], out: &mut [f32]) {
    let (d, d_min) = (half_at(block, 0), half_at(block, 2));
    let (scales, high, quants) = (&block[4..16], &block[16..48], &block[48..]);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (scale, min) = scale_min(sub, scales);
        let (d, m) = (d * scale, d_min * min);
        let shift = 4 * (sub % 2);
        for ((out, &q), &h) in out.iter_mut().zip(&quants[sub / 2 * 32..]).zip(high) {
            *out = d * f32::from((q >> shift & 15) | (h >> sub & 1) << 4) - m;
        }
    }
}

/// Two halves of 128; in each, sub-block `s` of 4 takes its low nibble from 64 shared bytes and two high bits from 32.
fn q6_k(block: &[u8], out: &mut [f32]) {
    let (low, high, scales) = (&block[..128], &block[128..192], &block[192..208]);
    let d = half_at(block, 208);
    for (sub, out) in out.chunks_exact_mut(32).enumerate() {
        let (half, s) = (sub / 4, sub % 4);
        let low = &low[half * 64 + s % 2 * 32..];
        let high = &high[half * 32..];
        for (i, out) in out.iter_mut().enumerate() {
            let quant = (low[i] >> (s / 2 * 4) & 15) | (high[i] >> (2 * s) & 3) << 4;
            let scale = f32::from(scales[half * 8 + s * 2 + i / 16] as i8);
            *out = d * scale * f32::from(i16::from(quant) - 32);
        }
    }
}
