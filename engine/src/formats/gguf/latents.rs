//! The matrix that makes keys and values out of latents, where a file has its parts as two tensors: keys transposed and values, both by head.

use super::config::GgufConfig;
use super::header::TensorEntry;
use crate::families::{DecoderSpec, LatentSpec};
use crate::formats::{StoredTensor, WeightsError};
use baton_kernels::storage::StorageFormat;
use std::collections::BTreeMap;

/// Which part a tensor is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Part {
    /// `[heads, rank, elements of a key that are not rotated]`
    Keys,
    /// `[heads, elements of a value, rank]`
    Values,
}

/// Parts by layer.
pub(super) type Parts = BTreeMap<usize, BTreeMap<Part, TensorEntry>>;

/// Rows, columns and heads of a part.
fn dims(spec: &DecoderSpec, layer: usize, part: Part) -> Option<[usize; 3]> {
    let attention = &spec.layers.get(layer)?.attention;
    let LatentSpec { rank, value_dim, .. } = attention.latent?;
    let plain = attention.head_dim - attention.rotated();
    Some(match part {
        Part::Keys => [rank, plain, attention.heads],
        Part::Values => [value_dim, rank, attention.heads],
    })
}

/// Checks that layers have both parts, of the sizes of the spec.
pub(super) fn check(config: &GgufConfig<'_, '_>, spec: &DecoderSpec, parts: &Parts) -> Result<(), WeightsError> {
    for (layer, of_layer) in parts {
        for (part, name) in [(Part::Keys, "attn_k_b"), (Part::Values, "attn_v_b")] {
            let name = format!("tensor blk.{layer}.{name}.weight");
            let Some(entry) = of_layer.get(&part) else {
                return Err(config.damaged(format!("{name} is missing beside its other part")));
            };
            let expected = dims(spec, *layer, part).map(|[rows, columns, heads]| vec![columns, rows, heads]);
            let expected = expected.ok_or_else(|| config.damaged(format!("{name} is of no layer with latents")))?;
            if entry.dims != expected {
                let found = &entry.dims;
                return Err(
                    config.damaged(format!("{name} has dimensions {found:?}; the metadata asks for {expected:?}"))
                );
            }
        }
    }
    Ok(())
}

/// Of each head the key's rows, then the value's, in f32: what formats of blocks hold of columns, no format of rows does.
pub(super) fn join(
    spec: &DecoderSpec,
    layer: usize,
    parts: &BTreeMap<Part, TensorEntry>,
    file: &[u8],
) -> StoredTensor<'static> {
    let expand = |part: Part| {
        let [rows, columns, heads] = dims(spec, layer, part).expect("checked");
        let entry = &parts[&part];
        let stored = entry.format.read(&file[entry.bytes.clone()]);
        let mut out = vec![0.0; heads * rows * columns];
        stored.format.expand(&stored.bytes, &mut out);
        (out, [rows, columns])
    };
    let ((keys, [rank, plain]), (values, [value_dim, _])) = (expand(Part::Keys), expand(Part::Values));
    let mut bytes = Vec::with_capacity((keys.len() + values.len()) * size_of::<f32>());
    for (keys, values) in keys.chunks_exact(rank * plain).zip(values.chunks_exact(value_dim * rank)) {
        let transposed = (0..plain).flat_map(|p| (0..rank).map(move |r| keys[r * plain + p]));
        transposed.chain(values.iter().copied()).for_each(|x| bytes.extend(x.to_le_bytes()));
    }
    StoredTensor { format: StorageFormat::F32, bytes: bytes.into() }
}
