//! Matrices of a layer that a file stores as one: the rows of one part behind those of another.

use super::config::GgufConfig;
use super::header::TensorEntry;
use super::names;
use crate::families::{DecoderSpec, FusedTensor, TensorName};
use crate::formats::WeightsError;
use std::collections::HashMap;

/// The parts of every one of `fused`, which are layers, names and parts, and the tensors as the file has them.
///
/// # Errors
/// If a layer is of no model with this spec, or a tensor is not of the size of its parts.
pub(super) fn split(
    config: &GgufConfig<'_, '_>,
    spec: &DecoderSpec,
    fused: Vec<(usize, FusedTensor, TensorEntry)>,
) -> Result<HashMap<TensorName, TensorEntry>, WeightsError> {
    let mut tensors = HashMap::new();
    for (layer, (name, parts), TensorEntry { dims, format, bytes }) in fused {
        let name = names::of_layer(layer, name);
        if layer >= spec.layers.len() {
            return Err(names::of_no_layer(config, &name));
        }
        let sizes = parts.iter().map(|part| spec.tensor_dims(TensorName::Layer(layer, *part)));
        let rows: usize = sizes.clone().map(|[rows, _]| rows).sum();
        let expected: Vec<usize> = sizes.clone().take(1).flat_map(|[_, columns]| [columns, rows]).collect();
        if dims != expected {
            let message = format!("tensor {name} has dimensions {dims:?}; the metadata asks for {expected:?}");
            return Err(config.damaged(message));
        }
        let of_row = bytes.len() / rows;
        let mut start = bytes.start;
        for (part, [rows, columns]) in parts.iter().zip(sizes) {
            let bytes = start..start + rows * of_row;
            start = bytes.end;
            tensors.insert(TensorName::Layer(layer, *part), TensorEntry { dims: vec![columns, rows], format, bytes });
        }
    }
    Ok(tensors)
}
