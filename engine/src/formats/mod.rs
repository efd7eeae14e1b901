//! Formats of models: GGUF files, Hugging Face folders, seeded random models. All return a [`DecoderSpec`], and f32 tensors by canonical
//! name. What differs by family is in [`crate::models`].
//!
//! A configuration key or tensor that changes the computation and is not implemented is refused by name: a plausible wrong answer is the
//! worst outcome.

use crate::models::{DecoderSpec, TensorName};
use baton_types::{Digest, GgufTokenizer, SamplingDefaults, TextBundle, TokenId};

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
    fn spec(&self) -> &DecoderSpec;
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

pub use error::WeightsError;
pub use gguf::GgufModel;
pub use huggingface::HuggingFaceModel;
pub(crate) use huggingface::JsonObject;
pub use random::RandomModel;
use sampling::check_sampling;
