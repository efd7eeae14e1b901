//! MXFP4: 32 elements of 4 bits that share a power of two (Open Compute Project, "Microscaling Formats (MX) Specification", 1.0).
//!
//! An element is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign in its highest bit; a scale `s` is `2^(s - 127)`. In Hugging Face's files a block is
//! 16 bytes, the earlier of two elements in the low bits.
//!
//! Two formats that kernels know have these values exactly. Q8_0 has integers and a scale in f16 for each 32: twice an element is an integer,
//! and f16 has the powers of two from -24 to 15. bf16 has all of them, in twice the memory.

use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;
use half::{bf16, f16};
use std::ops::RangeInclusive;

/// Elements that share a scale.
pub(super) const BLOCK: usize = 32;
/// Bytes of their elements.
pub(super) const BLOCK_BYTES: usize = BLOCK / 2;

/// Largest scale with which every element is finite: 6 times its power of two is below 2^128.
const SCALE_MAX: u8 = 252;
/// Scales with which half of an integer is that of Q8_0.
const OF_Q8_0: RangeInclusive<u8> = 128 - 24..=128 + 15;

/// Twice each element. Both zeros are one.
const DOUBLED: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// The power of two of twice an element.
fn power(scale: u8) -> f64 {
    2f64.powi(i32::from(scale) - 128)
}

/// Rows as a format that has their values: Q8_0 if it has all scales of the matrix, or else bf16.
///
/// # Errors
/// With a scale that makes elements infinite or not a number.
///
/// # Panics
/// If a row has not as many bytes of blocks as its scales need.
pub(super) fn convert<'a>(
    rows: impl Iterator<Item = (&'a [u8], &'a [u8])> + Clone,
) -> Result<StoredTensor<'static>, u8> {
    let scales = rows.clone().flat_map(|(_, scales)| scales);
    if let Some(scale) = scales.clone().find(|scale| **scale > SCALE_MAX) {
        return Err(*scale);
    }
    let fits = scales.clone().all(|scale| OF_Q8_0.contains(scale));
    let format = if fits { StorageFormat::Q8_0 } else { StorageFormat::Bf16 };
    let each = format.row_bytes(BLOCK).unwrap_or(0);
    let mut bytes = Vec::with_capacity(scales.count() * each);
    for (blocks, scales) in rows {
        assert_eq!(blocks.len(), scales.len() * BLOCK_BYTES);
        for (block, scale) in blocks.chunks_exact(BLOCK_BYTES).zip(scales) {
            let doubled = block.iter().flat_map(|pair| [pair & 15, pair >> 4]).map(|code| DOUBLED[usize::from(code)]);
            let power = power(*scale);
            if fits {
                bytes.extend(f16::from_f64(power).to_le_bytes());
                bytes.extend(doubled.map(|q| q as u8));
            } else {
                bytes.extend(doubled.flat_map(|q| bf16::from_f64(f64::from(q) * power).to_le_bytes()));
            }
        }
    }
    Ok(StoredTensor { format, bytes: bytes.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_exact_with_every_scale() {
        const MAGNITUDES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let codes: Vec<u8> = (0..BLOCK as u8).map(|i| i % 16).collect();
        let block: Vec<u8> = codes.chunks_exact(2).map(|pair| pair[0] | pair[1] << 4).collect();
        let value = |code: u8, scale: u8| {
            let magnitude = MAGNITUDES[usize::from(code & 7)] * 2f64.powi(i32::from(scale) - 127);
            if code & 8 == 0 { magnitude } else { -magnitude }
        };
        let check = |scales: &[u8], format: StorageFormat| {
            let blocks = block.repeat(scales.len());
            let tensor = convert(std::iter::once((&blocks[..], scales))).unwrap();
            assert_eq!(tensor.format, format, "{scales:?}");
            let mut got = vec![0.0; scales.len() * BLOCK];
            tensor.format.expand(&tensor.bytes, &mut got);
            let want = scales.iter().flat_map(|scale| codes.iter().map(|code| value(*code, *scale)));
            assert!(got.iter().map(|x| f64::from(*x)).eq(want), "{scales:?}: {got:?}");
        };
        for scale in 0..=SCALE_MAX {
            check(&[scale], if (104..=143).contains(&scale) { StorageFormat::Q8_0 } else { StorageFormat::Bf16 });
        }
        check(&[104, 143, 120], StorageFormat::Q8_0);
        check(&[120, 103], StorageFormat::Bf16);
        for scale in [253, 254, 255] {
            assert_eq!(convert(std::iter::once((&block[..], &[scale][..]))).unwrap_err(), scale);
        }
    }
}
