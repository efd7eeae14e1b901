//! MXFP4: 32 elements of 4 bits that share a power of two (Open Compute Project, "Microscaling Formats (MX) Specification", 1.0).
//!
//! An element is 0, 0.5, 1, 1.5, 2, 3, 4 or 6, with a sign in its highest bit; a scale `s` is `2^(s - 127)`. In Hugging Face's files a block is
//! 16 bytes, the earlier of two elements in the low bits.

use half::bf16;
use std::sync::LazyLock;

/// Elements that share a scale.
pub(super) const BLOCK: usize = 32;
/// Bytes of their elements.
pub(super) const BLOCK_BYTES: usize = BLOCK / 2;
/// Largest scale with which every element is finite: 6 times its power of two is below 2^128.
const SCALE_MAX: u8 = 252;

const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];

/// Bits in bf16 of each element with each scale. All are exact: two bits of significand, and at least 2^-128.
static WORDS: LazyLock<Vec<[[u8; 2]; 16]>> = LazyLock::new(|| {
    let words = |scale: u8| {
        let power = 2f64.powi(i32::from(scale) - 127);
        std::array::from_fn(|code| {
            let magnitude = f64::from(MAGNITUDES[code & 7]) * power;
            bf16::from_f64(if code & 8 == 0 { magnitude } else { -magnitude }).to_le_bytes()
        })
    };
    (0..=SCALE_MAX).map(words).collect()
});

/// Appends blocks as bf16, of equal value.
///
/// # Errors
/// With a scale that makes elements infinite or not a number.
///
/// # Panics
/// If the bytes are not those of as many blocks as there are scales.
pub(super) fn expand(blocks: &[u8], scales: &[u8], out: &mut Vec<u8>) -> Result<(), u8> {
    assert_eq!(blocks.len(), scales.len() * BLOCK_BYTES);
    for (block, scale) in blocks.chunks_exact(BLOCK_BYTES).zip(scales) {
        let words = WORDS.get(usize::from(*scale)).ok_or(*scale)?;
        for pair in block {
            out.extend_from_slice(&words[usize::from(pair & 15)]);
            out.extend_from_slice(&words[usize::from(pair >> 4)]);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_element_is_exact_with_every_scale() {
        let all: Vec<u8> = (0..16).map(|pair| pair * 16 + 15 - pair).collect();
        for scale in 0..=SCALE_MAX {
            let mut out = Vec::new();
            expand(&all, &[scale], &mut out).unwrap();
            let value = |code: u8| {
                let magnitude = f64::from(MAGNITUDES[usize::from(code & 7)]);
                (if code & 8 == 0 { magnitude } else { -magnitude }) * 2f64.powi(i32::from(scale) - 127)
            };
            let want: Vec<f64> = all.iter().flat_map(|pair| [value(pair & 15), value(pair >> 4)]).collect();
            let got: Vec<f64> =
                out.chunks_exact(2).map(|b| f64::from(bf16::from_le_bytes([b[0], b[1]]).to_f32())).collect();
            assert_eq!(got.len(), BLOCK);
            for (got, want) in got.iter().zip(&want) {
                assert_eq!(got.to_bits(), want.to_bits(), "{got} is not {want}, scale {scale}");
            }
        }
        for scale in [253, 254, 255] {
            assert_eq!(expand(&all, &[scale], &mut Vec::new()), Err(scale));
        }
    }
}
