//! The description of a decoder: everything that decides what it computes, apart from the tensors' values.

use super::{GatedDeltaSpec, Rope};
use baton_kernels::program::{Activation, Choice, ExpertGroups, Scoring};
use baton_types::{Attention, Dtype, KvLayout, LayerKv, LayoutError};

/// Dimensions and constants of a decoder: an embedding, layers around an f32 residual stream, RMSNorm, and the output matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct DecoderSpec {
    /// Vocabulary size (rows of the embedding).
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Longest context the model was made for.
    pub context: usize,
    /// Factor of the embedding's rows.
    pub embedding_factor: f32,
    /// The layers, in the order of computation.
    pub layers: Vec<LayerSpec>,
    /// Epsilon in the root mean square of the RMSNorm before the output.
    pub final_rms_eps: f32,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
    /// Factor of the logits.
    pub logit_factor: f32,
    /// Bound of the logits, after the factor: `cap * tanh(logit / cap)`.
    pub logit_soft_cap: Option<f32>,
}

/// One layer: `x += factor * attention(x)`, then `x += factor * mlp(x)` with the gated MLP `(activation(h * gate) * (h * up)) * down`, and RMSNorms
/// before or behind both.
#[derive(Clone, Debug, PartialEq)]
pub struct LayerSpec {
    /// The attention.
    pub attention: AttentionSpec,
    /// A gated delta rule in place of the attention, which then has no tensors.
    pub delta: Option<GatedDeltaSpec>,
    /// Where the norms of attention and MLP are.
    pub norms: LayerNorms,
    /// Factor of what attention and MLP add to the residual stream.
    pub residual_factor: f32,
    /// Width of the MLP, or of each expert's.
    pub ffn: usize,
    /// Experts in place of the MLP.
    pub experts: Option<ExpertsSpec>,
    /// Function of the MLP's gate.
    pub activation: Activation,
    /// Epsilon in the root mean square of this layer's RMSNorms, those of heads included.
    pub rms_eps: f32,
}

/// A layer's experts. A router chooses some for each token; their weighted sum takes the place of the MLP.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ExpertsSpec {
    /// How many there are.
    pub count: usize,
    /// Which are used for a token, and their weights.
    pub choice: Choice,
    /// Whether a bias is added to the scores by which they are chosen.
    pub choice_bias: bool,
    /// Width of an expert that all tokens use with a weight of 1, if there is one.
    pub shared_ffn: Option<usize>,
    /// Whether a bias is added to the router's logits, and to gates, ups and downs.
    pub biases: bool,
}

impl ExpertsSpec {
    /// Weights by a softmax over all logits. `renormalize`: those of the experts used are divided by their sum.
    pub fn softmax(count: usize, used: usize, renormalize: bool) -> Self {
        let choice = Choice::softmax(used, renormalize);
        Self { count, choice, choice_bias: false, shared_ffn: None, biases: false }
    }
}

/// Where a layer's RMSNorms are, those of heads aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerNorms {
    /// `x + part(norm(x))`
    Before,
    /// `x + norm(part(x))`
    Behind,
    /// `x + norm(part(norm(x)))`
    Both,
}

/// Which norm queries and keys pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum QueryKeyNorm {
    /// An RMSNorm of each head. All heads of a layer share one gain for queries and one for keys, `[head_dim]`.
    OfHeads,
    /// One RMSNorm of all heads' queries, and one of all heads' keys.
    OfAll,
}

/// Keys and values of all heads as products of one compressed vector (DeepSeek-AI, "DeepSeek-V2", arXiv:2405.04434), which is all that is stored of a
/// token, with a part of the key that is rotated and shared by all heads.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LatentSpec {
    /// Elements of the compressed query; `None`: queries are not compressed.
    pub query_rank: Option<usize>,
    /// Elements of compressed keys and values.
    pub rank: usize,
    /// Elements of a head's value.
    pub value_dim: usize,
    /// Epsilon in the root mean square of the RMSNorms of compressed vectors.
    pub rms_eps: f32,
}

/// Causal grouped-query attention, or latent attention.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionSpec {
    /// Number of query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`. As many as `heads` with latents.
    pub kv_heads: usize,
    /// Elements of one head's query, key or value. With latents, of a query and a key, whose last ones are rotated.
    pub head_dim: usize,
    /// Keys and values of latents.
    pub latent: Option<LatentSpec>,
    /// Tokens that a token attends to, itself included: those at positions `p - window + 1 ..= p`. `None`: all tokens up to itself.
    pub window: Option<u32>,
    /// Whether a bias is added to queries, keys and values, before anything else.
    pub qkv_bias: bool,
    /// Factor of the scores; mostly `1 / sqrt(head_dim)`.
    pub scale: f32,
    /// Bound of the scores, after the factor: `cap * tanh(score / cap)`.
    pub soft_cap: Option<f32>,
    /// Whether each query head has a sink: a score that joins the softmax, and has no value.
    pub sinks: bool,
    /// Whether a bias is added to the output.
    pub output_bias: bool,
    /// Whether what each query head attended is multiplied by the sigmoid of a gate, of as many elements, before the output.
    pub output_gate: bool,
    /// The norm of queries and keys, after the biases and before the rotary embedding.
    pub query_key_norm: Option<QueryKeyNorm>,
    /// The rotary embedding of queries and keys; `None`: they stay as they are, and the mask alone tells their order (Kazemnejad et al.,
    /// arXiv:2305.19466).
    pub rope: Option<Rope>,
}

/// The default of [`AttentionSpec::scale`].
pub(crate) fn attention_scale(head_dim: usize) -> f32 {
    (1.0 / (head_dim as f64).sqrt()) as f32
}

impl AttentionSpec {
    /// Attention as in Llama, to all tokens.
    pub fn llama(heads: usize, kv_heads: usize, head_dim: usize, rope: Rope) -> Self {
        Self {
            heads,
            kv_heads,
            head_dim,
            latent: None,
            window: None,
            qkv_bias: false,
            scale: attention_scale(head_dim),
            soft_cap: None,
            sinks: false,
            output_bias: false,
            output_gate: false,
            query_key_norm: None,
            rope: Some(rope),
        }
    }

    /// Elements of all heads' queries.
    pub fn query_dim(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements that are rotated of a query, and of a key.
    pub fn rotated(&self) -> usize {
        self.rope.as_ref().map_or(0, |rope| rope.dim)
    }

    /// Elements of all heads' values, before the output.
    pub fn attended_dim(&self) -> usize {
        self.heads * self.latent.map_or(self.head_dim, |latent| latent.value_dim)
    }

    /// What is stored of a token.
    fn token_kv(&self) -> LayerKv {
        match self.latent {
            Some(LatentSpec { rank, .. }) => LayerKv::Latent { dim: (rank + self.rotated()) as u32 },
            None => LayerKv::Heads { kv_heads: self.kv_heads as u32, head_dim: self.head_dim as u32 },
        }
    }

    /// Elements of all heads' keys, and of their values.
    pub fn kv_dim(&self) -> usize {
        self.kv_heads * self.head_dim
    }
}

impl DecoderSpec {
    /// Says that sequences have at most `context` tokens. Rotary embeddings that depend on the context are those of this one, whatever the
    /// length of a sequence: the KV of a token never changes. Returns by what they are told apart from those of other contexts.
    pub(crate) fn serve(&mut self, context: usize) -> Option<usize> {
        let ropes = self.layers.iter_mut().filter_map(|layer| layer.attention.rope.as_mut());
        ropes.filter_map(|rope| rope.serve(context)).max()
    }

    /// The same where `most` is less than the model's context. Otherwise, and for 0, nothing changes.
    pub(crate) fn serve_at_most(&mut self, most: usize) -> Option<usize> {
        (1..self.context).contains(&most).then(|| self.serve(most)).flatten()
    }

    /// Largest dimension. Larger numbers in a header mean damage, and below this limit products of three fit a `u64`.
    pub const DIMENSION_MAX: usize = 1 << 21;

    /// Most layers: a spec describes each, so a damaged count must not take much memory. The deepest published decoders have under 200.
    pub const LAYERS_MAX: usize = 1 << 10;

    /// Most experts of a layer: several times those of published models.
    pub const EXPERTS_MAX: usize = 1 << 12;

    /// A spec of `count` layers that are alike. Checks the count, which may come from a damaged file, before it takes memory.
    pub(crate) fn uniform_layers(layer: LayerSpec, count: usize) -> Result<Vec<LayerSpec>, String> {
        in_range("layers", count, Self::LAYERS_MAX)?;
        Ok(vec![layer; count])
    }

    /// What attention stores and attends to, by groups of layers that are alike.
    pub fn attention(&self) -> Attention {
        Attention::of_layers(self.layers.iter().map(|layer| match layer.delta {
            Some(delta) => (None, delta.state()),
            None => (layer.attention.window, layer.attention.token_kv()),
        }))
    }

    /// The KV layout with this block size: groups with planes `k` and `v`, a plane `latent`, or planes `conv` and `state`, see
    /// [`Attention::layout`].
    ///
    /// # Panics
    /// If there are no layers.
    pub fn kv_layout(&self, block_tokens: u32, kv: Dtype) -> Result<KvLayout, LayoutError> {
        self.attention().layout(block_tokens, kv)
    }

    /// Checks that the numbers form a model that can be computed; the message names the invalid one.
    pub fn check(&self) -> Result<(), String> {
        in_range("vocab", self.vocab, Self::DIMENSION_MAX)?;
        in_range("hidden", self.hidden, Self::DIMENSION_MAX)?;
        // A context is only a limit, not a tensor's size: some models state absurdly long ones.
        in_range("context", self.context, u32::MAX as usize)?;
        in_range("layers", self.layers.len(), Self::LAYERS_MAX)?;
        positive("rms_eps", self.final_rms_eps)?;
        positive("embedding factor", self.embedding_factor)?;
        positive("logit factor", self.logit_factor)?;
        self.logit_soft_cap.map_or(Ok(()), |cap| positive("soft cap of logits", cap))?;
        self.layers.iter().try_for_each(LayerSpec::check)?;
        let groups = self.attention().groups.len();
        match groups <= KvLayout::GROUPS_MAX {
            true => Ok(()),
            false => Err(format!(
                "{groups} groups of layers with a window and a size of keys of their own; {} are possible",
                KvLayout::GROUPS_MAX
            )),
        }
    }
}

impl LayerSpec {
    /// A layer as in Llama.
    pub fn llama(attention: AttentionSpec, ffn: usize, rms_eps: f32) -> Self {
        let (norms, activation) = (LayerNorms::Before, Activation::Silu);
        Self { attention, delta: None, norms, residual_factor: 1.0, ffn, experts: None, activation, rms_eps }
    }

    fn check(&self) -> Result<(), String> {
        let attention = &self.attention;
        let max = DecoderSpec::DIMENSION_MAX;
        in_range("heads", attention.heads, max)?;
        in_range("kv_heads", attention.kv_heads, max)?;
        in_range("head_dim", attention.head_dim, max)?;
        in_range("ffn", self.ffn, max)?;
        self.experts.map_or(Ok(()), |experts| experts.check())?;
        if attention.query_dim() > max {
            return Err(format!("heads * head_dim is over {max}"));
        }
        if !attention.heads.is_multiple_of(attention.kv_heads) {
            let AttentionSpec { heads, kv_heads, .. } = attention;
            return Err(format!("{heads} query heads do not divide among {kv_heads} kv heads"));
        }
        if !attention.head_dim.is_multiple_of(2) {
            return Err(format!("head_dim is {}; rotary embedding needs it even", attention.head_dim));
        }
        if attention.window == Some(0) {
            return Err("window is 0; a token attends to itself at least".into());
        }
        positive("rms_eps", self.rms_eps)?;
        positive("residual factor", self.residual_factor)?;
        positive("factor of the scores", attention.scale)?;
        if let Activation::ClampedSwiglu { alpha, limit } = self.activation {
            positive("factor of the gate", alpha)?;
            positive("bound of gate and up", limit)?;
        }
        attention.soft_cap.map_or(Ok(()), |cap| positive("soft cap of scores", cap))?;
        if self.experts.is_some() && self.norms != LayerNorms::Before {
            return Err("experts with norms behind them are not implemented".into());
        }
        attention.check_latent()?;
        attention.check_gate()?;
        self.delta.map_or(Ok(()), |delta| delta.check())?;
        let Some(rope) = &attention.rope else { return Ok(()) };
        positive("rope theta", rope.theta)?;
        in_range("rotated elements of a head", rope.dim, attention.head_dim)?;
        if !rope.dim.is_multiple_of(2) {
            return Err(format!("{} elements of a head are rotated; rotary embedding needs pairs", rope.dim));
        }
        rope.scaling.check(rope.dim)
    }
}

impl AttentionSpec {
    fn check_gate(&self) -> Result<(), String> {
        match self.output_gate && (self.latent.is_some() || self.qkv_bias) {
            true => {
                Err("a gate of attention's output with latents, or with biases of queries, is not implemented".into())
            }
            false => Ok(()),
        }
    }

    fn check_latent(&self) -> Result<(), String> {
        let Some(LatentSpec { query_rank, rank, value_dim, rms_eps }) = self.latent else { return Ok(()) };
        let (max, rotated) = (DecoderSpec::DIMENSION_MAX, self.rotated());
        in_range("rank of compressed keys and values", rank, max)?;
        in_range("elements of a value", value_dim, max)?;
        query_rank.map_or(Ok(()), |rank| in_range("rank of the compressed query", rank, max))?;
        positive("rms_eps of compressed vectors", rms_eps)?;
        in_range("elements of all heads' values", self.heads.saturating_mul(value_dim), max)?;
        in_range("latents of all heads", self.heads.saturating_mul(rank + rotated), max)?;
        if rotated == 0 || rotated >= self.head_dim {
            return Err(format!("{rotated} of {} elements are rotated; latents need some, and others", self.head_dim));
        }
        if self.kv_heads != self.heads {
            return Err(format!("{} kv heads of {}; latents have as many", self.kv_heads, self.heads));
        }
        if self.qkv_bias || self.query_key_norm.is_some() {
            return Err("biases and norms of queries and keys with latents are not implemented".into());
        }
        Ok(())
    }
}

impl ExpertsSpec {
    fn check(&self) -> Result<(), String> {
        in_range("experts", self.count, DecoderSpec::EXPERTS_MAX)?;
        let Choice { used, groups, factor, scoring, renormalize: _ } = self.choice;
        in_range("experts used", used, self.count)?;
        positive("factor of experts", factor)?;
        self.shared_ffn
            .map_or(Ok(()), |ffn| in_range("width of the shared expert", ffn, DecoderSpec::DIMENSION_MAX))?;
        let Some(ExpertGroups { count, used: groups_used, best }) = groups else { return Ok(()) };
        in_range("groups of experts", count, self.count)?;
        in_range("groups of experts used", groups_used, count)?;
        if !self.count.is_multiple_of(count) {
            return Err(format!("{} experts do not divide among {count} groups", self.count));
        }
        let each = self.count / count;
        in_range(
            "experts by which a group is chosen",
            best,
            if scoring == Scoring::Softmax { 1 } else { each.min(2) },
        )?;
        in_range("experts used", used, groups_used * each)
    }
}

pub(super) fn in_range(name: &str, value: usize, max: usize) -> Result<(), String> {
    if value == 0 || value > max {
        return Err(format!("{name} is {value}; 1 to {max} is possible"));
    }
    Ok(())
}

pub(super) fn positive(name: &str, value: f32) -> Result<(), String> {
    if value.is_finite() && value > 0.0 {
        return Ok(());
    }
    Err(format!("{name} is {value}; it must be positive and finite"))
}

#[cfg(test)]
mod tests {
    use crate::formats::{ModelSource, RandomModel};
    use baton_types::{Dtype, GroupKind};

    #[test]
    fn layers_of_each_window_and_size_form_a_group() {
        let model = RandomModel::parse("random:layers=9,window=9,full_every=2").unwrap();
        let mut spec = model.spec().clone();
        let groups = |spec: &super::DecoderSpec| {
            let layout = spec.kv_layout(16, Dtype::Bf16).unwrap();
            layout.groups().iter().map(|group| (group.kind, group.layers.clone())).collect::<Vec<_>>()
        };
        let (full, window) = (GroupKind::Full, GroupKind::Window(9));
        assert_eq!(
            (groups(&spec), spec.check()),
            (vec![(full, vec![1, 3, 5, 7]), (window, vec![0, 2, 4, 6, 8])], Ok(()))
        );
        spec.layers[5].attention.head_dim = 4;
        spec.layers[8].attention.kv_heads = 2;
        let expected = vec![(full, vec![1, 3, 7]), (full, vec![5]), (window, vec![0, 2, 4, 6]), (window, vec![8])];
        assert_eq!(groups(&spec), expected);
        let mut spec = model.spec().clone();
        for (layer, window) in spec.layers.iter_mut().zip(1..) {
            layer.attention.window = Some(window);
        }
        let message = spec.check().unwrap_err();
        assert!(message.contains("9 groups") && message.contains("8 are possible"), "{message}");
        spec.layers[0].attention.window = Some(9);
        assert_eq!((groups(&spec).len(), spec.check()), (8, Ok(())));
    }
}
