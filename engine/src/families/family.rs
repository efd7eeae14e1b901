//! What a family states of its files.

use super::{DecoderSpec, ExpertTensor, LayerTensor, Rope, TensorName, layer_index};
use crate::formats::{GgufConfig, JsonObject, WeightsError};
use std::borrow::Cow;

/// What names of all tensors begin with, but for the output matrix.
const DECODER: &str = "model.";

/// How a family's files describe its decoder.
pub(crate) struct Family {
    /// Its `config.json`.
    pub(crate) config: ConfigFamily,
    /// Its GGUF architecture; `None` where converters give its models another family's.
    pub(crate) gguf: Option<GgufFamily>,
}

/// Name and parts of a matrix that is several.
pub(crate) type FusedTensor = (&'static str, &'static [LayerTensor]);

/// Name, behind the layer's number, and parts of a tensor that has those of all experts, `[experts, columns, rows]`: the rows of the parts
/// take turns. Of biases it is `[experts, columns]`.
pub(crate) type StackedTensor = (&'static str, &'static [ExpertTensor]);

/// How a family's files name the matrices of experts: `FOLDER.EXPERT.MATRIX`, behind the layer's number.
#[derive(Clone, Copy)]
pub(crate) struct ExpertNames {
    pub(crate) folder: &'static str,
    /// In the order of [`ExpertTensor::ALL`]. Biases have these names in messages alone: files store them as one tensor of all experts.
    pub(crate) tensors: [&'static str; 6],
}

impl ExpertNames {
    pub(crate) const QWEN: Self = Self::of("mlp.experts", ["gate_proj.weight", "up_proj.weight", "down_proj.weight"]);

    /// Of matrices with these names.
    pub(crate) const fn of(folder: &'static str, [gate, up, down]: [&'static str; 3]) -> Self {
        Self { folder, tensors: [gate, up, down, "gate_proj.bias", "up_proj.bias", "down_proj.bias"] }
    }

    pub(crate) fn spelled(&self, expert: usize, tensor: ExpertTensor) -> String {
        format!("{}.{expert}.{}", self.folder, self.tensors[tensor as usize])
    }

    /// Expert and matrix of a name behind the layer's number.
    pub(crate) fn parse(&self, name: &str) -> Option<(usize, ExpertTensor)> {
        let (expert, matrix) = name.strip_prefix(self.folder)?.strip_prefix('.')?.split_once('.')?;
        let tensor = ExpertTensor::MATRICES.into_iter().zip(self.tensors).find(|(_, name)| *name == matrix)?.0;
        Some((layer_index(expert)?, tensor))
    }
}

/// A decoder inside a model of more than text.
pub(crate) struct Inside {
    /// Key with the object that has the decoder's keys.
    pub(crate) key: &'static str,
    /// The decoder's own `model_type`.
    pub(crate) model_type: &'static str,
    /// What names of the decoder's tensors have in place of `model.`; that of the output matrix stays.
    pub(crate) prefix: &'static str,
    /// Keys of the model around it that have no effect on text.
    pub(crate) keys: &'static [&'static str],
}

/// Tensors that the computation of text does not use.
pub(crate) struct LeftOut {
    /// Of their names.
    pub(crate) prefix: &'static str,
    /// What they are, in words for the log.
    pub(crate) what: &'static str,
}

/// A family in Hugging Face's `config.json`.
pub(crate) struct ConfigFamily {
    /// Its class, in `architectures`.
    pub(crate) class: &'static str,
    /// Its `model_type`.
    pub(crate) model_type: &'static str,
    /// Keys that `read` reads beyond those of every family, and keys that have no effect in this one.
    pub(crate) keys: &'static [&'static str],
    /// Tensors of a layer whose names are others than [`LayerTensor::name`].
    pub(crate) names: &'static [(LayerTensor, &'static str)],
    /// The matrices of experts.
    pub(crate) experts: ExpertNames,
    /// Tensors of experts that are stored as one for a layer. Matrices may be there as MXFP4 instead, in two tensors that end with `_blocks` and
    /// `_scales`. A family that has some stores no expert by itself.
    pub(crate) stacked: &'static [StackedTensor],
    /// Matrices of a layer that are stored as one, by their name after the layer's number, with the parts in the order of their rows. A family
    /// that has some stores no part by itself.
    pub(crate) fused: &'static [FusedTensor],
    /// Added to every stored gain of an RMSNorm, but to that of a gated delta rule.
    pub(crate) gain_offset: f32,
    /// Order of the rows of queries and keys that are rotated.
    pub(crate) rotary_rows: RotaryRows,
    /// Keys with the number of layers behind the last one, which predict tokens after the next: their tensors are left out.
    pub(crate) extra_layers: &'static [&'static str],
    /// Other tensors that are left out.
    pub(crate) left_out: &'static [LeftOut],
    /// Where the decoder is inside another model.
    pub(crate) inside: Option<Inside>,
    /// Reads the rotary embedding of heads of this size; of the layers without a window, if there are two.
    pub(crate) rope: fn(&JsonObject, usize) -> Result<Rope, WeightsError>,
    /// Completes the spec, in which the keys of every family have been read: layers as in Llama. Refuses values that are not implemented, and
    /// absent keys whose default in transformers differs from what the spec has.
    pub(crate) read: fn(&JsonObject, &mut DecoderSpec) -> Result<(), WeightsError>,
}

impl ConfigFamily {
    /// A family that stores what Llama does: the rest of a description.
    pub(crate) const LLAMA: Self = Self {
        class: "",
        model_type: "",
        keys: &[],
        names: &[],
        experts: ExpertNames::QWEN,
        stacked: &[],
        fused: &[],
        gain_offset: 0.0,
        rotary_rows: RotaryRows::Halves,
        extra_layers: &[],
        left_out: &[],
        inside: None,
        rope: JsonObject::rope,
        read: |_, _| Ok(()),
    };

    /// The name of a layer's tensor, behind the layer's number.
    pub(crate) fn layer_name(&self, tensor: LayerTensor) -> &'static str {
        let own = self.names.iter().find(|(of, _)| *of == tensor);
        own.map_or_else(|| tensor.name(), |(_, name)| name)
    }

    /// What is added to a stored gain of an RMSNorm; 0 for other tensors.
    pub(crate) fn offset_of(&self, name: TensorName) -> f32 {
        match name {
            TensorName::Layer(_, LayerTensor::DeltaNorm) => 0.0,
            name if name.is_norm() => self.gain_offset,
            _ => 0.0,
        }
    }

    /// A name of the family's files as that of a decoder that is inside no other model.
    pub(crate) fn of_decoder<'a>(&self, name: &'a str) -> Cow<'a, str> {
        let inside = self.inside.as_ref().and_then(|inside| name.strip_prefix(inside.prefix));
        inside.map_or(Cow::Borrowed(name), |rest| Cow::Owned(format!("{DECODER}{rest}")))
    }

    /// A tensor's name in the family's files.
    pub(crate) fn spelled(&self, name: TensorName) -> String {
        let name = self.spelled_in_decoder(name);
        match (&self.inside, name.strip_prefix(DECODER)) {
            (Some(inside), Some(rest)) => format!("{}{rest}", inside.prefix),
            _ => name,
        }
    }

    fn spelled_in_decoder(&self, name: TensorName) -> String {
        match name {
            TensorName::Layer(layer, tensor) => format!("model.layers.{layer}.{}", self.layer_name(tensor)),
            TensorName::Expert(layer, expert, tensor) => {
                let stacked = self.stacked.iter().find(|(_, parts)| parts.contains(&tensor));
                let name = stacked.map_or_else(|| self.experts.spelled(expert, tensor), |(name, _)| (*name).to_owned());
                format!("model.layers.{layer}.{name}")
            }
            other => other.to_string(),
        }
    }
}

/// A family in GGUF files.
pub(crate) struct GgufFamily {
    /// `general.architecture`, which is also the prefix of its keys.
    pub(crate) architecture: &'static str,
    /// Order of the rows of query and key matrices.
    pub(crate) rotary_rows: RotaryRows,
    /// Names of a layer's tensors, behind the layer's number, that differ from those of most architectures.
    pub(crate) names: &'static [(&'static str, LayerTensor)],
    /// Matrices of a layer that are stored as one: as [`ConfigFamily::fused`].
    pub(crate) fused: &'static [FusedTensor],
    /// Whether `read` reads the lengths of keys and values, which are not one, and how much of them is rotated.
    pub(crate) reads_lengths: bool,
    /// Whether value heads of a gated delta rule are in turns: of each key head the first, then of each the second, and so on. If not, those of a
    /// key head are together, as in Hugging Face's files. llama.cpp's converter changes the order of the architectures that llama.cpp
    /// broadcasts keys in (`_LinearAttentionVReorderBase`).
    pub(crate) value_heads_in_turns: bool,
    /// Key, without the prefix, of the number of layers behind the last one, which predict tokens after the next: their tensors are left out.
    /// `block_count` counts them.
    pub(crate) extra_layers: Option<&'static str>,
    /// Keys, without the prefix, that `read` reads beyond those of every family.
    pub(crate) keys: &'static [&'static str],
    /// Completes the spec, as [`ConfigFamily::read`] does.
    pub(crate) read: fn(&GgufConfig<'_, '_>, &mut DecoderSpec) -> Result<(), WeightsError>,
}

impl GgufFamily {
    /// A family whose files have what most have: the rest of a description.
    pub(crate) const COMMON: Self = Self {
        architecture: "",
        rotary_rows: RotaryRows::Halves,
        names: &[],
        fused: &[],
        reads_lengths: false,
        value_heads_in_turns: false,
        extra_layers: None,
        keys: &[],
        read: |_, _| Ok(()),
    };
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
