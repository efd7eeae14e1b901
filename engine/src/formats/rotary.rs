//! Rows that are rotated, in the order of the canonical tensors.

use super::StoredTensor;
use crate::families::{DecoderSpec, LayerTensor, RotaryRows, TensorName};

/// A tensor of a file with this order of rows as [`RotaryRows::Halves`].
pub(super) fn in_halves<'a>(
    spec: &DecoderSpec,
    rows: RotaryRows,
    name: TensorName,
    stored: StoredTensor<'a>,
) -> StoredTensor<'a> {
    let (RotaryRows::Neighbours, TensorName::Layer(layer, tensor)) = (rows, name) else { return stored };
    let attention = &spec.layers[layer].attention;
    let (head_dim, rotated) = (attention.head_dim, attention.rotated());
    // Rows of a head, and the first of them that is rotated.
    let (dim, first) = match (tensor, attention.latent) {
        (LayerTensor::Query | LayerTensor::Key, None) => (head_dim, 0),
        (LayerTensor::Query | LayerTensor::QueryUp, Some(_)) => (head_dim, head_dim - rotated),
        (LayerTensor::KvDown, Some(latent)) => (latent.rank + rotated, latent.rank),
        _ => return stored,
    };
    let row_bytes = stored.bytes.len() / spec.tensor_dims(name)[0];
    let bytes = split_half_rows(&stored.bytes, row_bytes, dim, first);
    StoredTensor { format: stored.format, bytes: bytes.into() }
}

/// In each `dim` rows, those from `first` on change from pairs of neighbours to halves.
fn split_half_rows(bytes: &[u8], row_bytes: usize, dim: usize, first: usize) -> Vec<u8> {
    let mut out = vec![0; bytes.len()];
    for (row, bytes) in bytes.chunks_exact(row_bytes).enumerate() {
        let to = match (row % dim).checked_sub(first) {
            Some(within) => row / dim * dim + first + within % 2 * ((dim - first) / 2) + within / 2,
            None => row,
        } * row_bytes;
        out[to..to + row_bytes].copy_from_slice(bytes);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_of_neighbours_become_halves() {
        let rows = |dim, first| {
            let bytes: Vec<u8> = (0..12).collect();
            split_half_rows(&bytes, 1, dim, first)
        };
        assert_eq!(rows(6, 0), [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]);
        assert_eq!(rows(6, 2), [0, 1, 2, 4, 3, 5, 6, 7, 8, 10, 9, 11]);
        assert_eq!(rows(12, 8), [0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 9, 11]);
    }
}
