//! Tensors of one or several safetensors files, checked against the spec and against each other.

use super::json::JsonObject;
use super::quantized::{Linear, Parts, Scheme};
use super::shards::{INDEX, Index, shard_names};
use super::stacked::{AllStacked, Form, Slice, Stacked};
use crate::families::{ConfigFamily, DecoderSpec, LayerTensor, TensorName, layer_index};
use crate::formats::mmap::MappedFile;
use crate::formats::{StoredTensor, WeightsError};
use baton_kernels::storage::StorageFormat;
use safetensors::tensor::TensorInfo;
use safetensors::{Dtype, SafeTensors};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::path::Path;

/// A safetensors file starts with the length of its header.
const LENGTH_BYTES: usize = 8;

/// Why a tensor is refused that this model's computation does not use.
const LEFT_OUT: &str = "the computation would leave it out, so the model is refused rather than computed wrongly";

/// Mapped files and the location of each tensor in them.
pub(super) struct Tensors {
    /// Each file with its name.
    shards: Vec<(String, MappedFile)>,
    places: HashMap<TensorName, TensorPlace>,
    /// The quantized ones, with the names of their weights.
    linears: Vec<(String, Linear)>,
}

/// Bytes of a file: a tensor, or a part of one.
#[derive(Clone, Debug)]
pub(super) struct Stored {
    pub(super) shard: usize,
    pub(super) dtype: Dtype,
    pub(super) bytes: Range<usize>,
}

/// A tensor of a quantized linear.
#[derive(Clone, Debug)]
pub(super) struct Slot {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<usize>,
    stored: Stored,
}

/// How one of the model's tensors is read.
enum TensorPlace {
    /// As it is stored.
    Plain(Stored),
    /// Rows of a quantized linear.
    Quantized { linear: usize, rows: Range<usize> },
    /// Of an expert, whose tensors are one with those of the others.
    Slice(Slice),
}

/// Tensors that are read once all files are known, since they may be in several.
#[derive(Default)]
struct Unfinished {
    /// By the names of the weights.
    quantized: BTreeMap<String, Parts>,
    stacked: AllStacked,
    /// Tensors that are not computed, by what they are.
    left_out: BTreeMap<&'static str, usize>,
}

/// What a folder has to hold.
struct Expected<'a> {
    spec: &'a DecoderSpec,
    family: &'a ConfigFamily,
    scheme: Option<Scheme>,
    /// Layers behind the last one whose tensors are left out.
    extra_layers: usize,
}

impl Tensors {
    /// Maps the files of `folder` and checks that they hold exactly the tensors of `spec`, as the family stores them.
    pub(super) fn open(
        folder: &Path,
        spec: &DecoderSpec,
        family: &ConfigFamily,
        scheme: Option<Scheme>,
        extra_layers: usize,
    ) -> Result<Self, WeightsError> {
        let (names, index) = shard_names(folder)?;
        let mut tensors = Self { shards: Vec::new(), places: HashMap::new(), linears: Vec::new() };
        let expected = Expected { spec, family, scheme, extra_layers };
        let mut unfinished = Unfinished::default();
        for name in names {
            let file = MappedFile::open(&folder.join(&name))?;
            tensors.add(name, file, &expected, index.as_ref(), &mut unfinished)?;
        }
        if let Some(scheme) = scheme {
            tensors.add_linears(folder, &expected, scheme, unfinished.quantized)?;
        }
        for (what, tensors) in &unfinished.left_out {
            tracing::info!("{tensors} tensors {what} are left out: they are not computed");
        }
        let damaged = |message| WeightsError::damaged(&folder.display().to_string(), message);
        let slices = unfinished.stacked.slices(spec).map_err(damaged)?;
        tensors.places.extend(slices.into_iter().map(|(name, slice)| (name, TensorPlace::Slice(slice))));
        for name in spec.tensor_names() {
            if !tensors.places.contains_key(&name) {
                return Err(damaged(format!("tensor {} is missing", family.spelled(name))));
            }
        }
        tensors.drop_tied_copy(spec)?;
        Ok(tensors)
    }

    /// Adds the tensors of one file.
    fn add(
        &mut self,
        shard: String,
        file: MappedFile,
        expected: &Expected<'_>,
        index: Option<&Index>,
        unfinished: &mut Unfinished,
    ) -> Result<(), WeightsError> {
        let Expected { spec, family, scheme, .. } = *expected;
        let damaged = |message: String| WeightsError::damaged(file.path(), message);
        let bytes = file.bytes();
        let (header, metadata) = SafeTensors::read_metadata(bytes).map_err(|e| damaged(blame(bytes, &e)))?;
        let data_start = LENGTH_BYTES + header;
        // By name, so that of several errors the same one is told each time.
        for (name, info) in metadata.tensors().into_iter().collect::<BTreeMap<_, _>>() {
            if index.is_some_and(|index| index.get(&name) != Some(&shard)) {
                return Err(damaged(format!("tensor {name} is not listed in {INDEX} as part of this file")));
            }
            // As the decoder calls it; messages say what the file has.
            let decoders = &*family.of_decoder(&name);
            if is_derived(decoders) {
                continue;
            }
            if let Some(what) = left_out(decoders, spec.layers.len(), expected) {
                *unfinished.left_out.entry(what).or_default() += 1;
                continue;
            }
            let at = |bytes: Range<usize>| Stored { shard: self.shards.len(), dtype: info.dtype, bytes };
            let twice = || damaged(format!("tensor {name} is there twice"));
            let (mut begin, end) = (data_start + info.data_offsets.0, data_start + info.data_offsets.1);
            if let Some((weight, component)) = scheme.and_then(|scheme| scheme.component(decoders, info.dtype)) {
                let slot = Slot { dtype: info.dtype, shape: info.shape.clone(), stored: at(begin..end) };
                if !unfinished.quantized.entry(weight).or_default().add(component, slot) {
                    return Err(twice());
                }
                continue;
            }
            if let Some(stacked) = Stacked::parse(decoders, family) {
                let (dtypes, shape) = stacked.expected(spec).ok_or_else(|| no_such(file.path(), &name))?;
                check_type(file.path(), &name, info, dtypes)?;
                check_shape(file.path(), &name, info, &shape)?;
                if !unfinished.stacked.add(&stacked, at(begin..end)) {
                    return Err(twice());
                }
                continue;
            }
            if scheme.is_some() && is_empty_bias(decoders, spec, family, &bytes[begin..end]) {
                continue;
            }
            let parts = parts_of(decoders, family).ok_or_else(|| no_such(file.path(), &name))?;
            check_tensor(file.path(), &name, info, spec, &parts)?;
            // Of equal columns, so bytes are as rows.
            let rows_of = |part: &TensorName| spec.tensor_dims(*part)[0];
            let row_bytes = (end - begin) / parts.iter().map(rows_of).sum::<usize>();
            for part in parts {
                let bytes = begin..begin + rows_of(&part) * row_bytes;
                begin = bytes.end;
                if self.places.insert(part, TensorPlace::Plain(at(bytes))).is_some() {
                    return Err(twice());
                }
            }
        }
        let listed = index.into_iter().flatten().filter(|(_, of)| **of == shard);
        for (name, _) in listed {
            if metadata.info(name).is_none() {
                return Err(damaged(format!("tensor {name} is missing, though {INDEX} lists it in this file")));
            }
        }
        self.shards.push((shard, file));
        Ok(())
    }

    /// Adds the quantized linears, whose tensors may be in several files.
    fn add_linears(
        &mut self,
        folder: &Path,
        expected: &Expected<'_>,
        scheme: Scheme,
        quantized: BTreeMap<String, Parts>,
    ) -> Result<(), WeightsError> {
        let path = &folder.display().to_string();
        for (name, tensors) in quantized {
            let parts = parts_of(&name, expected.family).ok_or_else(|| no_such(path, &name))?;
            let linear = tensors.linear(scheme);
            let linear =
                linear.map_err(|reason| WeightsError::damaged(path, format!("quantized tensor {name}: {reason}")))?;
            let shape = vec![linear.n, linear.k()];
            let info = TensorInfo { dtype: Dtype::F32, shape, data_offsets: (0, 0) };
            check_tensor(path, &name, &info, expected.spec, &parts)?;
            let mut begin = 0;
            for part in parts {
                let rows = begin..begin + expected.spec.tensor_dims(part)[0];
                begin = rows.end;
                let place = TensorPlace::Quantized { linear: self.linears.len(), rows };
                if self.places.insert(part, place).is_some() {
                    return Err(WeightsError::damaged(path, format!("tensor {name} is there twice")));
                }
            }
            self.linears.push((name, linear));
        }
        Ok(())
    }

    /// Some tied models also store the embedding as output matrix. Equal bits are accepted; different ones are refused.
    fn drop_tied_copy(&mut self, spec: &DecoderSpec) -> Result<(), WeightsError> {
        if !spec.tied {
            return Ok(());
        }
        let Some(copy) = self.places.remove(&TensorName::Output) else { return Ok(()) };
        if self.is_embedding(&copy) {
            return Ok(());
        }
        let message = "tensor lm_head.weight differs from the embedding, though config.json says tie_word_embeddings";
        Err(WeightsError::damaged(self.shards[self.all_of(&copy)[0].shard].1.path(), message))
    }

    fn is_embedding(&self, copy: &TensorPlace) -> bool {
        match (copy, &self.places[&TensorName::Embedding]) {
            (TensorPlace::Plain(copy), TensorPlace::Plain(own)) => {
                copy.dtype == own.dtype && self.bytes(copy) == self.bytes(own)
            }
            _ => false,
        }
    }

    fn bytes(&self, stored: &Stored) -> &[u8] {
        &self.shards[stored.shard].1.bytes()[stored.bytes.clone()]
    }

    /// What is stored of a tensor, the largest first.
    fn all_of<'a>(&'a self, place: &'a TensorPlace) -> Vec<&'a Stored> {
        match place {
            TensorPlace::Plain(stored) => vec![stored],
            TensorPlace::Quantized { linear, .. } => vec![&self.linears[*linear].1.weight().stored],
            TensorPlace::Slice(slice) => match &slice.form {
                Form::Elements(stored) => vec![stored],
                Form::Mxfp4 { blocks, scales } => vec![blocks, scales],
            },
        }
    }

    /// The files, by name.
    pub(super) fn shards(&self) -> &[(String, MappedFile)] {
        &self.shards
    }

    /// Whether linears are stored as integers.
    pub(super) fn has_integers(&self) -> bool {
        self.linears.iter().any(|(_, linear)| linear.is_integers())
    }

    /// Gives memory back that holds a tensor.
    pub(super) fn release(&self, name: TensorName) {
        for stored in self.places.get(&name).into_iter().flat_map(|place| self.all_of(place)) {
            self.shards[stored.shard].1.release(stored.bytes.clone());
        }
    }

    /// One tensor as it is stored, or in a format that holds what is stored; `None` if it is not there.
    pub(super) fn stored(&self, name: TensorName) -> Option<Result<StoredTensor<'_>, WeightsError>> {
        Some(match self.places.get(&name)? {
            TensorPlace::Plain(stored) => {
                Ok(StoredTensor { format: format(stored.dtype), bytes: self.bytes(stored).into() })
            }
            TensorPlace::Quantized { linear, rows } => {
                let (name, linear) = &self.linears[*linear];
                linear.read(rows.clone(), |slot| self.bytes(&slot.stored)).map_err(|reason| {
                    let path = self.shards[linear.weight().stored.shard].1.path();
                    WeightsError::damaged(path, format!("quantized tensor {name}: {reason}"))
                })
            }
            TensorPlace::Slice(slice) => match &slice.form {
                Form::Elements(stored) => {
                    let format = format(stored.dtype);
                    Ok(StoredTensor { format, bytes: slice.gather(self.bytes(stored), format.block().1).into() })
                }
                Form::Mxfp4 { blocks, scales } => {
                    slice.convert(self.bytes(blocks), self.bytes(scales)).map_err(|scale| {
                        let power = i32::from(scale) - 127;
                        let message =
                            format!("tensor {name} has a scale of 2^{power}, with which it has no finite values");
                        WeightsError::damaged(self.shards[scales.shard].1.path(), message)
                    })
                }
            },
        })
    }
}

/// The format of elements of a type that was checked.
fn format(dtype: Dtype) -> StorageFormat {
    match dtype {
        Dtype::F32 => StorageFormat::F32,
        Dtype::F16 => StorageFormat::F16,
        _ => StorageFormat::Bf16,
    }
}

/// The refusal of a tensor that the computation does not use.
fn no_such(path: &str, name: &str) -> WeightsError {
    WeightsError::unsupported(path, format!("tensor {name}"), LEFT_OUT)
}

fn check_type(path: &str, name: &str, info: &TensorInfo, dtypes: &[Dtype]) -> Result<(), WeightsError> {
    if dtypes.contains(&info.dtype) {
        return Ok(());
    }
    let what = format!("tensor {name} of type {:?}", info.dtype);
    let names: Vec<_> = dtypes.iter().map(|dtype| format!("{dtype:?}")).collect();
    Err(WeightsError::unsupported(path, what, format!("{} are implemented", names.join(", "))))
}

fn check_shape(path: &str, name: &str, info: &TensorInfo, expected: &[usize]) -> Result<(), WeightsError> {
    let found = &info.shape;
    if found == expected {
        return Ok(());
    }
    let message = format!("tensor {name} has shape {found:?}; config.json asks for {expected:?}");
    Err(WeightsError::damaged(path, message))
}

/// Whether this is a bias of zeros that the model does not have: quantizers write one for each linear.
fn is_empty_bias(name: &str, spec: &DecoderSpec, family: &ConfigFamily, bytes: &[u8]) -> bool {
    let unknown = || parts_of(name, family).is_none_or(|parts| parts.iter().any(|part| !spec.has_tensor(*part)));
    name.ends_with(".bias") && unknown() && bytes.iter().all(|byte| *byte == 0)
}

/// Checks that a tensor of these parts belongs to the model, and its type and shape.
fn check_tensor(
    path: &str,
    name: &str,
    info: &TensorInfo,
    spec: &DecoderSpec,
    parts: &[TensorName],
) -> Result<(), WeightsError> {
    // A tied model may also contain the output matrix; `drop_tied_copy` checks it.
    if let Some(missing) = parts.iter().find(|part| !spec.has_tensor(**part) && **part != TensorName::Output) {
        return Err(match missing {
            TensorName::Layer(layer, _) | TensorName::Expert(layer, ..) if *layer < spec.layers.len() => {
                no_such(path, name)
            }
            _ => WeightsError::damaged(path, format!("tensor {name} is of no layer that num_hidden_layers knows")),
        });
    }
    check_type(path, name, info, &[Dtype::F32, Dtype::F16, Dtype::BF16])?;
    let columns = spec.tensor_dims(parts[0])[1];
    let rows = parts.iter().map(|part| spec.tensor_dims(*part)[0]).sum();
    let expected = match parts[0] {
        // A convolution of one input for each output.
        TensorName::Layer(_, LayerTensor::DeltaConv) => vec![rows, 1, columns],
        vector if vector.is_vector() => vec![columns],
        _ => vec![rows, columns],
    };
    check_shape(path, name, info, &expected)
}

/// Frequencies that old checkpoints store although they can be derived from `rope_theta`; transformers ignores them too.
fn is_derived(name: &str) -> bool {
    name.ends_with("rotary_emb.inv_freq")
}

/// What a tensor is that is not computed, in words for the log.
fn left_out(name: &str, layers: usize, expected: &Expected<'_>) -> Option<&'static str> {
    if is_of_layers(name, layers..layers + expected.extra_layers) {
        return Some("of layers behind the last one, which predict tokens after the next,");
    }
    expected.family.left_out.iter().find(|of| name.starts_with(of.prefix)).map(|of| of.what)
}

/// Whether a tensor is of one of these layers.
fn is_of_layers(name: &str, layers: Range<usize>) -> bool {
    let layer = name.strip_prefix("model.layers.").and_then(|rest| rest.split_once('.')).map(|(layer, _)| layer);
    layer.and_then(layer_index).is_some_and(|layer| layers.contains(&layer))
}

/// What a tensor holds, in the order of its rows; `None` if no such tensor is known.
fn parts_of(name: &str, family: &ConfigFamily) -> Option<Vec<TensorName>> {
    match name {
        "model.embed_tokens.weight" => return Some(vec![TensorName::Embedding]),
        "model.norm.weight" => return Some(vec![TensorName::FinalNorm]),
        "lm_head.weight" => return Some(vec![TensorName::Output]),
        _ => {}
    }
    let (layer, of_layer) = name.strip_prefix("model.layers.")?.split_once('.')?;
    let layer = layer_index(layer)?;
    if let Some((expert, tensor)) = family.experts.parse(of_layer).filter(|_| family.stacked.is_empty()) {
        return Some(vec![TensorName::Expert(layer, expert, tensor)]);
    }
    let fused = family.fused;
    if let Some((_, parts)) = fused.iter().find(|(fused, _)| *fused == of_layer) {
        return Some(parts.iter().map(|part| TensorName::Layer(layer, *part)).collect());
    }
    let mut alone =
        LayerTensor::ALL.into_iter().filter(|tensor| fused.iter().all(|(_, parts)| !parts.contains(tensor)));
    let tensor = alone.find(|tensor| family.layer_name(*tensor) == of_layer)?;
    Some(vec![TensorName::Layer(layer, tensor)])
}

/// The parser's reason, with the tensor at fault if the file is truncated.
fn blame(bytes: &[u8], error: &safetensors::SafeTensorError) -> String {
    let cut = || -> Option<String> {
        let length = u64::from_le_bytes(bytes.get(..LENGTH_BYTES)?.try_into().ok()?);
        let data_start = LENGTH_BYTES.checked_add(usize::try_from(length).ok()?)?;
        let header: JsonObject = JsonObject::parse(bytes.get(LENGTH_BYTES..data_start)?)?;
        let end = |info: &serde_json::Value| info.get("data_offsets")?.get(1)?.as_u64();
        let data = (bytes.len() - data_start) as u64;
        let mut past: Vec<_> =
            header.keys().iter().filter(|(_, info)| end(info).is_some_and(|end| end > data)).collect();
        past.sort_by_key(|(_, info)| end(info));
        let (name, _) = past.first()?;
        Some(format!("tensor {name} ends past the file: it is truncated or damaged"))
    };
    cut().unwrap_or_else(|| format!("no valid safetensors file: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::formats::{ModelSource as _, RandomModel};

    #[test]
    fn matrices_that_are_stored_as_one_are_known_by_their_family_alone() {
        use LayerTensor::{Gate, Key, Query, Up, Value};
        let fused = &ConfigFamily {
            fused: &[("self_attn.qkv_proj.weight", &[Query, Key, Value])],
            names: &[(LayerTensor::MlpNorm, "pre_feedforward_layernorm.weight")],
            ..ConfigFamily::LLAMA
        };
        let layer =
            |tensors: &[LayerTensor]| Some(tensors.iter().map(|t| TensorName::Layer(3, *t)).collect::<Vec<_>>());
        let (one, part) = ("model.layers.3.self_attn.qkv_proj.weight", "model.layers.3.self_attn.k_proj.weight");
        assert_eq!((parts_of(one, fused), parts_of(part, fused)), (layer(&[Query, Key, Value]), None));
        assert_eq!((parts_of(one, &ConfigFamily::LLAMA), parts_of(part, &ConfigFamily::LLAMA)), (None, layer(&[Key])));
        let (llama, own) =
            ("model.layers.3.post_attention_layernorm.weight", "model.layers.3.pre_feedforward_layernorm.weight");
        assert_eq!((parts_of(own, fused), parts_of(llama, fused)), (layer(&[LayerTensor::MlpNorm]), None));
        assert_eq!(parts_of(llama, &ConfigFamily::LLAMA), layer(&[LayerTensor::MlpNorm]));
        assert_eq!(parts_of("model.layers.3.mlp.up_proj.weight", fused), layer(&[Up]));
        assert_eq!(parts_of("model.layers.03.mlp.up_proj.weight", fused), None);

        let model = RandomModel::parse("random:hidden=8,heads=2,kv_heads=1,ffn=6,layers=1").unwrap();
        let check = |shape: &[usize], parts: &[LayerTensor], layer| {
            let (shape, data_offsets) = (shape.to_vec(), (0, 0));
            let parts: Vec<_> = parts.iter().map(|part| TensorName::Layer(layer, *part)).collect();
            let info = TensorInfo { dtype: Dtype::BF16, shape, data_offsets };
            check_tensor("f", "t", &info, model.spec(), &parts).map_err(|error| error.to_string())
        };
        assert_eq!(check(&[8 + 4 + 4, 8], &[Query, Key, Value], 0), Ok(()));
        assert_eq!(check(&[12, 8], &[Gate, Up], 0), Ok(()));
        assert!(check(&[12, 8], &[Query, Key, Value], 0).unwrap_err().contains("asks for [16, 8]"));
        assert!(check(&[16, 8], &[Query, Key, Value], 1).unwrap_err().contains("no layer"));
    }
}
