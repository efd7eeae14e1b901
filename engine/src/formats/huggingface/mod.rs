//! Models in a Hugging Face folder: `config.json`, safetensors, tokenizer files, `generation_config.json`.

mod config;
mod generation;
mod json;
mod keys;
mod mxfp4;
mod quantized;
mod rope;
mod shards;
mod stacked;
mod tensors;
mod text;

use super::mmap::MappedFile;
use super::{KnownFingerprints, ModelSource, StoredTensor, TextSource, WeightsError, rotary};
use crate::families::{ConfigFamily, DecoderSpec, TensorName};
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, SamplingDefaults, TextBundle, TokenId};
pub(crate) use json::{JsonObject, is_off};
use std::path::Path;
use std::sync::OnceLock;
use tensors::Tensors;

/// An opened and checked model folder.
pub struct HuggingFaceModel {
    name: String,
    folder: String,
    spec: DecoderSpec,
    family: &'static ConfigFamily,
    tensors: Tensors,
    config_digest: Digest,
    end_tokens: Vec<TokenId>,
    sampling: SamplingDefaults,
    bundle: Option<TextBundle>,
    /// By what its rotary embeddings are told apart from those of other contexts.
    served_context: Option<usize>,
    fingerprint: OnceLock<Digest>,
}

impl HuggingFaceModel {
    /// Opens `folder` and checks every key and every tensor's type, shape and location; reads no tensor data. `name` is the model's name
    /// for users; default: the folder's name.
    pub fn open(folder: &Path, name: Option<&str>) -> Result<Self, WeightsError> {
        let config_path = folder.join("config.json");
        let config = Self::config(&config_path, folder)?;
        let (spec, family) = config::read(&config)?;
        let scheme = quantized::Scheme::read(&config, family)?;
        let tensors = Tensors::open(folder, &spec, family, scheme, extra_layers(&config, family)?)?;
        let text = text::read(folder)?;
        let generation = JsonObject::read(&folder.join("generation_config.json"))?;
        let tokenizer_eos = text.as_ref().and_then(|text| text.eos);
        let end_tokens = generation::end_tokens(&config, generation.as_ref(), tokenizer_eos, spec.vocab)?;
        let sampling = generation.as_ref().map(generation::sampling).transpose()?.unwrap_or_default();
        let config_digest = MappedFile::open(&config_path)?.digest();
        // `models/x/.` and `.` have no name of their own.
        let real = folder.canonicalize().ok();
        let own = real.as_deref().and_then(Path::file_name).map(|name| name.to_string_lossy().into_owned());
        Ok(Self {
            name: name.map(str::to_owned).or(own).unwrap_or_default(),
            folder: folder.display().to_string(),
            spec,
            family,
            tensors,
            config_digest,
            end_tokens,
            sampling,
            bundle: text.map(|text| text.bundle),
            served_context: None,
            fingerprint: OnceLock::new(),
        })
    }

    /// The same for sequences of at most `context` tokens; 0 is all of its context. With LongRoPE and dynamic scaling this is another model: the
    /// KV of a token depends on it.
    #[must_use]
    pub fn serving(mut self, context: usize) -> Self {
        if let Some(context) = self.spec.serve_at_most(context) {
            (self.served_context, self.fingerprint) = (Some(context), OnceLock::new());
        }
        self
    }

    /// The spec from `config.json` of `folder`, checked as [`HuggingFaceModel::open`] does; needs no weights.
    pub fn read_spec(folder: &Path) -> Result<DecoderSpec, WeightsError> {
        let config = Self::config(&folder.join("config.json"), folder)?;
        let (spec, family) = config::read(&config)?;
        quantized::Scheme::read(&config, family)?;
        Ok(spec)
    }

    /// BLAKE3 over the names and digests of `config.json` and of the safetensors files in order of their names.
    fn digest(&self, digest: impl Fn(&MappedFile) -> Digest) -> Digest {
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"hugging face folder, version 1\n");
        let shards = self.tensors.shards().iter().map(|(name, file)| (name.as_str(), digest(file)));
        for (name, digest) in std::iter::once(("config.json", self.config_digest)).chain(shards) {
            // Names contain no line breaks, so the record is unambiguous.
            hasher.update(format!("{name} {digest}\n").as_bytes());
        }
        if let Some(context) = self.served_context {
            hasher.update(format!("rotary embedding of {context} tokens\n").as_bytes());
        }
        Digest(*hasher.finalize().as_bytes())
    }

    fn config(path: &Path, folder: &Path) -> Result<JsonObject, WeightsError> {
        let config = JsonObject::read(path)?.ok_or_else(|| {
            WeightsError::damaged(&folder.display().to_string(), "there is no config.json, so this is no model folder")
        })?;
        config::of_decoder(config)
    }
}

/// Layers behind the last one that a folder may have, and that are not computed.
fn extra_layers(config: &JsonObject, family: &ConfigFamily) -> Result<usize, WeightsError> {
    let stated = family.extra_layers.iter().map(|key| config.size(key)).collect::<Result<Vec<_>, _>>()?;
    Ok(stated.into_iter().flatten().max().unwrap_or(0).min(DecoderSpec::LAYERS_MAX))
}

impl ModelSource for HuggingFaceModel {
    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        let stored = self.tensors.stored(name).unwrap_or_else(|| {
            Err(WeightsError::damaged(&self.folder, format!("there is no tensor {}", self.family.spelled(name))))
        })?;
        let stored = rotary::in_halves(&self.spec, self.family.rotary_rows, name, stored);
        let offset = self.family.offset_of(name);
        if offset == 0.0 {
            return Ok(stored);
        }
        let mut gain = vec![0.0; self.spec.tensor_dims(name)[1]];
        stored.format.expand(&stored.bytes, &mut gain);
        let bytes = gain.into_iter().flat_map(|gain| (gain + offset).to_le_bytes());
        Ok(StoredTensor { format: StorageFormat::F32, bytes: bytes.collect::<Vec<_>>().into() })
    }

    fn is_quantized(&self) -> bool {
        self.tensors.has_integers()
    }

    fn fingerprint(&self) -> Digest {
        *self.fingerprint.get_or_init(|| self.digest(MappedFile::digest))
    }

    fn known_fingerprint(&self, known: &KnownFingerprints) -> Option<Digest> {
        Some(*self.fingerprint.get_or_init(|| self.digest(|file| file.known_digest(known))))
    }

    fn release(&self, name: TensorName) {
        self.tensors.release(name);
    }

    fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.sampling
    }

    fn text(&self) -> TextSource {
        self.bundle.clone().map_or(TextSource::None, |bundle| TextSource::Bundle(Box::new(bundle)))
    }

    fn name(&self) -> &str {
        &self.name
    }
}
