//! Rounding to element types (nearest even) and exact widening.

use baton_types::Dtype;
use half::{bf16, f16};

/// `x` after a round trip through `dtype`.
pub fn through(dtype: Dtype, x: f32) -> f32 {
    match dtype {
        Dtype::F32 => x,
        Dtype::F16 => f16::from_f32(x).to_f32(),
        Dtype::Bf16 => bf16::from_f32(x).to_f32(),
    }
}

/// Encodes `data` little-endian in `dtype`, appending to `out`.
pub fn encode(dtype: Dtype, data: &[f32], out: &mut Vec<u8>) {
    match dtype {
        Dtype::F32 => data.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes())),
        Dtype::F16 => data.iter().for_each(|x| out.extend_from_slice(&f16::from_f32(*x).to_le_bytes())),
        Dtype::Bf16 => data.iter().for_each(|x| out.extend_from_slice(&bf16::from_f32(*x).to_le_bytes())),
    }
}

/// Decodes little-endian `bytes` of `dtype` into `out`.
///
/// # Panics
/// If the lengths do not match.
pub fn decode(dtype: Dtype, bytes: &[u8], out: &mut [f32]) {
    assert_eq!(bytes.len(), out.len() * dtype.bytes());
    let two = |b: &[u8]| u16::from_le_bytes([b[0], b[1]]);
    for (x, b) in out.iter_mut().zip(bytes.chunks_exact(dtype.bytes())) {
        *x = match dtype {
            Dtype::F32 => f32::from_le_bytes([b[0], b[1], b[2], b[3]]),
            Dtype::F16 => f16::from_bits(two(b)).to_f32(),
            Dtype::Bf16 => bf16::from_bits(two(b)).to_f32(),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ties_go_to_even() {
        for (dtype, x, want) in [
            (Dtype::Bf16, 1.0 + 1.0 / 256.0, 1.0),
            (Dtype::Bf16, 1.0 + 3.0 / 256.0, 1.0 + 4.0 / 256.0),
            (Dtype::F16, 1.0 + 1.0 / 2048.0, 1.0),
            (Dtype::F32, 1.0 + f32::EPSILON, 1.0 + f32::EPSILON),
        ] {
            assert_eq!(through(dtype, x), want, "{dtype}");
            let (mut bytes, mut back) = (Vec::new(), [0.0]);
            encode(dtype, &[x], &mut bytes);
            decode(dtype, &bytes, &mut back);
            assert_eq!(back[0], want, "{dtype}");
        }
    }
}
