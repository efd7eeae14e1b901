//! Which tensors a shape implies, and their sizes. Every source is checked against this.

use super::{LayerTensor, ModelShape, RopeScaling, TensorName};
use baton_types::{Attention, Dtype, KvLayout, LayoutError, TokenKv};
use std::fmt;

impl LayerTensor {
    /// The tensors of every layer, in the order of computation.
    pub const ALL: [Self; 9] = [
        Self::AttentionNorm,
        Self::Query,
        Self::Key,
        Self::Value,
        Self::AttentionOutput,
        Self::MlpNorm,
        Self::Gate,
        Self::Up,
        Self::Down,
    ];
}

impl TensorName {
    /// Whether this is a vector of norm weights; all other tensors are matrices.
    pub fn is_norm(self) -> bool {
        matches!(self, Self::FinalNorm | Self::Layer(_, LayerTensor::AttentionNorm | LayerTensor::MlpNorm))
    }
}

/// Hugging Face's names, because they are the best known.
impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (layer, tensor) = match self {
            Self::Embedding => return f.write_str("model.embed_tokens.weight"),
            Self::FinalNorm => return f.write_str("model.norm.weight"),
            Self::Output => return f.write_str("lm_head.weight"),
            Self::Layer(layer, tensor) => (layer, tensor),
        };
        let tensor = match tensor {
            LayerTensor::AttentionNorm => "input_layernorm",
            LayerTensor::Query => "self_attn.q_proj",
            LayerTensor::Key => "self_attn.k_proj",
            LayerTensor::Value => "self_attn.v_proj",
            LayerTensor::AttentionOutput => "self_attn.o_proj",
            LayerTensor::MlpNorm => "post_attention_layernorm",
            LayerTensor::Gate => "mlp.gate_proj",
            LayerTensor::Up => "mlp.up_proj",
            LayerTensor::Down => "mlp.down_proj",
        };
        write!(f, "model.layers.{layer}.{tensor}.weight")
    }
}

/// A layer's number in a tensor name: digits without a sign or leading zeros, so that each tensor has exactly one name.
pub(super) fn layer_index(text: &str) -> Option<usize> {
    let canonical = text == "0" || (!text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
    if canonical { text.parse().ok() } else { None }
}

impl ModelShape {
    /// Largest dimension. Larger numbers in a header mean damage, and below this limit products of three fit a `u64`.
    pub const DIMENSION_MAX: usize = 1 << 21;

    /// `[rows, columns]` of a tensor; vectors are `[1, columns]`.
    pub fn tensor_dims(&self, name: TensorName) -> [usize; 2] {
        let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        match name {
            TensorName::Embedding | TensorName::Output => [self.vocab, self.hidden],
            TensorName::FinalNorm => [1, self.hidden],
            TensorName::Layer(_, tensor) => match tensor {
                LayerTensor::AttentionNorm | LayerTensor::MlpNorm => [1, self.hidden],
                LayerTensor::Query => [q, self.hidden],
                LayerTensor::Key | LayerTensor::Value => [kv, self.hidden],
                LayerTensor::AttentionOutput => [self.hidden, q],
                LayerTensor::Gate | LayerTensor::Up => [self.ffn, self.hidden],
                LayerTensor::Down => [self.hidden, self.ffn],
            },
        }
    }

    /// Every tensor of the model, in the order of computation; without [`TensorName::Output`] where tied.
    pub fn tensor_names(&self) -> impl Iterator<Item = TensorName> + '_ {
        let layers = (0..self.layers).flat_map(|layer| LayerTensor::ALL.map(|tensor| TensorName::Layer(layer, tensor)));
        let output = (!self.tied).then_some(TensorName::Output);
        std::iter::once(TensorName::Embedding).chain(layers).chain([TensorName::FinalNorm]).chain(output)
    }

    /// Whether `name` is a tensor of this model.
    pub fn has_tensor(&self, name: TensorName) -> bool {
        match name {
            TensorName::Output => !self.tied,
            TensorName::Layer(layer, _) => layer < self.layers,
            TensorName::Embedding | TensorName::FinalNorm => true,
        }
    }

    /// Parameters in all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensor_names().map(|name| self.tensor_dims(name).iter().map(|&d| d as u64).product::<u64>()).sum()
    }

    /// Attention covers the whole past, in every layer.
    pub fn attention(&self) -> Attention {
        let kv = TokenKv::Heads { kv_heads: self.kv_heads as u32, head_dim: self.head_dim as u32 };
        Attention { layers: self.layers as u32, kv, window: None }
    }

    /// The KV layout with this block size: one `full` group with planes `k` and `v`.
    pub fn kv_layout(&self, block_tokens: u32, kv: Dtype) -> Result<KvLayout, LayoutError> {
        self.attention().layout(block_tokens, kv)
    }

    /// Checks that the numbers form a model that can be computed; the message names the invalid one.
    pub fn check(&self) -> Result<(), String> {
        let dimensions = [
            ("vocab", self.vocab),
            ("hidden", self.hidden),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("ffn", self.ffn),
            ("context", self.context),
        ];
        for (name, value) in dimensions {
            // A context is only a limit, not a tensor's size: some models state absurdly long ones.
            let max = if name == "context" { u32::MAX as usize } else { Self::DIMENSION_MAX };
            if value == 0 || value > max {
                return Err(format!("{name} is {value}; 1 to {max} is possible"));
            }
        }
        if self.heads * self.head_dim > Self::DIMENSION_MAX {
            return Err(format!("heads * head_dim is over {}", Self::DIMENSION_MAX));
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            return Err(format!("{} query heads do not divide among {} kv heads", self.heads, self.kv_heads));
        }
        if !self.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {}; rotary embedding needs it even", self.head_dim));
        }
        let positive = |name: &str, value: f32| {
            if value.is_finite() && value > 0.0 {
                return Ok(());
            }
            Err(format!("{name} is {value}; it must be positive and finite"))
        };
        positive("rms_eps", self.rms_eps)?;
        positive("rope theta", self.rope.theta)?;
        match &self.rope.scaling {
            RopeScaling::None => Ok(()),
            RopeScaling::Linear { factor } => positive("rope scaling factor", *factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context } => {
                positive("rope scaling factor", *factor)?;
                positive("rope low_freq_factor", *low_freq_factor)?;
                positive("rope high_freq_factor", *high_freq_factor)?;
                if high_freq_factor <= low_freq_factor || *original_context == 0 {
                    return Err(
                        "llama3 rope scaling needs high_freq_factor over low_freq_factor and an original context"
                            .into(),
                    );
                }
                Ok(())
            }
            RopeScaling::Factors(factors) => {
                if factors.len() != self.head_dim / 2 {
                    return Err(format!("{} rope factors for {} frequencies", factors.len(), self.head_dim / 2));
                }
                factors.iter().try_for_each(|&f| positive("rope factor", f))
            }
        }
    }
}
