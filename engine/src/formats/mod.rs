//! Sources of weights: GGUF files, Hugging Face folders, seeded random models. All return f32 tensors by canonical name.
//!
//! A configuration key or tensor that changes the computation and is not implemented is refused by name: a plausible wrong answer is the
//! worst outcome.

use baton_types::{Digest, GgufTokenizer, SamplingDefaults, TextBundle, TokenId};

/// Dimensions and constants of a Llama-family decoder.
#[derive(Clone, Debug, PartialEq)]
pub struct ModelShape {
    /// Vocabulary size (rows of the embedding).
    pub vocab: usize,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Number of decoder layers.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Key/value heads; divides `heads`.
    pub kv_heads: usize,
    /// Elements of one head's query, key or value.
    pub head_dim: usize,
    /// Width of the MLP.
    pub ffn: usize,
    /// Longest context the model was made for.
    pub context: usize,
    /// Epsilon in the root mean square of RMSNorm.
    pub rms_eps: f32,
    /// Base and scaling of the rotary embedding.
    pub rope: Rope,
    /// Whether the output matrix is the embedding.
    pub tied: bool,
}

/// Rotary embedding: base and scaling.
#[derive(Clone, Debug, PartialEq)]
pub struct Rope {
    /// Base `theta` of the rotary frequencies.
    pub theta: f32,
    /// Scaling of the frequencies.
    pub scaling: RopeScaling,
}

/// How rotary frequencies are scaled beyond the trained context.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq)]
pub enum RopeScaling {
    /// Frequencies as trained, without scaling.
    None,
    /// All frequencies divided by `factor`.
    Linear { factor: f32 },
    /// Llama 3.1: by wavelength.
    Llama3 {
        /// Divisor of low frequencies.
        factor: f32,
        /// `low_freq_factor`: frequencies with a wavelength over `original_context` divided by this are divided by `factor`.
        low_freq_factor: f32,
        /// `high_freq_factor`: frequencies with a wavelength under `original_context` divided by this stay as they are.
        high_freq_factor: f32,
        /// `original_max_position_embeddings`: the context that the model was first trained for, in tokens.
        original_context: usize,
    },
    /// A divisor per frequency, `[head_dim / 2]` (GGUF's `rope_freqs.weight`).
    Factors(Vec<f32>),
}

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
}

/// Tensors of one decoder layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum LayerTensor {
    /// Gain of the RMSNorm before attention, `[hidden]`.
    AttentionNorm,
    /// `[heads * head_dim, hidden]`
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
}

/// A model's tokenizer data, before it is normalized into a bundle.
#[derive(Clone, Debug)]
pub enum TextSource {
    /// Metadata of a GGUF file.
    Gguf(Box<GgufTokenizer>),
    /// Files of a Hugging Face folder.
    Bundle(Box<TextBundle>),
    /// A random model: its tokens have no text, so it serves only token-id prompts.
    None,
}

/// An opened, checked model: everything but the tensor data is in memory and known to be consistent.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait ModelSource: Send + Sync {
    fn shape(&self) -> &ModelShape;
    /// One tensor, dequantized to f32, row-major.
    fn tensor(&self, name: TensorName) -> Result<Vec<f32>, WeightsError>;
    /// Digest over configuration and weights.
    fn fingerprint(&self) -> Digest;
    /// Ids of all tokens that end a sequence.
    fn end_tokens(&self) -> &[TokenId];
    /// Sampling defaults of the model.
    fn sampling_defaults(&self) -> SamplingDefaults;
    /// Tokenizer and chat template, as the source has them.
    fn text(&self) -> TextSource;
    /// A short name for users and `/v1/models`, e.g. the folder's or file's.
    fn name(&self) -> &str;
}

mod error;
mod gguf;
mod huggingface;
mod mmap;
mod random;
mod sampling;
mod shape;

pub use error::WeightsError;
pub use gguf::GgufModel;
pub use huggingface::HuggingFaceModel;
pub use random::RandomModel;
use sampling::check_sampling;
use shape::layer_index;
