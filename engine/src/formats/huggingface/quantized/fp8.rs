//! Weights in E4M3 of OCP's FP8 (with NaN, without infinity), times scales: the product is rounded to f32.

use super::Numbers;
use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;
use std::ops::Range;

/// Rows and columns that share a scale, for a weight `[n, k]` and scales of this shape.
pub(super) fn block(
    configured: Option<[usize; 2]>,
    [n, k]: [usize; 2],
    scales: &[usize],
) -> Result<[usize; 2], String> {
    match (configured, scales) {
        (Some([rows, columns]), &[r, c]) if [r, c] == [n.div_ceil(rows), k.div_ceil(columns)] => Ok([rows, columns]),
        (_, [] | [1] | [1, 1]) => Ok([n, k]),
        (_, &[rows] | &[rows, 1]) if rows == n => Ok([1, k]),
        _ => Err(format!("its scales have shape {scales:?} for a weight of [{n}, {k}]")),
    }
}

/// The number of a byte; the largest exponent has no infinity, and NaN only where all other bits are set.
fn e4m3(byte: u8) -> f32 {
    let (exponent, mantissa) = (byte >> 3 & 15, f32::from(byte & 7));
    let magnitude = match (exponent, byte & 7) {
        (15, 7) => f32::NAN,
        (0, _) => mantissa / 512.0,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 127 - 7) << 23),
    };
    if byte >> 7 == 1 { -magnitude } else { magnitude }
}

/// Rows of a weight of `k` columns.
pub(super) fn read(
    rows: Range<usize>,
    k: usize,
    weight: &[u8],
    [block_rows, block_columns]: [usize; 2],
    scales: Numbers<'_>,
) -> Result<StoredTensor<'static>, String> {
    let numbers: [f32; 256] = std::array::from_fn(|byte| e4m3(byte as u8));
    let across = k.div_ceil(block_columns);
    let mut out = vec![0; rows.len() * k * size_of::<f32>()];
    for (row, out) in rows.zip(out.chunks_exact_mut(k * size_of::<f32>())) {
        let first = row / block_rows * across;
        let blocks = weight[row * k..(row + 1) * k].chunks(block_columns);
        for (block, (bytes, out)) in blocks.zip(out.chunks_mut(block_columns * size_of::<f32>())).enumerate() {
            let scale = scales.at(first + block);
            let mut finite = true;
            for (byte, out) in bytes.iter().zip(out.chunks_exact_mut(size_of::<f32>())) {
                let value = numbers[usize::from(*byte)] * scale;
                finite &= value.is_finite();
                out.copy_from_slice(&value.to_le_bytes());
            }
            if !finite {
                return Err(format!("row {row} has a value that is not finite"));
            }
        }
    }
    Ok(StoredTensor { format: StorageFormat::F32, bytes: out.into() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_numbers_of_e4m3() {
        let cases = [
            (0x00, 0.0),
            (0x01, 0.001_953_125),
            (0x07, 0.013_671_875),
            (0x08, 0.015_625),
            (0x38, 1.0),
            (0x3c, 1.5),
            (0x7e, 448.0),
            (0xfe, -448.0),
            (0xb8, -1.0),
        ];
        for (byte, number) in cases {
            assert_eq!(e4m3(byte), number, "{byte:02x}");
        }
        assert!(e4m3(0x7f).is_nan() && e4m3(0xff).is_nan());
        let all: Vec<f32> = (0..0x7f).map(e4m3).collect();
        assert!(all.is_sorted_by(|a, b| a < b), "codes ascend with their numbers");
    }

    #[test]
    fn scales_are_of_the_whole_of_rows_or_of_blocks() {
        assert_eq!(block(None, [6, 8], &[]), Ok([6, 8]));
        assert_eq!(block(None, [6, 8], &[1]), Ok([6, 8]));
        assert_eq!(block(None, [6, 8], &[6, 1]), Ok([1, 8]));
        assert_eq!(block(Some([4, 3]), [6, 8], &[2, 3]), Ok([4, 3]));
        assert_eq!(block(Some([4, 3]), [6, 8], &[1]), Ok([6, 8]));
        assert!(block(Some([4, 3]), [6, 8], &[3, 2]).is_err());
        assert!(block(None, [6, 8], &[2, 3]).is_err());
    }
}
