//! Tensors of a gated delta rule in the form of the canonical ones.
//!
//! llama.cpp's converter (`conversion/qwen.py`) stores the factor of a head's decay in place of its logarithm. Of some architectures it changes
//! the order of value heads ([`GgufFamily::value_heads_in_turns`](crate::families::GgufFamily)).

use crate::families::{DecoderSpec, GatedDeltaSpec, LayerTensor, TensorName};
use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;

/// A tensor of a file as the canonical one. An error says what is wrong with its values.
pub(super) fn canonical<'a>(
    spec: &DecoderSpec,
    in_turns: bool,
    name: TensorName,
    stored: StoredTensor<'a>,
) -> Result<StoredTensor<'a>, String> {
    let TensorName::Layer(layer, tensor) = name else { return Ok(stored) };
    let Some(delta) = spec.layers[layer].delta else { return Ok(stored) };
    let [rows, columns] = spec.tensor_dims(name);
    let stored = match tensor {
        LayerTensor::DeltaDecay => logarithms(stored, columns)?,
        _ => stored,
    };
    let GatedDeltaSpec { key_heads, value_heads, value_dim, .. } = delta;
    if !in_turns || key_heads == 1 || key_heads == value_heads {
        return Ok(stored);
    }
    let of_rows = |before, of_head| by_rows(&stored, key_heads, stored.bytes.len() / rows, before, of_head);
    Ok(match tensor {
        LayerTensor::DeltaQkv | LayerTensor::DeltaConv => of_rows(2 * delta.query_dim(), value_dim),
        LayerTensor::DeltaZ => of_rows(0, value_dim),
        LayerTensor::DeltaB | LayerTensor::DeltaA => of_rows(0, 1),
        LayerTensor::DeltaDecay | LayerTensor::DeltaDecayBias => by_columns(stored, key_heads, [rows, columns], 1),
        LayerTensor::DeltaOutput => by_columns(stored, key_heads, [rows, columns], value_dim),
        _ => stored,
    })
}

/// Of each `-exp(x)` the `x`.
fn logarithms(stored: StoredTensor<'_>, count: usize) -> Result<StoredTensor<'static>, String> {
    let factors = expand(&stored, count);
    if let Some(factor) = factors.iter().find(|factor| !(factor.is_finite() && **factor < 0.0)) {
        return Err(format!("the factor of a head's decay is {factor}; it is below 0"));
    }
    Ok(of_f32(factors.into_iter().map(|factor| libm::log(-f64::from(factor)) as f32)))
}

/// Behind the first `before` rows, heads of so many rows.
fn by_rows(
    stored: &StoredTensor<'_>,
    key_heads: usize,
    row_bytes: usize,
    before: usize,
    of_head: usize,
) -> StoredTensor<'static> {
    let bytes = together(&stored.bytes, key_heads, before * row_bytes, of_head * row_bytes);
    StoredTensor { format: stored.format, bytes: bytes.into() }
}

/// In each row, heads of so many columns. Where a block has columns of several heads, the tensor becomes f32: no format of blocks holds it.
fn by_columns(
    stored: StoredTensor<'_>,
    key_heads: usize,
    [rows, columns]: [usize; 2],
    of_head: usize,
) -> StoredTensor<'static> {
    let stored = match stored.format.row_bytes(of_head) {
        Some(_) => stored,
        None => of_f32(expand(&stored, rows * columns).into_iter()),
    };
    let head_bytes = stored.format.row_bytes(of_head).expect("an f32 is a block");
    let of_row = stored.bytes.chunks_exact(stored.bytes.len() / rows);
    let bytes: Vec<u8> = of_row.flat_map(|row| together(row, key_heads, 0, head_bytes)).collect();
    StoredTensor { format: stored.format, bytes: bytes.into() }
}

/// Behind the first `before` bytes, value heads in turns (of each key head the first, then of each the second, ...) as those of each key head
/// together.
fn together(bytes: &[u8], key_heads: usize, before: usize, head_bytes: usize) -> Vec<u8> {
    let (first, heads) = bytes.split_at(before);
    let mut out = Vec::with_capacity(bytes.len());
    out.extend_from_slice(first);
    for key_head in 0..key_heads {
        heads.chunks_exact(head_bytes).skip(key_head).step_by(key_heads).for_each(|head| out.extend_from_slice(head));
    }
    out
}

fn expand(stored: &StoredTensor<'_>, count: usize) -> Vec<f32> {
    let mut out = vec![0.0; count];
    stored.format.expand(&stored.bytes, &mut out);
    out
}

fn of_f32(values: impl Iterator<Item = f32>) -> StoredTensor<'static> {
    StoredTensor { format: StorageFormat::F32, bytes: values.flat_map(f32::to_le_bytes).collect::<Vec<_>>().into() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{ModelSource as _, RandomModel};

    /// Two key heads, and of each three value heads of 32 elements.
    fn spec() -> DecoderSpec {
        let shape = "random:hidden=4,layers=1,heads=2,ffn=4,delta=6,delta_keys=2,delta_key_dim=2,delta_dim=32,attention_every=2";
        RandomModel::parse(shape).unwrap().spec().clone()
    }

    fn read(tensor: LayerTensor, stored: StoredTensor<'_>) -> StoredTensor<'static> {
        let read = canonical(&spec(), true, TensorName::Layer(0, tensor), stored).unwrap();
        StoredTensor { format: read.format, bytes: read.bytes.into_owned().into() }
    }

    fn numbers(count: usize) -> StoredTensor<'static> {
        of_f32((0..count).map(|i| i as f32))
    }

    #[test]
    fn value_heads_of_a_key_head_come_together() {
        assert_eq!(together(&[0, 1, 2, 3, 4, 5], 2, 0, 1), [0, 2, 4, 1, 3, 5]);
        assert_eq!(together(&[0, 1, 2, 3, 4, 5], 3, 0, 1), [0, 3, 1, 4, 2, 5]);
        assert_eq!(together(&[9, 0, 0, 1, 1, 2, 2, 3, 3], 2, 1, 2), [9, 0, 0, 2, 2, 1, 1, 3, 3]);
        let bias = read(LayerTensor::DeltaDecayBias, numbers(6));
        assert_eq!(expand(&bias, 6), [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]);
        // Rows of 4: queries and keys of both heads stay, and each head of the value has 32.
        let qkv = expand(&read(LayerTensor::DeltaQkv, numbers((8 + 192) * 4)), (8 + 192) * 4);
        let first = |head: usize| qkv[(8 + head * 32) * 4];
        assert_eq!(qkv[..32], expand(&numbers(32), 32));
        let in_file = |head: usize| ((8 + head * 32) * 4) as f32;
        assert_eq!([0, 1, 2, 3, 4, 5].map(first), [0, 2, 4, 1, 3, 5].map(in_file));
    }

    #[test]
    fn families_whose_heads_are_together_stay_as_they_are() {
        let name = TensorName::Layer(0, LayerTensor::DeltaDecayBias);
        assert_eq!(expand(&canonical(&spec(), false, name, numbers(6)).unwrap(), 6), expand(&numbers(6), 6));
    }

    /// Blocks of 32 are whole heads, and move as they are. Those of 256 are of several, and become numbers.
    #[test]
    fn columns_move_with_their_blocks_or_as_numbers() {
        let columns = 192;
        let order = |values: &[f32]| -> Vec<f32> {
            let of_row = |row: &[f32]| -> Vec<f32> {
                [0, 2, 4, 1, 3, 5].iter().flat_map(|head| row[head * 32..][..32].to_vec()).collect()
            };
            values.chunks_exact(columns).flat_map(of_row).collect()
        };
        // Scales are finite.
        let bytes = |count: usize| (0..count).map(|i| (i * 37 % 101) as u8 % 60).collect::<Vec<u8>>();
        let stored = |format: StorageFormat, elements: usize| {
            let (of_block, size) = format.block();
            StoredTensor { format, bytes: bytes(elements / of_block * size).into() }
        };
        for format in [StorageFormat::Q8_0, StorageFormat::Q4_0, StorageFormat::F16, StorageFormat::F32] {
            let before = expand(&stored(format, 4 * columns), 4 * columns);
            let read = read(LayerTensor::DeltaOutput, stored(format, 4 * columns));
            assert_eq!((read.format, expand(&read, 4 * columns)), (format, order(&before)));
        }
        // 4 rows of 192 are 3 super-blocks of 256: of no real file, whose rows are whole blocks, but of its rule.
        let before = expand(&stored(StorageFormat::Q4K, 4 * columns), 4 * columns);
        let read = read(LayerTensor::DeltaOutput, stored(StorageFormat::Q4K, 4 * columns));
        assert_eq!((read.format, expand(&read, 4 * columns)), (StorageFormat::F32, order(&before)));
    }

    #[test]
    fn decays_are_logarithms() {
        let decays = [-2.0f32, -1.5, -1.0, -0.5, 0.0, 1.0];
        let read = read(LayerTensor::DeltaDecay, of_f32(decays.into_iter().map(|decay| -decay.exp())));
        let expected = [-2.0f32, -1.0, 0.0, -1.5, -0.5, 1.0];
        for (read, expected) in expand(&read, 6).into_iter().zip(expected) {
            assert!((read - expected).abs() < 2e-7, "{read} is not {expected}");
        }
        for wrong in [0.0, 1.0, f32::NAN, f32::NEG_INFINITY] {
            let stored = of_f32([-1.0, -1.0, wrong, -1.0, -1.0, -1.0].into_iter());
            let name = TensorName::Layer(0, LayerTensor::DeltaDecay);
            let message = canonical(&spec(), true, name, stored).map(drop).unwrap_err();
            assert!(message.contains("factor of a head's decay is"), "{message}");
        }
    }
}
