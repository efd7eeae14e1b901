//! What a family states of its files.

use super::{DecoderSpec, LayerTensor};
use crate::formats::{JsonObject, WeightsError};

/// How a family's files describe its decoder.
pub(crate) struct Family {
    /// Its `config.json`.
    pub(crate) config: ConfigFamily,
    /// Its GGUF architecture; `None` where converters give its models another family's.
    pub(crate) gguf: Option<GgufFamily>,
}

/// Name and parts of a matrix that is several.
pub(crate) type FusedTensor = (&'static str, &'static [LayerTensor]);

/// A family in Hugging Face's `config.json`.
pub(crate) struct ConfigFamily {
    /// Its class, in `architectures`.
    pub(crate) class: &'static str,
    /// Its `model_type`.
    pub(crate) model_type: &'static str,
    /// Keys that `read` reads beyond those of every family.
    pub(crate) keys: &'static [&'static str],
    /// Matrices of a layer that are stored as one, by their name after the layer's number, with the parts in the order of their rows. A family
    /// that has some stores no part by itself.
    pub(crate) fused: &'static [FusedTensor],
    /// Completes the spec, in which the keys of every family have been read: layers alike, without window, biases and head norms. Refuses
    /// values that are not implemented, and absent keys whose default in transformers differs from what the spec has.
    pub(crate) read: fn(&JsonObject, &mut DecoderSpec) -> Result<(), WeightsError>,
}

/// A family in GGUF files.
pub(crate) struct GgufFamily {
    /// `general.architecture`, which is also the prefix of its keys.
    pub(crate) architecture: &'static str,
    /// Order of the rows of query and key matrices.
    pub(crate) rotary_rows: RotaryRows,
    /// Completes the spec, as [`ConfigFamily::read`] does.
    pub(crate) read: fn(&mut DecoderSpec),
}

/// Order of the rows of a head's query or key matrix in a GGUF file. llama.cpp's converter permutes those of the architectures that
/// llama.cpp rotates as neighbours (`LLAMA_ROPE_TYPE_NORM`), and no others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum RotaryRows {
    /// Rotary partners are neighbours: rows 2 i and 2 i + 1.
    Neighbours,
    /// Rotary partners are half a head apart, as in Hugging Face's files: rows i and i + head_dim / 2.
    Halves,
}
