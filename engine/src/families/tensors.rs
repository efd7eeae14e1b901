//! Which tensors a spec implies, and their sizes. Every source is checked against this.

use super::{DecoderSpec, ExpertNames, LayerNorms, LayerSpec, QueryKeyNorm};
use std::fmt;

/// Canonical tensor names. Matrices are `[out, in]` row-major, in Hugging Face's rotary pairing (i, i + head_dim / 2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum TensorName {
    /// Embedding of each token, `[vocab, hidden]`.
    Embedding,
    /// Gain of the RMSNorm before the output, `[hidden]`.
    FinalNorm,
    /// Matrix of the logits, `[vocab, hidden]`; absent where it is the embedding.
    Output,
    /// A tensor of one layer.
    Layer(usize, LayerTensor),
    /// A tensor of one of a layer's experts: layer, expert, tensor.
    Expert(usize, usize, ExpertTensor),
}

/// Tensors of one expert. The order gives the random model's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ExpertTensor {
    /// `[ffn, hidden]`
    Gate,
    /// `[ffn, hidden]`
    Up,
    /// `[hidden, ffn]`
    Down,
    /// `[ffn]`; with [`biases`](super::ExpertsSpec::biases), as the next two.
    GateBias,
    /// `[ffn]`
    UpBias,
    /// `[hidden]`
    DownBias,
}

impl ExpertTensor {
    /// Matrices, then their biases.
    pub const ALL: [Self; 6] = [Self::Gate, Self::Up, Self::Down, Self::GateBias, Self::UpBias, Self::DownBias];

    /// Those that every expert has, in the order of computation.
    pub const MATRICES: [Self; 3] = [Self::Gate, Self::Up, Self::Down];

    pub(crate) fn is_bias(self) -> bool {
        !Self::MATRICES.contains(&self)
    }
}

/// Tensors of one decoder layer. The order gives the random model's numbers: new ones go to the end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    /// Gain of the RMSNorm before attention, `[hidden]`; see [`LayerNorms`].
    AttentionNorm,
    /// `[heads * head_dim, hidden]`; with [`output_gate`](super::AttentionSpec::output_gate) of each head the query's rows, then the gate's,
    /// `[heads * 2 * head_dim, hidden]`.
    Query,
    /// `[kv_heads * head_dim, hidden]`
    Key,
    /// `[kv_heads * head_dim, hidden]`
    Value,
    /// `[hidden, heads * head_dim]`
    AttentionOutput,
    /// Gain of the RMSNorm before the MLP, `[hidden]`.
    MlpNorm,
    /// Gate projection of the MLP, `[ffn, hidden]`.
    Gate,
    /// Up projection of the MLP, `[ffn, hidden]`.
    Up,
    /// Down projection of the MLP, `[hidden, ffn]`.
    Down,
    /// `[heads * head_dim]`; with [`qkv_bias`](super::AttentionSpec::qkv_bias).
    QueryBias,
    /// `[kv_heads * head_dim]`; with [`qkv_bias`](super::AttentionSpec::qkv_bias).
    KeyBias,
    /// `[kv_heads * head_dim]`; with [`qkv_bias`](super::AttentionSpec::qkv_bias).
    ValueBias,
    /// Gain of the RMSNorm of queries, of one head's size or all heads'; with [`query_key_norm`](super::AttentionSpec::query_key_norm).
    QueryNorm,
    /// Gain of the RMSNorm of keys, as of queries.
    KeyNorm,
    /// Gain of the RMSNorm behind attention, `[hidden]`.
    AttentionOutputNorm,
    /// Gain of the RMSNorm behind the MLP, `[hidden]`.
    MlpOutputNorm,
    /// Matrix of the logits by which experts are chosen, `[experts, hidden]`; with [`experts`](LayerSpec::experts).
    Router,
    /// `[experts]`; with [`biases`](super::ExpertsSpec::biases).
    RouterBias,
    /// `[hidden]`; with [`output_bias`](super::AttentionSpec::output_bias).
    AttentionOutputBias,
    /// A score of each query head, `[heads]`; with [`sinks`](super::AttentionSpec::sinks).
    Sinks,
    /// `[query rank, hidden]`; with [`query_rank`](super::LatentSpec::query_rank), as the next two.
    QueryDown,
    /// Gain of the RMSNorm of the compressed query, `[query rank]`.
    QueryDownNorm,
    /// `[heads * head_dim, query rank]`
    QueryUp,
    /// Compressed keys and values, and the rotated part of the key, `[rank + rotated, hidden]`; with
    /// [`latent`](super::AttentionSpec::latent), as the next two.
    KvDown,
    /// Gain of the RMSNorm of compressed keys and values, `[rank]`.
    KvDownNorm,
    /// Of each head the key's rows, then the value's, `[heads * (head_dim - rotated + value_dim), rank]`.
    KvUp,
    /// Added to the scores by which experts are chosen, `[experts]`; with [`choice_bias`](super::ExpertsSpec::choice_bias).
    ChoiceBias,
    /// `[shared ffn, hidden]`; with [`shared_ffn`](super::ExpertsSpec::shared_ffn), as the next two.
    SharedGate,
    /// `[shared ffn, hidden]`
    SharedUp,
    /// `[hidden, shared ffn]`
    SharedDown,
    /// Query, key and value of a gated delta rule, `[channels, hidden]`; with [`delta`](LayerSpec::delta), as all that follow.
    DeltaQkv,
    /// Gate of the output, `[value_heads * value_dim, hidden]`.
    DeltaZ,
    /// How much of a value is written, `[value_heads, hidden]`.
    DeltaB,
    /// How much of the state stays, `[value_heads, hidden]`.
    DeltaA,
    /// Convolution of each channel, `[channels, taps]`, the row's own tap last.
    DeltaConv,
    /// Logarithm of the factor of the exponent by which the state decays, `[value_heads]`.
    DeltaDecay,
    /// Added to what [`LayerTensor::DeltaA`] makes, `[value_heads]`.
    DeltaDecayBias,
    /// Gain of the RMSNorm of each head before the gate of the output, `[value_dim]`.
    DeltaNorm,
    /// `[hidden, value_heads * value_dim]`
    DeltaOutput,
}

impl LayerTensor {
    /// Every tensor that a layer can have, in the order of computation.
    pub const ALL: [Self; 39] = [
        Self::AttentionNorm,
        Self::Query,
        Self::QueryDown,
        Self::KvDown,
        Self::QueryDownNorm,
        Self::QueryUp,
        Self::KvDownNorm,
        Self::KvUp,
        Self::Key,
        Self::Value,
        Self::QueryBias,
        Self::KeyBias,
        Self::ValueBias,
        Self::QueryNorm,
        Self::KeyNorm,
        Self::Sinks,
        Self::AttentionOutput,
        Self::AttentionOutputBias,
        Self::DeltaQkv,
        Self::DeltaZ,
        Self::DeltaB,
        Self::DeltaA,
        Self::DeltaConv,
        Self::DeltaDecay,
        Self::DeltaDecayBias,
        Self::DeltaNorm,
        Self::DeltaOutput,
        Self::AttentionOutputNorm,
        Self::MlpNorm,
        Self::Router,
        Self::RouterBias,
        Self::ChoiceBias,
        Self::SharedGate,
        Self::SharedUp,
        Self::SharedDown,
        Self::Gate,
        Self::Up,
        Self::Down,
        Self::MlpOutputNorm,
    ];

    /// Its name in Hugging Face's Llama, behind the layer's number; for tensors that no Llama has, that of a family that has them.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::AttentionNorm => "input_layernorm.weight",
            Self::Query => "self_attn.q_proj.weight",
            Self::Key => "self_attn.k_proj.weight",
            Self::Value => "self_attn.v_proj.weight",
            Self::QueryBias => "self_attn.q_proj.bias",
            Self::KeyBias => "self_attn.k_proj.bias",
            Self::ValueBias => "self_attn.v_proj.bias",
            Self::QueryNorm => "self_attn.q_norm.weight",
            Self::KeyNorm => "self_attn.k_norm.weight",
            Self::Sinks => "self_attn.sinks",
            Self::AttentionOutput => "self_attn.o_proj.weight",
            Self::AttentionOutputBias => "self_attn.o_proj.bias",
            Self::AttentionOutputNorm => "post_self_attn_layernorm.weight",
            Self::MlpNorm => "post_attention_layernorm.weight",
            Self::Gate => "mlp.gate_proj.weight",
            Self::Up => "mlp.up_proj.weight",
            Self::Down => "mlp.down_proj.weight",
            Self::MlpOutputNorm => "post_feedforward_layernorm.weight",
            Self::Router => "mlp.gate.weight",
            Self::RouterBias => "mlp.gate.bias",
            Self::QueryDown => "self_attn.q_a_proj.weight",
            Self::QueryDownNorm => "self_attn.q_a_layernorm.weight",
            Self::QueryUp => "self_attn.q_b_proj.weight",
            Self::KvDown => "self_attn.kv_a_proj_with_mqa.weight",
            Self::KvDownNorm => "self_attn.kv_a_layernorm.weight",
            Self::KvUp => "self_attn.kv_b_proj.weight",
            Self::ChoiceBias => "mlp.gate.e_score_correction_bias",
            Self::SharedGate => "mlp.shared_experts.gate_proj.weight",
            Self::SharedUp => "mlp.shared_experts.up_proj.weight",
            Self::SharedDown => "mlp.shared_experts.down_proj.weight",
            Self::DeltaQkv => "linear_attn.in_proj_qkv.weight",
            Self::DeltaZ => "linear_attn.in_proj_z.weight",
            Self::DeltaB => "linear_attn.in_proj_b.weight",
            Self::DeltaA => "linear_attn.in_proj_a.weight",
            Self::DeltaConv => "linear_attn.conv1d.weight",
            Self::DeltaDecay => "linear_attn.A_log",
            Self::DeltaDecayBias => "linear_attn.dt_bias",
            Self::DeltaNorm => "linear_attn.norm.weight",
            Self::DeltaOutput => "linear_attn.out_proj.weight",
        }
    }
}

impl LayerTensor {
    /// Whether this is of attention, its norms before and behind it aside.
    fn is_of_attention(self) -> bool {
        use LayerTensor::{
            AttentionOutput, AttentionOutputBias, Key, KeyBias, KeyNorm, KvDown, KvDownNorm, KvUp, Query, QueryBias,
            QueryDown, QueryDownNorm, QueryNorm, QueryUp, Sinks, Value, ValueBias,
        };
        let of_heads = [Query, Key, Value, QueryBias, KeyBias, ValueBias, QueryNorm, KeyNorm, Sinks];
        let of_latents = [QueryDown, QueryDownNorm, QueryUp, KvDown, KvDownNorm, KvUp];
        let of_output = [AttentionOutput, AttentionOutputBias];
        of_heads.contains(&self) || of_latents.contains(&self) || of_output.contains(&self)
    }

    /// Whether this is of a gated delta rule.
    fn is_of_delta(self) -> bool {
        use LayerTensor::{
            DeltaA, DeltaB, DeltaConv, DeltaDecay, DeltaDecayBias, DeltaNorm, DeltaOutput, DeltaQkv, DeltaZ,
        };
        let projections = [DeltaQkv, DeltaZ, DeltaB, DeltaA];
        projections.contains(&self) || [DeltaConv, DeltaDecay, DeltaDecayBias, DeltaNorm, DeltaOutput].contains(&self)
    }
}

impl TensorName {
    /// Whether this is a gain of an RMSNorm.
    pub fn is_norm(self) -> bool {
        use LayerTensor::{
            AttentionNorm, AttentionOutputNorm, DeltaNorm, KeyNorm, KvDownNorm, MlpNorm, MlpOutputNorm, QueryDownNorm,
            QueryNorm,
        };
        let of_layer = |tensor| {
            let of_layer = [AttentionNorm, AttentionOutputNorm, MlpNorm, MlpOutputNorm];
            of_layer.contains(&tensor) || [QueryNorm, KeyNorm, QueryDownNorm, KvDownNorm, DeltaNorm].contains(&tensor)
        };
        match self {
            Self::FinalNorm => true,
            Self::Layer(_, tensor) => of_layer(tensor),
            Self::Embedding | Self::Output | Self::Expert(..) => false,
        }
    }

    /// Whether this is a bias.
    pub fn is_bias(self) -> bool {
        use LayerTensor::{AttentionOutputBias, ChoiceBias, DeltaDecayBias, KeyBias, QueryBias, RouterBias, ValueBias};
        match self {
            Self::Layer(_, tensor) => {
                matches!(tensor, QueryBias | KeyBias | ValueBias | AttentionOutputBias | RouterBias | ChoiceBias)
                    || tensor == DeltaDecayBias
            }
            Self::Expert(_, _, tensor) => tensor.is_bias(),
            Self::Embedding | Self::FinalNorm | Self::Output => false,
        }
    }

    /// Whether files store this as a vector; all other tensors are matrices.
    pub fn is_vector(self) -> bool {
        self.is_norm() || self.is_bias() || matches!(self, Self::Layer(_, LayerTensor::Sinks | LayerTensor::DeltaDecay))
    }
}

/// The names of Hugging Face's Llama, because they are the best known.
impl fmt::Display for TensorName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Embedding => f.write_str("model.embed_tokens.weight"),
            Self::FinalNorm => f.write_str("model.norm.weight"),
            Self::Output => f.write_str("lm_head.weight"),
            Self::Layer(layer, tensor) => write!(f, "model.layers.{layer}.{}", tensor.name()),
            Self::Expert(layer, expert, tensor) => {
                write!(f, "model.layers.{layer}.{}", ExpertNames::QWEN.spelled(*expert, *tensor))
            }
        }
    }
}

/// A layer's number in a tensor name: digits without a sign or leading zeros, so that each tensor has exactly one name.
pub(crate) fn layer_index(text: &str) -> Option<usize> {
    let canonical = text == "0" || (!text.starts_with('0') && text.bytes().all(|b| b.is_ascii_digit()));
    if canonical { text.parse().ok() } else { None }
}

impl LayerSpec {
    /// Whether a layer of this spec has `tensor`.
    pub fn has_tensor(&self, tensor: LayerTensor) -> bool {
        if tensor.is_of_attention() || tensor.is_of_delta() {
            return tensor.is_of_delta() == self.delta.is_some()
                && (tensor.is_of_delta() || self.attention_has(tensor));
        }
        use LayerTensor::{
            AttentionNorm, AttentionOutputNorm, ChoiceBias, Down, Gate, MlpNorm, MlpOutputNorm, Router, RouterBias,
            SharedDown, SharedGate, SharedUp, Up,
        };
        match tensor {
            ChoiceBias => self.experts.is_some_and(|experts| experts.choice_bias),
            SharedGate | SharedUp | SharedDown => self.experts.is_some_and(|experts| experts.shared_ffn.is_some()),
            Gate | Up | Down => self.experts.is_none(),
            Router => self.experts.is_some(),
            RouterBias => self.experts.is_some_and(|experts| experts.biases),
            AttentionNorm | MlpNorm => self.norms != LayerNorms::Behind,
            AttentionOutputNorm | MlpOutputNorm => self.norms != LayerNorms::Before,
            _ => true,
        }
    }

    /// The same, of a tensor of attention.
    fn attention_has(&self, tensor: LayerTensor) -> bool {
        use LayerTensor::{
            AttentionOutputBias, Key, KeyBias, KeyNorm, KvDown, KvDownNorm, KvUp, Query, QueryBias, QueryDown,
            QueryDownNorm, QueryNorm, QueryUp, Sinks, Value, ValueBias,
        };
        let latent = self.attention.latent;
        let query_rank = latent.and_then(|latent| latent.query_rank);
        match tensor {
            Query => query_rank.is_none(),
            QueryDown | QueryDownNorm | QueryUp => query_rank.is_some(),
            Key | Value => latent.is_none(),
            KvDown | KvDownNorm | KvUp => latent.is_some(),
            QueryBias | KeyBias | ValueBias => self.attention.qkv_bias,
            QueryNorm | KeyNorm => self.attention.query_key_norm.is_some(),
            AttentionOutputBias => self.attention.output_bias,
            Sinks => self.attention.sinks,
            _ => true,
        }
    }

    /// The layer's tensors, in the order of computation.
    pub fn tensors(&self) -> impl Iterator<Item = LayerTensor> + '_ {
        LayerTensor::ALL.into_iter().filter(|tensor| self.has_tensor(*tensor))
    }
}

impl DecoderSpec {
    /// `[rows, columns]` of a tensor; vectors are `[1, columns]`.
    ///
    /// # Panics
    /// If `name` is of a layer that the spec does not have.
    pub fn tensor_dims(&self, name: TensorName) -> [usize; 2] {
        let (layer, tensor) = match name {
            TensorName::Embedding | TensorName::Output => return [self.vocab, self.hidden],
            TensorName::FinalNorm => return [1, self.hidden],
            TensorName::Expert(layer, _, tensor) => {
                let ffn = self.layers[layer].ffn;
                return match tensor {
                    ExpertTensor::Gate | ExpertTensor::Up => [ffn, self.hidden],
                    ExpertTensor::Down => [self.hidden, ffn],
                    ExpertTensor::GateBias | ExpertTensor::UpBias => [1, ffn],
                    ExpertTensor::DownBias => [1, self.hidden],
                };
            }
            TensorName::Layer(layer, tensor) => (&self.layers[layer], tensor),
        };
        let (q, kv) = (layer.attention.query_dim(), layer.attention.kv_dim());
        let attention = &layer.attention;
        // Tensors that the layer does not have may be of no size.
        let (query_rank, rank, value_dim) = attention
            .latent
            .map_or((0, 0, 0), |latent| (latent.query_rank.unwrap_or_default(), latent.rank, latent.value_dim));
        let shared = layer.experts.and_then(|experts| experts.shared_ffn).unwrap_or_default();
        let experts = layer.experts.map_or(0, |experts| experts.count);
        let delta = layer.delta;
        let (delta_heads, delta_out) = delta.map_or((0, 0), |delta| (delta.value_heads, delta.attended_dim()));
        match tensor {
            LayerTensor::AttentionNorm
            | LayerTensor::AttentionOutputNorm
            | LayerTensor::MlpNorm
            | LayerTensor::MlpOutputNorm
            | LayerTensor::AttentionOutputBias => [1, self.hidden],
            LayerTensor::Query => [if attention.output_gate { 2 * q } else { q }, self.hidden],
            LayerTensor::Key | LayerTensor::Value => [kv, self.hidden],
            LayerTensor::QueryBias => [1, q],
            LayerTensor::KeyBias | LayerTensor::ValueBias => [1, kv],
            LayerTensor::QueryNorm | LayerTensor::KeyNorm => match (layer.attention.query_key_norm, tensor) {
                (Some(QueryKeyNorm::OfAll), LayerTensor::QueryNorm) => [1, q],
                (Some(QueryKeyNorm::OfAll), _) => [1, kv],
                _ => [1, layer.attention.head_dim],
            },
            LayerTensor::AttentionOutput => [self.hidden, attention.attended_dim()],
            LayerTensor::QueryDown => [query_rank, self.hidden],
            LayerTensor::QueryDownNorm => [1, query_rank],
            LayerTensor::QueryUp => [q, query_rank],
            LayerTensor::KvDown => [rank + attention.rotated(), self.hidden],
            LayerTensor::KvDownNorm => [1, rank],
            LayerTensor::KvUp => {
                let plain = attention.head_dim.saturating_sub(attention.rotated());
                [attention.heads * (plain + value_dim), rank]
            }
            LayerTensor::SharedGate | LayerTensor::SharedUp => [shared, self.hidden],
            LayerTensor::SharedDown => [self.hidden, shared],
            LayerTensor::Gate | LayerTensor::Up => [layer.ffn, self.hidden],
            LayerTensor::Down => [self.hidden, layer.ffn],
            LayerTensor::Router => [experts, self.hidden],
            LayerTensor::RouterBias | LayerTensor::ChoiceBias => [1, experts],
            LayerTensor::Sinks => [1, layer.attention.heads],
            LayerTensor::DeltaQkv => [delta.map_or(0, |delta| delta.channels()), self.hidden],
            LayerTensor::DeltaZ => [delta_out, self.hidden],
            LayerTensor::DeltaB | LayerTensor::DeltaA => [delta_heads, self.hidden],
            LayerTensor::DeltaConv => delta.map_or([0, 0], |delta| [delta.channels(), delta.taps]),
            LayerTensor::DeltaDecay | LayerTensor::DeltaDecayBias => [1, delta_heads],
            LayerTensor::DeltaNorm => [1, delta.map_or(0, |delta| delta.value_dim)],
            LayerTensor::DeltaOutput => [self.hidden, delta_out],
        }
    }

    /// Every tensor of the model, in the order of computation; without [`TensorName::Output`] where tied.
    pub fn tensor_names(&self) -> impl Iterator<Item = TensorName> + '_ {
        let layers = self.layers.iter().enumerate();
        let layers = layers.flat_map(|(l, layer)| {
            let (experts, biases) = layer.experts.map_or((0, false), |experts| (experts.count, experts.biases));
            let of_each = if biases { &ExpertTensor::ALL[..] } else { &ExpertTensor::MATRICES };
            let of_expert = move |expert| of_each.iter().map(move |tensor| TensorName::Expert(l, expert, *tensor));
            layer.tensors().map(move |tensor| TensorName::Layer(l, tensor)).chain((0..experts).flat_map(of_expert))
        });
        let output = (!self.tied).then_some(TensorName::Output);
        std::iter::once(TensorName::Embedding).chain(layers).chain([TensorName::FinalNorm]).chain(output)
    }

    /// Whether `name` is a tensor of this model.
    pub fn has_tensor(&self, name: TensorName) -> bool {
        match name {
            TensorName::Output => !self.tied,
            TensorName::Layer(layer, tensor) => self.layers.get(layer).is_some_and(|layer| layer.has_tensor(tensor)),
            TensorName::Expert(layer, expert, tensor) => {
                let experts = self.layers.get(layer).and_then(|layer| layer.experts);
                experts.is_some_and(|experts| expert < experts.count && (experts.biases || !tensor.is_bias()))
            }
            TensorName::Embedding | TensorName::FinalNorm => true,
        }
    }

    /// Parameters in all tensors.
    pub fn parameters(&self) -> u64 {
        self.tensor_names().map(|name| self.tensor_dims(name).iter().map(|&d| d as u64).product::<u64>()).sum()
    }
}
