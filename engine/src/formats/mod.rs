//! Formats of models: GGUF files, Hugging Face folders, seeded random models; and of adapters: peft folders. All models return a [`DecoderSpec`], and tensors by canonical name,
//! as they are stored. What differs by family is in [`crate::families`].
//!
//! A configuration key or tensor that changes the computation and is not implemented is refused by name: a plausible wrong answer is the
//! worst outcome.

use crate::families::{DecoderSpec, TensorName};
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, GgufTokenizer, SamplingDefaults, TextBundle, TokenId};
use std::borrow::Cow;

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

/// A tensor as its file stores it, row-major.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug)]
pub struct StoredTensor<'a> {
    pub format: StorageFormat,
    pub bytes: Cow<'a, [u8]>,
}

/// An opened, checked model: everything but the tensor data is in memory and known to be consistent.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait ModelSource: Send + Sync {
    fn spec(&self) -> &DecoderSpec;
    /// One tensor as it is stored, with rows in the order of [`TensorName`].
    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError>;
    /// One tensor, expanded to f32, row-major.
    fn tensor(&self, name: TensorName) -> Result<Vec<f32>, WeightsError> {
        let StoredTensor { format, bytes } = self.stored(name)?;
        let mut out = vec![0.0; self.spec().tensor_dims(name).iter().product()];
        format.expand(&bytes, &mut out);
        Ok(out)
    }
    /// Whether matrices are stored in a quantized format: `i8x32` needs it.
    fn is_quantized(&self) -> bool {
        false
    }
    /// Digest over configuration and weights.
    fn fingerprint(&self) -> Digest;
    /// As [`ModelSource::fingerprint`], without reading files whose digests are known. `None` if the model is in no files.
    fn known_fingerprint(&self, _: &KnownFingerprints) -> Option<Digest> {
        None
    }
    /// Gives memory back that holds a tensor: it was read, and will hardly be read again.
    fn release(&self, _: TensorName) {}
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
mod fingerprints;
mod gguf;
mod huggingface;
mod mmap;
mod peft;
mod random;
mod rotary;
mod sampling;

pub use error::WeightsError;
pub use fingerprints::KnownFingerprints;
pub(crate) use gguf::GgufConfig;
pub use gguf::GgufModel;
pub use huggingface::HuggingFaceModel;
pub(crate) use huggingface::JsonObject;
pub use peft::{AdapterLimits, read_peft};
pub use random::RandomModel;
use sampling::check_sampling;
