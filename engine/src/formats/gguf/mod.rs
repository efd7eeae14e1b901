//! Models in one GGUF file: metadata, tokenizer, and tensors as their stored bytes.

mod config;
mod cursor;
mod delta;
mod format;
mod fused;
mod header;
mod latents;
mod names;
mod repack;
mod text;
mod value;

use super::mmap::MappedFile;
use super::rotary;
use super::{KnownFingerprints, ModelSource, StoredTensor, TextSource, WeightsError};
use crate::families::{DecoderSpec, GgufFamily, LayerTensor, TensorName};
use baton_kernels::storage::StorageFormat;
use baton_types::{Digest, GgufTokenizer, SamplingDefaults, TokenId};
pub(crate) use config::GgufConfig;
use config::RopeFactors;
use format::FileFormat;
use header::{Header, TensorEntry};
use std::collections::HashMap;
use std::path::Path;
use std::sync::OnceLock;

/// An opened and checked GGUF file.
pub struct GgufModel {
    file: MappedFile,
    name: String,
    spec: DecoderSpec,
    family: &'static GgufFamily,
    tensors: HashMap<TensorName, TensorEntry>,
    /// Of [`LayerTensor::KvUp`], where it is in two.
    latents: latents::Parts,
    end_tokens: Vec<TokenId>,
    sampling: SamplingDefaults,
    tokenizer: Option<GgufTokenizer>,
    /// By what its rotary embeddings are told apart from those of other contexts.
    served_context: Option<usize>,
    fingerprint: OnceLock<Digest>,
}

impl GgufModel {
    /// Opens `path` and checks header, metadata and every tensor's type, shape and location; reads no tensor data. `name` is the model's
    /// name for users; default: the file's stem.
    pub fn open(path: &Path, name: Option<&str>) -> Result<Self, WeightsError> {
        let file = MappedFile::open(path)?;
        let header = Header::parse(file.path(), file.bytes())?;
        let config = GgufConfig::try_new(file.path(), &header)?;
        let mut tensors = HashMap::new();
        let mut latents = latents::Parts::new();
        let (mut fused, mut factors) = (Vec::new(), RopeFactors::default());
        let (layers, extra) = config.layers()?;
        let mut of_extra_layers = 0;
        for (name, entry) in &header.tensors {
            if names::layer(name).is_some_and(|layer| (layers..layers + extra).contains(&layer)) {
                of_extra_layers += 1;
            } else if *name == names::ROPE_FREQS {
                factors.all = Some(read_factors(&file, name, entry)?);
            } else if *name == names::ROPE_SHORT {
                factors.short = Some(read_factors(&file, name, entry)?);
            } else if *name == names::ROPE_LONG {
                factors.long = Some(read_factors(&file, name, entry)?);
            } else if let Some((layer, tensor)) = names::of_experts(name) {
                let dimensions = if tensor.is_bias() { 2 } else { 3 };
                let entries = of_each_expert(&config, name, layer, dimensions, entry)?;
                for (expert, entry) in entries.into_iter().enumerate() {
                    tensors.insert(TensorName::Expert(layer, expert, tensor), entry);
                }
            } else if let Some((layer, part)) = names::of_latents(name) {
                latents.entry(layer).or_default().insert(part, entry.clone());
            } else if let Some((layer, of)) = names::fused(config.family(), name) {
                fused.push((layer, of, entry.clone()));
            } else if let Some(canonical) = names::canonical(config.family(), name) {
                tensors.insert(canonical, entry.clone());
            } else {
                return Err(left_out(&file, name));
            }
        }
        if of_extra_layers > 0 {
            let what = "of layers behind the last one, which predict tokens after the next,";
            tracing::info!("{of_extra_layers} tensors {what} are left out: they are not computed");
        }
        let embedding = tensors.get(&TensorName::Embedding);
        let vocab = embedding.and_then(|entry| entry.dims.get(1).copied());
        let vocab = vocab.ok_or_else(|| config.damaged("tensor token_embd.weight is missing or no matrix"))?;
        let tied = !tensors.contains_key(&TensorName::Output);
        let spec = config.spec(vocab, tied, factors)?;
        tensors.extend(fused::split(&config, &spec, fused)?);
        latents::check(&config, &spec, &latents)?;
        check_tensors(&config, &file, &spec, &tensors, &latents)?;
        let tokenizer = text::tokenizer(&config, vocab)?;
        let end_tokens = text::end_tokens(&config, tokenizer.as_ref(), vocab)?;
        let sampling = config.sampling()?;
        let stem = path.file_stem().map(|stem| stem.to_string_lossy().into_owned());
        let name = name.map(str::to_owned).or(stem).unwrap_or_default();
        let family = config.family();
        let (served_context, fingerprint) = (None, OnceLock::new());
        Ok(Self {
            file,
            name,
            spec,
            family,
            tensors,
            latents,
            end_tokens,
            sampling,
            tokenizer,
            served_context,
            fingerprint,
        })
    }

    /// The same for sequences of at most `context` tokens, as of [`HuggingFaceModel`](super::HuggingFaceModel::serving).
    #[must_use]
    pub fn serving(mut self, context: usize) -> Self {
        if let Some(context) = self.spec.serve_at_most(context) {
            (self.served_context, self.fingerprint) = (Some(context), OnceLock::new());
        }
        self
    }

    /// The fingerprint, of a file with this digest.
    fn fingerprint_of(&self, file: Digest) -> Digest {
        let Some(context) = self.served_context else { return file };
        let of_context = format!("GGUF file, version 1\n{file}\nrotary embedding of {context} tokens\n");
        Digest(*blake3::hash(of_context.as_bytes()).as_bytes())
    }
}

/// The refusal of a tensor that this model's computation does not use.
fn left_out(file: &MappedFile, name: &str) -> WeightsError {
    let hint = "the computation would leave it out, so the model is refused rather than computed wrongly";
    WeightsError::unsupported(file.path(), format!("tensor {name}"), hint)
}

/// The matrices of a tensor of three dimensions, or the vectors of one of two, one behind another.
fn of_each_expert(
    config: &GgufConfig<'_, '_>,
    name: &str,
    layer: usize,
    dimensions: usize,
    entry: &TensorEntry,
) -> Result<Vec<TensorEntry>, WeightsError> {
    let TensorEntry { dims, format, bytes } = entry;
    let (count, dims) = match dims.split_last() {
        Some((count, of_one)) if dims.len() == dimensions => (*count, of_one),
        _ => return Err(config.damaged(format!("tensor {name} has dimensions {dims:?}; {dimensions} are needed"))),
    };
    let (experts, layers) = (config.own_size_or("expert_count", 0)?, config.layers()?.0);
    if layer >= layers || experts > DecoderSpec::EXPERTS_MAX {
        return Err(config.damaged(format!("tensor {name} in a model of {layers} layers with {experts} experts")));
    }
    if count != experts || count == 0 {
        return Err(config.damaged(format!("tensor {name} is of {count} experts, the model has {experts}")));
    }
    let each = bytes.len() / count;
    let part = |i: usize| {
        let start = bytes.start + i * each;
        TensorEntry { dims: dims.to_vec(), format: *format, bytes: start..start + each }
    };
    Ok((0..count).map(part).collect())
}

fn read_factors(file: &MappedFile, name: &str, entry: &TensorEntry) -> Result<Vec<f32>, WeightsError> {
    if entry.format != FileFormat::Stored(StorageFormat::F32) || entry.dims.len() != 1 {
        return Err(WeightsError::damaged(file.path(), format!("tensor {name} is not a vector of F32")));
    }
    let mut factors = vec![0.0; entry.dims[0]];
    StorageFormat::F32.expand(&file.bytes()[entry.bytes.clone()], &mut factors);
    Ok(factors)
}

/// Checks that exactly the tensors of the spec are present, with the right sizes.
fn check_tensors(
    config: &GgufConfig<'_, '_>,
    file: &MappedFile,
    spec: &DecoderSpec,
    tensors: &HashMap<TensorName, TensorEntry>,
    latents: &latents::Parts,
) -> Result<(), WeightsError> {
    let expected = spec.tensor_names().count();
    if let Some(extra) = tensors.keys().find(|name| !spec.has_tensor(**name)) {
        let name = names::spelled(config.family(), *extra);
        return Err(match extra {
            TensorName::Layer(layer, _) | TensorName::Expert(layer, ..) if *layer < spec.layers.len() => {
                left_out(file, &name)
            }
            _ => names::of_no_layer(config, &name),
        });
    }
    for name in spec.tensor_names() {
        match (name, tensors.contains_key(&name)) {
            (TensorName::Layer(layer, LayerTensor::KvUp), is_there) if latents.contains_key(&layer) => {
                if is_there {
                    let name = names::spelled(config.family(), name);
                    return Err(config.damaged(format!("tensor {name} is there, and its parts too")));
                }
                continue;
            }
            _ => {}
        }
        let Some(entry) = tensors.get(&name) else {
            let name = names::spelled(config.family(), name);
            return Err(config.damaged(format!("tensor {name} is missing (of {expected})")));
        };
        let [rows, columns] = spec.tensor_dims(name);
        let found = &entry.dims;
        let expected = if name.is_vector() { vec![columns] } else { vec![columns, rows] };
        if *found != expected {
            let name = names::spelled(config.family(), name);
            let message = format!("tensor {name} has dimensions {found:?}; the metadata asks for {expected:?}");
            return Err(config.damaged(message));
        }
    }
    Ok(())
}

impl ModelSource for GgufModel {
    fn spec(&self) -> &DecoderSpec {
        &self.spec
    }

    fn stored(&self, name: TensorName) -> Result<StoredTensor<'_>, WeightsError> {
        if let TensorName::Layer(layer, LayerTensor::KvUp) = name
            && let Some(parts) = self.latents.get(&layer)
        {
            return Ok(latents::join(&self.spec, layer, parts, self.file.bytes()));
        }
        let entry = self.tensors.get(&name);
        let entry = entry.ok_or_else(|| {
            WeightsError::damaged(self.file.path(), format!("there is no tensor {}", names::spelled(self.family, name)))
        })?;
        let stored = entry.format.read(&self.file.bytes()[entry.bytes.clone()]);
        let stored = rotary::in_halves(&self.spec, self.family.rotary_rows, name, stored);
        delta::canonical(&self.spec, self.family.value_heads_in_turns, name, stored).map_err(|reason| {
            let name = names::spelled(self.family, name);
            WeightsError::damaged(self.file.path(), format!("tensor {name}: {reason}"))
        })
    }

    fn is_quantized(&self) -> bool {
        self.tensors.iter().any(|(name, entry)| !name.is_norm() && entry.format.stays_quantized())
    }

    fn fingerprint(&self) -> Digest {
        *self.fingerprint.get_or_init(|| self.fingerprint_of(self.file.digest()))
    }

    fn known_fingerprint(&self, known: &KnownFingerprints) -> Option<Digest> {
        Some(*self.fingerprint.get_or_init(|| self.fingerprint_of(self.file.known_digest(known))))
    }

    fn release(&self, name: TensorName) {
        if let Some(entry) = self.tensors.get(&name) {
            self.file.release(entry.bytes.clone());
        }
        if let TensorName::Layer(layer, LayerTensor::KvUp) = name {
            let parts = self.latents.get(&layer).into_iter().flat_map(|parts| parts.values());
            parts.for_each(|entry| self.file.release(entry.bytes.clone()));
        }
    }

    fn end_tokens(&self) -> &[TokenId] {
        &self.end_tokens
    }

    fn sampling_defaults(&self) -> SamplingDefaults {
        self.sampling
    }

    fn text(&self) -> TextSource {
        self.tokenizer.clone().map_or(TextSource::None, |tokenizer| TextSource::Gguf(Box::new(tokenizer)))
    }

    fn name(&self) -> &str {
        &self.name
    }
}
