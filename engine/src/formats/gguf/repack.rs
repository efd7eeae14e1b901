//! Formats that no device takes, as formats that devices take.
//!
//! Q5_0 and IQ4_NL are integers of 8 bits with one scale per 32: exactly Q8_0. So is MXFP4, if its scales are numbers of f16. Q3_K is exactly Q6_K:
//! integers of 3 bits and signed scales per 16. Q5_1, Q2_K and IQ4_XS have minima or scales that no format holds, so they become f32. Every
//! value is that of ggml's `dequantize_row_*`, as bits.

use super::format::Repacked;
use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;
use half::f16;

/// Elements of a block that is not a super-block.
const BLOCK: usize = 32;

/// The values of IQ4's integers (ggml's `kvalues_iq4nl`).
const IQ4: [i8; 16] = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113];
/// Twice the values of E2M1 (OCP Microscaling Formats 1.0), by their bits.
const E2M1: [i8; 16] = [0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12];

/// Whole blocks of `from` in a format that devices take.
pub(super) fn repack(from: Repacked, bytes: &[u8]) -> StoredTensor<'static> {
    let blocks = bytes.chunks_exact(from.block().1);
    let mut out = Vec::with_capacity(2 * bytes.len());
    let mut f32s = |values: &[f32]| values.iter().for_each(|x| out.extend_from_slice(&x.to_le_bytes()));
    let format = match from {
        Repacked::Q5_1 => {
            blocks.for_each(|b| f32s(&q5_1(b)));
            StorageFormat::F32
        }
        Repacked::Q2_K => {
            blocks.for_each(|b| f32s(&q2_k(b)));
            StorageFormat::F32
        }
        Repacked::IQ4_XS => {
            blocks.for_each(|b| f32s(&iq4_xs(b)));
            StorageFormat::F32
        }
        Repacked::MXFP4 if blocks.clone().any(|b| mxfp4_scale(b).is_none()) => {
            blocks.for_each(|b| f32s(&mxfp4(b)));
            StorageFormat::F32
        }
        Repacked::MXFP4 => {
            let scale = |b| mxfp4_scale(b).expect("each is a number of f16").to_le_bytes();
            blocks.for_each(|b| q8_0(&mut out, scale(b), nibbles(&b[1..]).map(|q| E2M1[usize::from(q)])));
            StorageFormat::Q8_0
        }
        Repacked::Q5_0 => {
            blocks.for_each(|b| q8_0(&mut out, [b[0], b[1]], fives(&b[2..]).map(|q| q as i8 - 16)));
            StorageFormat::Q8_0
        }
        Repacked::IQ4_NL => {
            blocks.for_each(|b| q8_0(&mut out, [b[0], b[1]], nibbles(&b[2..]).map(|q| IQ4[usize::from(q)])));
            StorageFormat::Q8_0
        }
        Repacked::Q3_K => {
            blocks.for_each(|b| q6_k(&mut out, b));
            StorageFormat::Q6K
        }
    };
    StoredTensor { format, bytes: out.into() }
}

fn half_at(bytes: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32()
}

/// A block of Q8_0.
fn q8_0(out: &mut Vec<u8>, scale: [u8; 2], ints: [i8; BLOCK]) {
    out.extend(scale);
    out.extend(ints.map(|q| q as u8));
}

/// 32 integers of 4 bits in 16 bytes, those of the low nibbles first.
fn nibbles(bytes: &[u8]) -> [u8; BLOCK] {
    std::array::from_fn(|i| bytes[i % 16] >> (i / 16 * 4) & 15)
}

/// 32 integers of 5 bits: 32 fifth bits, then nibbles.
fn fives(bytes: &[u8]) -> [u8; BLOCK] {
    let low = nibbles(&bytes[4..]);
    std::array::from_fn(|i| low[i] | (bytes[i / 8] >> (i % 8) & 1) << 4)
}

fn q5_1(b: &[u8]) -> [f32; BLOCK] {
    let (d, m) = (half_at(b, 0), half_at(b, 2));
    fives(&b[4..]).map(|q| d * f32::from(q) + m)
}

/// Element `i` of 256 integers of 2 bits: 128 in 32 bytes, those of the lowest bits first.
fn two_bits(bytes: &[u8], i: usize) -> u8 {
    bytes[i / 128 * 32 + i % 32] >> (i % 128 / 32 * 2) & 3
}

/// For each 16 integers a byte of scale and minimum, then integers, then their factors.
fn q2_k(b: &[u8]) -> [f32; 256] {
    let (scales, ints, d, d_min) = (&b[..16], &b[16..80], half_at(b, 80), half_at(b, 82));
    std::array::from_fn(|i| {
        let scale = scales[i / 16];
        d * f32::from(scale & 15) * f32::from(two_bits(ints, i)) - d_min * f32::from(scale >> 4)
    })
}

/// A block of Q3_K (32 bytes of third bits, integers, scales, their factor) as one of Q6_K.
fn q6_k(out: &mut Vec<u8>, b: &[u8]) {
    let (third, ints, scales, d) = (&b[..32], &b[32..96], &b[96..108], &b[108..]);
    let int = |i: usize| two_bits(ints, i) + 4 * (third[i % 32] >> (i / 32) & 1) + 32 - 4;
    let scale = |j: usize| (scales[j % 8] >> (j / 8 * 4) & 15 | (scales[8 + j % 4] >> (j / 4 * 2) & 3) << 4) as i8 - 32;
    let low = |at: usize| {
        let i = at / 64 * 128 + at % 64;
        int(i) & 15 | (int(i + 64) & 15) << 4
    };
    let high = |at: usize| (0..4).fold(0, |bits, s| bits | int(at / 32 * 128 + s * 32 + at % 32) >> 4 << (2 * s));
    out.extend((0..128).map(low));
    out.extend((0..64).map(high));
    out.extend((0..16).map(|j| scale(j) as u8));
    out.extend(d);
}

/// Factor, upper two bits and lower four of each of 8 scales, integers.
fn iq4_xs(b: &[u8]) -> [f32; 256] {
    let (d, high) = (half_at(b, 0), u16::from_le_bytes([b[2], b[3]]));
    std::array::from_fn(|i| {
        let sub = i / BLOCK;
        let scale = (b[4 + sub / 2] >> (sub % 2 * 4) & 15) | ((high >> (2 * sub)) as u8 & 3) << 4;
        let q = b[8 + sub * 16 + i % 16] >> (i % BLOCK / 16 * 4) & 15;
        d * f32::from(scale as i8 - 32) * f32::from(IQ4[usize::from(q)])
    })
}

/// Half of E8M0's `2^(e - 127)`, since [`E2M1`] has doubled values.
fn half_e8m0(e: u8) -> f32 {
    f32::from_bits(if e < 2 { 0x0020_0000 << e } else { u32::from(e - 1) << 23 })
}

/// The scale as a number of f16, if it is one. Zeros have any scale.
fn mxfp4_scale(b: &[u8]) -> Option<f16> {
    let wide = half_e8m0(b[0]);
    let scale = f16::from_f32(wide);
    if nibbles(&b[1..]).iter().all(|q| E2M1[usize::from(*q)] == 0) {
        return Some(f16::ZERO);
    }
    (scale.to_f32() == wide).then_some(scale)
}

fn mxfp4(b: &[u8]) -> [f32; BLOCK] {
    nibbles(&b[1..]).map(|q| half_e8m0(b[0]) * f32::from(E2M1[usize::from(q)]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn number(low: u8, high: u8) -> f32 {
        f16::from_le_bytes([low, high]).to_f32()
    }

    fn expanded(from: Repacked, block: &[u8]) -> (StorageFormat, Vec<f32>) {
        let StoredTensor { format, bytes } = repack(from, block);
        let mut values = vec![f32::NAN; from.block().0];
        format.expand(&bytes, &mut values);
        (format, values)
    }

    /// The definitions of the formats, an element at a time, on random blocks. `fixtures/quant.bin` has the values of ggml.
    #[test]
    fn blocks_are_what_their_format_says() {
        let mut seed = 1u32;
        let mut next = move || {
            seed = seed.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_add(0x85eb_ca77);
            (seed >> 11) as u8
        };
        for _ in 0..200 {
            let mut block = |size: usize, halves: &[usize]| -> Vec<u8> {
                let mut bytes: Vec<u8> = (0..size).map(|_| next()).collect();
                // Finite: the largest exponent is not all ones.
                halves.iter().for_each(|at| bytes[at + 1] &= 0xbb);
                bytes
            };
            let five = |high: &[u8], low: &[u8], i: usize| {
                let low = if i < 16 { low[i] % 16 } else { low[i - 16] / 16 };
                f32::from(low + 16 * (high[i / 8] >> (i % 8) & 1))
            };
            let b = block(22, &[0]);
            let (format, values) = expanded(Repacked::Q5_0, &b);
            assert_eq!(format, StorageFormat::Q8_0);
            assert!((0..32).all(|i| values[i] == number(b[0], b[1]) * (five(&b[2..6], &b[6..], i) - 16.0)));

            let b = block(24, &[0, 2]);
            let (_, values) = expanded(Repacked::Q5_1, &b);
            let is = |i| number(b[0], b[1]) * five(&b[4..8], &b[8..], i) + number(b[2], b[3]);
            assert!((0..32).all(|i| values[i] == is(i)));

            let b = block(84, &[80, 82]);
            let (_, values) = expanded(Repacked::Q2_K, &b);
            let is = |i: usize| {
                let (half, pair, at) = (i / 128, i / 32 % 4, i % 32);
                let q = (b[16 + 32 * half + at] / 4u8.pow(pair as u32)) % 4;
                let (d, min) = (number(b[80], b[81]), number(b[82], b[83]));
                d * f32::from(b[i / 16] % 16) * f32::from(q) - min * f32::from(b[i / 16] / 16)
            };
            assert!((0..256).all(|i| values[i] == is(i)));

            let b = block(110, &[108]);
            let (format, values) = expanded(Repacked::Q3_K, &b);
            assert_eq!(format, StorageFormat::Q6K);
            let is = |i: usize| {
                let (half, pair, at) = (i / 128, i / 32 % 4, i % 32);
                let q = i32::from(b[32 + 32 * half + at] / 4u8.pow(pair as u32) % 4);
                let q = if b[at] >> (4 * half + pair) & 1 == 1 { q } else { q - 4 };
                let sub = i / 16;
                let low = if sub < 8 { b[96 + sub] % 16 } else { b[96 + sub - 8] / 16 };
                let scale = i32::from(low) + 16 * i32::from(b[104 + sub % 4] / 4u8.pow(sub as u32 / 4) % 4) - 32;
                number(b[108], b[109]) * scale as f32 * q as f32
            };
            assert!((0..256).all(|i| values[i] == is(i)));

            let b = block(18, &[0]);
            let (format, values) = expanded(Repacked::IQ4_NL, &b);
            assert_eq!(format, StorageFormat::Q8_0);
            let four = |bytes: &[u8], i: usize| usize::from(if i < 16 { bytes[i] % 16 } else { bytes[i - 16] / 16 });
            assert!((0..32).all(|i| values[i] == number(b[0], b[1]) * f32::from(IQ4[four(&b[2..], i)])));

            let b = block(136, &[0]);
            let (_, values) = expanded(Repacked::IQ4_XS, &b);
            let is = |i: usize| {
                let sub = i / 32;
                let low = if sub.is_multiple_of(2) { b[4 + sub / 2] % 16 } else { b[4 + sub / 2] / 16 };
                let scale = i32::from(low) + 16 * i32::from(b[2 + sub / 4] / 4u8.pow(sub as u32 % 4) % 4) - 32;
                number(b[0], b[1]) * scale as f32 * f32::from(IQ4[four(&b[8 + 16 * sub..], i % 32)])
            };
            assert!((0..256).all(|i| values[i] == is(i)));
        }
    }

    #[test]
    fn scales_of_mxfp4_that_f16_lacks_make_numbers() {
        let values = |e: u8, q: u8| {
            let (format, values) = expanded(Repacked::MXFP4, &[&[e][..], &[q; 16]].concat());
            (format, values[0], values[16])
        };
        // 0x72: 1.0 in the low nibbles and 6.0 in the high ones.
        for (e, format) in [
            (0, StorageFormat::F32),
            (1, StorageFormat::F32),
            (103, StorageFormat::F32),
            (104, StorageFormat::Q8_0),
            (127, StorageFormat::Q8_0),
            (143, StorageFormat::Q8_0),
            (144, StorageFormat::F32),
            (250, StorageFormat::F32),
        ] {
            let scale = (f64::from(e) - 127.0).exp2() as f32;
            assert_eq!(values(e, 0x72), (format, scale, 6.0 * scale), "{e}");
        }
        assert_eq!(values(127, 0xfa), (StorageFormat::Q8_0, -1.0, -6.0));
        assert_eq!(values(0, 0x80), (StorageFormat::Q8_0, 0.0, 0.0), "zeros have any scale");
    }
}
