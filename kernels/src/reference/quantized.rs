//! Integers and scales of GGML's quantized formats, and the scalar arithmetic of `i8x32` over them; see `docs/numerics.md`.

use crate::numerics::{LARGEST_MIN, QUANTIZED_BLOCK as BLOCK};
use crate::storage::{StorageFormat, half_at, scale_min};

/// Scales of the integers of a block, and what is added to each value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Scales {
    /// `scale * q`
    One {
        /// Of all 32 integers.
        scale: f32,
    },
    /// `scale * q + min`
    WithMin {
        /// Of all 32 integers.
        scale: f32,
        /// Added to each value.
        min: f32,
    },
    /// `scales[i / 16] * q`
    Two {
        /// Of the first and of the second 16 integers.
        scales: [f32; 2],
    },
}

/// 32 weights of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Block {
    /// As the formula of the format uses them: signed, or 0 to 31.
    pub(crate) ints: [i8; BLOCK],
    /// Scales and minimum.
    pub(crate) scales: Scales,
}

/// 32 activations of one row.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Activations {
    /// Factor of the integers.
    pub(crate) scale: f32,
    /// -127 to 127.
    pub(crate) ints: [i8; BLOCK],
}

impl Activations {
    /// Quantizes at most 32 values; what is missing is zero.
    pub(crate) fn new(x: &[f32]) -> Self {
        let zero = Self { scale: 0.0, ints: [0; BLOCK] };
        if x.iter().any(|x| !x.is_finite()) {
            return Self { scale: f32::NAN, ..zero };
        }
        let largest = x.iter().fold(0.0f32, |max, x| max.max(x.abs()));
        if largest < LARGEST_MIN {
            return zero;
        }
        let inverse = 127.0 / largest;
        let mut ints = [0; BLOCK];
        ints.iter_mut().zip(x).for_each(|(q, x)| *q = (x * inverse).round_ties_even() as i8);
        Self { scale: largest / 127.0, ints }
    }
}

/// The blocks of one stored row of `k` values, in order.
///
/// # Panics
/// If the format is not quantized or the bytes are no whole blocks.
pub(crate) fn blocks(format: StorageFormat, row: &[u8]) -> Vec<Block> {
    let (_, size) = format.block();
    assert!(format.is_quantized() && row.len().is_multiple_of(size), "{format:?}, {} bytes", row.len());
    row.chunks_exact(size).flat_map(|bytes| of_stored(format, bytes)).collect()
}

/// The blocks of 32 in one block of the stored format.
fn of_stored(format: StorageFormat, b: &[u8]) -> Vec<Block> {
    let nibbles = |quants: &[u8], offset: i8| {
        std::array::from_fn(|i| (if i < 16 { quants[i] & 15 } else { quants[i - 16] >> 4 }) as i8 - offset)
    };
    match format {
        StorageFormat::Q4_0 => {
            vec![Block { ints: nibbles(&b[2..], 8), scales: Scales::One { scale: half_at(b, 0) } }]
        }
        StorageFormat::Q4_1 => {
            let scales = Scales::WithMin { scale: half_at(b, 0), min: half_at(b, 2) };
            vec![Block { ints: nibbles(&b[4..], 0), scales }]
        }
        StorageFormat::Q8_0 => {
            vec![Block { ints: std::array::from_fn(|i| b[2 + i] as i8), scales: Scales::One { scale: half_at(b, 0) } }]
        }
        StorageFormat::Q4K | StorageFormat::Q5K => {
            let (d, d_min) = (half_at(b, 0), half_at(b, 2));
            let (high, quants) =
                if format == StorageFormat::Q5K { (&b[16..48], &b[48..]) } else { (&b[..0], &b[16..]) };
            let sub = |s: usize| {
                let (scale, min) = scale_min(s, &b[4..16]);
                let int = |i: usize| {
                    let low = quants[s / 2 * 32 + i] >> (4 * (s % 2)) & 15;
                    (low | high.get(i).map_or(0, |high| (high >> s & 1) << 4)) as i8
                };
                let scales = Scales::WithMin { scale: d * scale, min: -(d_min * min) };
                Block { ints: std::array::from_fn(int), scales }
            };
            (0..8).map(sub).collect()
        }
        StorageFormat::Q6K => {
            let (low, high, scales, d) = (&b[..128], &b[128..192], &b[192..208], half_at(b, 208));
            let sub = |sub: usize| {
                let (half, s) = (sub / 4, sub % 4);
                let int = |i: usize| {
                    let low = low[half * 64 + s % 2 * 32 + i] >> (s / 2 * 4) & 15;
                    (low | (high[half * 32 + i] >> (2 * s) & 3) << 4) as i8 - 32
                };
                let scale = |part: usize| d * f32::from(scales[half * 8 + s * 2 + part] as i8);
                Block { ints: std::array::from_fn(int), scales: Scales::Two { scales: [scale(0), scale(1)] } }
            };
            (0..8).map(sub).collect()
        }
        StorageFormat::F32 | StorageFormat::F16 | StorageFormat::Bf16 => Vec::new(),
    }
}

/// `sum_k x[k] * w[k]`
pub(crate) fn dot(x: &[Activations], w: &[Block]) -> f32 {
    x.iter().zip(w).fold(0.0, |acc, (x, w)| x.scale.mul_add(term(x, w), acc))
}

/// The sum of one block, without the activations' scale.
fn term(x: &Activations, w: &Block) -> f32 {
    let products = |range: std::ops::Range<usize>| {
        let sum: i32 =
            x.ints[range.clone()].iter().zip(&w.ints[range]).map(|(x, w)| i32::from(*x) * i32::from(*w)).sum();
        sum as f32
    };
    match w.scales {
        Scales::One { scale } => scale * products(0..BLOCK),
        Scales::WithMin { scale, min } => {
            let sum: i32 = x.ints.iter().map(|x| i32::from(*x)).sum();
            scale.mul_add(products(0..BLOCK), min * sum as f32)
        }
        Scales::Two { scales: [first, second] } => second.mul_add(products(16..BLOCK), first * products(0..16)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bytes without structure, with scales that are numbers.
    fn stored(format: StorageFormat, seed: u32) -> Vec<u8> {
        let (_, size) = format.block();
        let mix = |i: u32| {
            (i.wrapping_add(seed).wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77) >> 11) as u8
        };
        let mut bytes: Vec<u8> = (0..size as u32).map(mix).collect();
        let mut half = |at: usize, x: f32| bytes[at..at + 2].copy_from_slice(&half::f16::from_f32(x).to_le_bytes());
        match format {
            StorageFormat::Q6K => half(208, 0.013),
            _ => half(0, 0.021),
        }
        if matches!(format, StorageFormat::Q4_1 | StorageFormat::Q4K | StorageFormat::Q5K) {
            half(2, -0.17);
        }
        bytes
    }

    #[test]
    fn blocks_are_what_the_format_expands_to() {
        for (format, seed) in StorageFormat::QUANTIZED.into_iter().flat_map(|f| [1, 77, 5000].map(|seed| (f, seed))) {
            let bytes = stored(format, seed);
            let mut expanded = vec![0.0; format.block().0];
            format.expand(&bytes, &mut expanded);
            for (block, expanded) in blocks(format, &bytes).iter().zip(expanded.chunks(BLOCK)) {
                for (i, (&q, &want)) in block.ints.iter().zip(expanded).enumerate() {
                    let q = f32::from(q);
                    let got = match block.scales {
                        Scales::One { scale } => q * scale,
                        Scales::WithMin { scale, min } => q * scale + min,
                        Scales::Two { scales } => scales[i / 16] * q,
                    };
                    assert!((got - want).abs() <= 1e-6 * (1.0 + want.abs()), "{format:?}: {got} is not {want}");
                }
            }
        }
    }

    #[test]
    fn the_dot_product_is_that_of_the_expanded_values() {
        for format in StorageFormat::QUANTIZED {
            let elements = format.block().0;
            let bytes = stored(format, 3);
            let mut expanded = vec![0.0; elements];
            format.expand(&bytes, &mut expanded);
            let x: Vec<f32> = (0..elements).map(|i| ((i * 37 % 101) as f32 - 50.0) / 30.0).collect();
            let quantized: Vec<Activations> = x.chunks(BLOCK).map(Activations::new).collect();
            let rounded = quantized.iter().flat_map(|block| block.ints.map(|q| f64::from(q) * f64::from(block.scale)));
            let want: f64 = rounded.zip(&expanded).map(|(x, w)| x * f64::from(*w)).sum();
            let size: f64 = x.iter().zip(&expanded).map(|(x, w)| f64::from(x * w).abs()).sum();
            let got = f64::from(dot(&quantized, &blocks(format, &bytes)));
            assert!((got - want).abs() <= 1e-6 * size, "{format:?}: {got} is not {want}");
        }
    }

    #[test]
    fn activations_are_rounded_to_even_and_never_past_127() {
        let ints = |x: &[f32]| Activations::new(x).ints;
        assert_eq!(ints(&[127.0, 0.5, 1.5, 2.5, -0.5, -3.5])[..6], [127, 0, 2, 2, 0, -4]);
        for largest in [1e-20f32, 0.1, 3.3, 1e38, f32::MAX] {
            let block = Activations::new(&[largest, -largest, largest * 0.999_999_9]);
            assert_eq!(block.ints[..3], [127, -127, 127], "{largest}");
        }
        for small in [0.0, -0.0, 1e-40, LARGEST_MIN * 0.99] {
            assert_eq!(Activations::new(&[small]), Activations { scale: 0.0, ints: [0; BLOCK] });
        }
        for x in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let block = Activations::new(&[1.0, x]);
            assert!(
                block.scale.is_nan()
                    && dot(&[block], &blocks(StorageFormat::Q4_0, &stored(StorageFormat::Q4_0, 1))).is_nan()
            );
        }
    }

    #[test]
    fn the_order_is_the_written_one() {
        // 2^24 absorbs a single 1 that is added to it.
        const BIG: f32 = 16_777_216.0;
        let block = |scales| Block { ints: [1; BLOCK], scales };
        let x = |scale: f32| Activations { scale, ints: std::array::from_fn(|i| i8::from(i == 0)) };
        let one = |scale| block(Scales::One { scale });
        assert_eq!(dot(&[x(1.0), x(1.0), x(1.0)], &[one(BIG), one(1.0), one(1.0)]), BIG, "blocks ascend");
        // The term is rounded before the activations' scale multiplies it.
        let with_min = block(Scales::WithMin { scale: BIG, min: 1.0 });
        assert_eq!(dot(&[x(3.0)], &[with_min]), 3.0 * BIG);
        let both = Activations { scale: 1.0, ints: std::array::from_fn(|i| i8::from(i % 16 == 0)) };
        assert_eq!(dot(&[both, both], &[block(Scales::Two { scales: [BIG, 1.0] }), one(0.0)]), BIG);
    }
}
