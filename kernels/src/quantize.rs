//! Rows of GGML's quantized formats from numbers, for tests: models and layers of class `i8x32` that come from no file. Compiled only with
//! the feature `testing`.

use crate::numerics::QUANTIZED_BLOCK as BLOCK;
use crate::storage::{StorageFormat, half_at};
use half::f16;

/// Where a stored block has little-endian f16: its scale, and its minimum if there is one. In F16 that is the element.
pub fn halves(format: StorageFormat) -> &'static [usize] {
    match format {
        StorageFormat::Q6K => &[208],
        StorageFormat::Q4_1 | StorageFormat::Q4K | StorageFormat::Q5K => &[0, 2],
        _ => &[0],
    }
}

/// Stored blocks whose values are near `values`.
///
/// # Panics
/// If the format is not quantized or the values are no whole blocks.
pub fn quantize(format: StorageFormat, values: &[f32]) -> Vec<u8> {
    let (elements, _) = format.block();
    assert!(values.len().is_multiple_of(elements), "{} values are no whole blocks of {format:?}", values.len());
    let stored = match format {
        StorageFormat::Q4_0 => q4_0,
        StorageFormat::Q4_1 => q4_1,
        StorageFormat::Q8_0 => q8_0,
        StorageFormat::Q4K => q4_k,
        StorageFormat::Q5K => q5_k,
        StorageFormat::Q6K => q6_k,
        StorageFormat::F32 | StorageFormat::F16 | StorageFormat::Bf16 => panic!("{format:?} is not quantized"),
    };
    values.chunks_exact(elements).flat_map(stored).collect()
}

/// A factor as it is stored, and the value that the stored one has.
fn half(x: f32) -> ([u8; 2], f32) {
    let bytes = f16::from_f32(x).to_le_bytes();
    (bytes, half_at(&bytes, 0))
}

/// `x / step` as an integer of `low ..= high`; 0 without a step.
fn int(x: f32, step: f32, low: i32, high: i32) -> i32 {
    if step == 0.0 { 0 } else { ((x / step).round() as i32).clamp(low, high) }
}

fn largest(values: impl Iterator<Item = f32>) -> f32 {
    values.fold(0.0, |max, x| max.max(x.abs()))
}

/// Integers of 4 bits: the first half of the block in the low ones.
fn nibbles(ints: &[u8]) -> impl Iterator<Item = u8> + '_ {
    let (low, high) = ints.split_at(ints.len() / 2);
    low.iter().zip(high).map(|(low, high)| low | high << 4)
}

fn q4_0(x: &[f32]) -> Vec<u8> {
    let (stored, d) = half(largest(x.iter().copied()) / 8.0);
    let ints: Vec<u8> = x.iter().map(|x| (int(*x, d, -8, 7) + 8) as u8).collect();
    stored.into_iter().chain(nibbles(&ints)).collect()
}

fn q4_1(x: &[f32]) -> Vec<u8> {
    let (min, max) = x.iter().fold((f32::MAX, f32::MIN), |(min, max), x| (min.min(*x), max.max(*x)));
    let ((stored_d, d), (stored_m, m)) = (half((max - min) / 15.0), half(min));
    let ints: Vec<u8> = x.iter().map(|x| int(x - m, d, 0, 15) as u8).collect();
    stored_d.into_iter().chain(stored_m).chain(nibbles(&ints)).collect()
}

fn q8_0(x: &[f32]) -> Vec<u8> {
    let (stored, d) = half(largest(x.iter().copied()) / 127.0);
    stored.into_iter().chain(x.iter().map(|x| int(*x, d, -127, 127) as i8 as u8)).collect()
}

fn q4_k(x: &[f32]) -> Vec<u8> {
    let (mut out, ints) = with_minima(x, 15);
    out.extend(ints.chunks_exact(2 * BLOCK).flat_map(nibbles));
    out
}

fn q5_k(x: &[f32]) -> Vec<u8> {
    let (mut out, ints) = with_minima(x, 31);
    out.extend((0..BLOCK).map(|i| (0..8).fold(0, |high, sub| high | (ints[sub * BLOCK + i] >> 4) << sub)));
    let low: Vec<u8> = ints.iter().map(|int| int & 15).collect();
    out.extend(low.chunks_exact(2 * BLOCK).flat_map(nibbles));
    out
}

/// Scales and minima of a super-block of integers up to `most`, as stored, and the integers.
fn with_minima(x: &[f32], most: i32) -> (Vec<u8>, Vec<u8>) {
    let bounds: Vec<(f32, f32)> = x
        .chunks_exact(BLOCK)
        .map(|x| x.iter().fold((0.0f32, f32::MIN), |(min, max), x| (min.min(*x), max.max(*x))))
        .collect();
    let (steps, minima) =
        (bounds.iter().map(|(min, max)| (max - min) / most as f32), bounds.iter().map(|(min, _)| -min));
    let (stored_d, d) = half(largest(steps.clone()) / 63.0);
    let (stored_min, d_min) = half(largest(minima.clone()) / 63.0);
    let scales: Vec<u8> = steps.map(|step| int(step, d, 0, 63) as u8).collect();
    let minima: Vec<u8> = minima.map(|min| int(min, d_min, 0, 63) as u8).collect();
    let ints = x.iter().enumerate().map(|(i, x)| {
        let sub = i / BLOCK;
        int(x + d_min * f32::from(minima[sub]), d * f32::from(scales[sub]), 0, most) as u8
    });
    let mut out: Vec<u8> = stored_d.into_iter().chain(stored_min).collect();
    // The inverse of `storage::scale_min`.
    out.extend((0..4).map(|j| scales[j] | (scales[j + 4] >> 4) << 6));
    out.extend((0..4).map(|j| minima[j] | (minima[j + 4] >> 4) << 6));
    out.extend((4..8).map(|j| (scales[j] & 15) | minima[j] << 4));
    (out, ints.collect())
}

fn q6_k(x: &[f32]) -> Vec<u8> {
    let steps = x.chunks_exact(BLOCK / 2).map(|x| largest(x.iter().copied()) / 32.0);
    let (stored, d) = half(largest(steps.clone()) / 127.0);
    let scales: Vec<u8> = steps.map(|step| int(step, d, 0, 127) as u8).collect();
    let ints: Vec<u8> =
        x.iter().enumerate().map(|(i, x)| (int(*x, d * f32::from(scales[i / 16]), -32, 31) + 32) as u8).collect();
    let halves = || ints.chunks_exact(128);
    // Sub-blocks 0 and 2 share the first 32 bytes of a half's 64, 1 and 3 the others.
    let low = halves().flat_map(|half| (0..64).map(|i| (half[i] & 15) | half[i + 64] << 4));
    let high = halves()
        .flat_map(|half| (0..BLOCK).map(|i| (0..4).fold(0, |high, s| high | (half[s * BLOCK + i] >> 4) << (2 * s))));
    low.chain(high).chain(scales.iter().copied()).chain(stored).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values in -1 .. 1 without structure, of another size in each 16.
    fn values(count: u32) -> Vec<f32> {
        let mix = |i: u32| (i.wrapping_mul(0x9e37_79b1).rotate_left(13).wrapping_mul(0x85eb_ca77) >> 8) as f32;
        (0..count).map(|i| (mix(i) / (1 << 23) as f32 - 1.0) * (1.0 - (i / 16 % 4) as f32 * 0.2)).collect()
    }

    #[test]
    fn stored_values_are_within_a_step_of_the_numbers() {
        let steps = [
            (StorageFormat::Q4_0, 1.0 / 8.0),
            (StorageFormat::Q4_1, 2.0 / 15.0),
            (StorageFormat::Q8_0, 1.0 / 127.0),
            (StorageFormat::Q4K, 2.0 / 15.0),
            (StorageFormat::Q5K, 2.0 / 31.0),
            (StorageFormat::Q6K, 1.0 / 32.0),
        ];
        assert_eq!(steps.map(|(format, _)| format), StorageFormat::QUANTIZED);
        for (format, step) in steps {
            let values = values(1024);
            let stored = quantize(format, &values);
            assert_eq!(Some(stored.len()), format.row_bytes(values.len()));
            let mut expanded = vec![0.0; values.len()];
            format.expand(&stored, &mut expanded);
            let far = values.iter().zip(&expanded).map(|(x, y)| (x - y).abs()).fold(0.0, f32::max);
            // Scales are rounded too.
            assert!(far > 0.0 && far <= step * 1.1, "{format:?}: {far}");
        }
    }

    #[test]
    fn zeros_stay_zeros() {
        for format in StorageFormat::QUANTIZED {
            let mut expanded = [1.0; 256];
            format.expand(&quantize(format, &[0.0; 256]), &mut expanded);
            assert_eq!(expanded, [0.0; 256], "{format:?}");
        }
    }
}
