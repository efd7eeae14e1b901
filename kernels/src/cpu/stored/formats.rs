//! GGML's quantized blocks as integers and scales. Formulas: `dequantize_row_*` of ggml's `ggml-quants.c`.

use super::BLOCK;
use crate::storage::StorageFormat;
use half::f16;

/// A stored format.
#[allow(missing_docs, reason = "GGML's names")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q5K,
    Q6K,
}

/// How a block's term is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// `w_d * Q`
    One,
    /// `fma(w_d, Q, w_m * S)`
    Min,
    /// `fma(w_d1, Q1, w_d0 * Q0)`
    Two,
}

impl Format {
    /// The quantized format of stored rows; `None` if they are floats.
    pub(crate) fn of(stored: StorageFormat) -> Option<Self> {
        match stored {
            StorageFormat::Q4_0 => Some(Self::Q4_0),
            StorageFormat::Q4_1 => Some(Self::Q4_1),
            StorageFormat::Q8_0 => Some(Self::Q8_0),
            StorageFormat::Q4K => Some(Self::Q4K),
            StorageFormat::Q5K => Some(Self::Q5K),
            StorageFormat::Q6K => Some(Self::Q6K),
            StorageFormat::F32 | StorageFormat::F16 | StorageFormat::Bf16 => None,
        }
    }

    /// The format of the file.
    pub(crate) const fn stored(self) -> StorageFormat {
        match self {
            Self::Q4_0 => StorageFormat::Q4_0,
            Self::Q4_1 => StorageFormat::Q4_1,
            Self::Q8_0 => StorageFormat::Q8_0,
            Self::Q4K => StorageFormat::Q4K,
            Self::Q5K => StorageFormat::Q5K,
            Self::Q6K => StorageFormat::Q6K,
        }
    }

    /// How a block's term is computed.
    pub(crate) const fn kind(self) -> Kind {
        match self {
            Self::Q4_0 | Self::Q8_0 => Kind::One,
            Self::Q4_1 | Self::Q4K | Self::Q5K => Kind::Min,
            Self::Q6K => Kind::Two,
        }
    }

    /// What the unsigned integers are above the signed ones of the formula.
    pub(crate) const fn offset(self) -> i32 {
        match self {
            Self::Q4_0 => 8,
            Self::Q8_0 => 128,
            Self::Q6K => 32,
            Self::Q4_1 | Self::Q4K | Self::Q5K => 0,
        }
    }
}

/// 32 weights of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    /// Unsigned: [`Format::offset`] above the integers of the formula.
    pub ints: [u8; BLOCK],
    /// Scales of the first and of the second 16 integers; equal but for Q6_K.
    pub scales: [f32; 2],
    /// Added to each value; +0 in formats without.
    pub min: f32,
}

impl Block {
    /// The 32 values, products and sum rounded.
    ///
    /// # Panics
    /// If `out` is shorter than 32.
    pub(crate) fn expand(&self, format: Format, out: &mut [f32]) {
        for (i, (out, &q)) in out[..BLOCK].iter_mut().zip(&self.ints).enumerate() {
            let product = (i32::from(q) - format.offset()) as f32 * self.scales[i / 16];
            *out = if format.kind() == Kind::Min { product + self.min } else { product };
        }
    }
}

/// The f16 at byte `at`.
pub(crate) fn half_at(bytes: &[u8], at: usize) -> f16 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]])
}

/// The 6-bit scale and minimum of sub-block `j` of 8, packed into 12 bytes.
#[inline(always)]
pub(crate) fn scale_min(j: usize, packed: &[u8]) -> [u8; 2] {
    if j < 4 {
        [packed[j] & 63, packed[j + 4] & 63]
    } else {
        [(packed[j + 4] & 15) | (packed[j - 4] >> 6) << 4, (packed[j + 4] >> 4) | (packed[j] >> 6) << 4]
    }
}

/// The unsigned integers of sub-block `sub` of a stored block.
#[inline(always)]
pub(crate) fn ints(format: Format, b: &[u8], sub: usize) -> [u8; BLOCK] {
    let mut out = [0; BLOCK];
    match format {
        Format::Q4_0 | Format::Q4_1 => {
            let quants = if format == Format::Q4_0 { &b[2..18] } else { &b[4..20] };
            for (i, q) in quants.iter().enumerate() {
                [out[i], out[i + 16]] = [q & 15, q >> 4];
            }
        }
        Format::Q8_0 => out.iter_mut().zip(&b[2..34]).for_each(|(out, q)| *out = q ^ 0x80),
        Format::Q4K | Format::Q5K => {
            let quants = &b[if format == Format::Q4K { 16 } else { 48 }..][sub / 2 * 32..][..32];
            let shift = sub % 2 * 4;
            out.iter_mut().zip(quants).for_each(|(out, q)| *out = q >> shift & 15);
            if format == Format::Q5K {
                out.iter_mut().zip(&b[16..48]).for_each(|(out, high)| *out |= (high >> sub & 1) << 4);
            }
        }
        Format::Q6K => {
            let (half, s) = (sub / 4, sub % 4);
            let (low, high) = (&b[half * 64 + s % 2 * 32..][..32], &b[128 + half * 32..][..32]);
            let shift = s / 2 * 4;
            for (out, (low, high)) in out.iter_mut().zip(low.iter().zip(high)) {
                *out = (low >> shift & 15) | (high >> (2 * s) & 3) << 4;
            }
        }
    }
    out
}

/// The two 8-bit scales of sub-block `sub` of a Q6_K block.
#[inline(always)]
pub(crate) fn q6_scales(b: &[u8], sub: usize) -> [u8; 2] {
    [b[192 + sub * 2], b[192 + sub * 2 + 1]]
}
