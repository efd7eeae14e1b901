//! LoRA adapters as peft's `save_pretrained` writes them: a folder with `adapter_config.json` and `adapter_model.safetensors`.
//!
//! The linears of decoder layers are read, in F32, F16 or BF16; what else an adapter can change is refused by name. The file is read whole
//! and not mapped, since folders of adapters change while a worker runs.

mod config;
#[cfg(test)]
mod tests;

use super::WeightsError;
use super::mmap::open_regular;
use crate::families::{DecoderSpec, LayerTensor, TensorName, layer_index};
use baton_kernels::adapter::{Adapter, AdapterLinear, Linear};
use baton_kernels::storage::StorageFormat;
use config::PeftConfig;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::io::Read as _;
use std::path::Path;

const WEIGHTS: &str = "adapter_model.safetensors";
/// What peft puts before a module's name; adapters of a model without its head have no `model.` behind it.
const PREFIX: &str = "base_model.model.";

/// Bounds of an adapter that is read.
#[derive(Clone, Copy, Debug)]
pub struct AdapterLimits {
    /// Largest rank of any module.
    pub rank_max: usize,
    /// Most bytes of its matrices in f32, and of its file.
    pub bytes_max: u64,
}

/// A module of a layer, by the linears that are its rows, in their order.
type Module = (&'static str, &'static [Linear]);

/// Fused modules are those of Phi-3; their adapters are cut into the parts' rows, so they fit every base that has these linears.
const MODULES: [Module; 9] = [
    ("self_attn.q_proj", &[Linear::Query]),
    ("self_attn.k_proj", &[Linear::Key]),
    ("self_attn.v_proj", &[Linear::Value]),
    ("self_attn.qkv_proj", &[Linear::Query, Linear::Key, Linear::Value]),
    ("self_attn.o_proj", &[Linear::Out]),
    ("mlp.gate_proj", &[Linear::Gate]),
    ("mlp.up_proj", &[Linear::Up]),
    ("mlp.gate_up_proj", &[Linear::Gate, Linear::Up]),
    ("mlp.down_proj", &[Linear::Down]),
];

/// The tensor that a linear of the base model is.
fn tensor(layer: usize, linear: Linear) -> TensorName {
    let tensor = match linear {
        Linear::Query => LayerTensor::Query,
        Linear::Key => LayerTensor::Key,
        Linear::Value => LayerTensor::Value,
        Linear::Out => LayerTensor::AttentionOutput,
        Linear::Gate => LayerTensor::Gate,
        Linear::Up => LayerTensor::Up,
        Linear::Down => LayerTensor::Down,
    };
    TensorName::Layer(layer, tensor)
}

/// `[n, k]` of a linear of the base model.
fn dims(spec: &DecoderSpec, layer: usize, linear: Linear) -> [usize; 2] {
    spec.tensor_dims(tensor(layer, linear))
}

/// Reads the adapter in `folder` for a base model of this spec. Modules of a smaller rank than others are padded with zeros, which changes
/// no bit of what they compute.
///
/// # Errors
/// With the file and the key or tensor at fault: files that cannot be read or are damaged, another shape than the base model's, what is
/// not implemented, and what is over the limits.
pub fn read_peft(folder: &Path, spec: &DecoderSpec, limits: AdapterLimits) -> Result<Adapter, WeightsError> {
    let config = PeftConfig::read(folder)?;
    let path = folder.join(WEIGHTS);
    let shown = path.display().to_string();
    let damaged = |message: String| WeightsError::damaged(&shown, message);
    let bytes = read_weights(&path, &shown, limits.bytes_max)?;
    let tensors = SafeTensors::deserialize(&bytes).map_err(|e| damaged(format!("no valid safetensors file: {e}")))?;
    let mut found: BTreeMap<(usize, usize), [Option<TensorView<'_>>; 2]> = BTreeMap::new();
    for (name, tensor) in tensors.iter() {
        let (layer, module, which) = place(name).ok_or_else(|| {
            let hint = "adapters of the attention's and the MLP's linears in decoder layers are implemented; merge others into \
                        the base model (peft's merge_and_unload)";
            WeightsError::unsupported(&shown, format!("tensor {name:.120}"), hint)
        })?;
        if layer >= spec.layers.len() {
            return Err(damaged(format!(
                "tensor {name:.120} is of layer {layer}; the base model has {}",
                spec.layers.len()
            )));
        }
        if !matches!(tensor.dtype(), Dtype::F32 | Dtype::F16 | Dtype::BF16) {
            let what = format!("tensor {name:.120} of type {:?}", tensor.dtype());
            return Err(WeightsError::unsupported(&shown, what, "F32, F16 and BF16 are implemented"));
        }
        if found.entry((layer, module)).or_default()[which].replace(tensor).is_some() {
            return Err(damaged(format!("tensor {name:.120} is there twice")));
        }
    }
    if found.is_empty() {
        return Err(damaged("it has no tensors".into()));
    }
    let mut changes = Vec::new();
    let mut rank_max = 0;
    for ((layer, module), pair) in found {
        let (name, linears) = MODULES[module];
        let name = format!("model.layers.{layer}.{name}");
        let [Some(a), Some(b)] = pair else {
            return Err(damaged(format!("{name} has one of lora_A and lora_B; both are needed")));
        };
        let (rank, scale) = config.of(&name)?;
        if rank > limits.rank_max {
            let hint =
                format!("at most {} are accepted here; raise engine.lora.max_rank (--max-lora-rank)", limits.rank_max);
            return Err(WeightsError::unsupported(&shown, format!("rank {rank} of {name}"), hint));
        }
        let of_attention = |linear: &Linear| matches!(linear, Linear::Query | Linear::Key | Linear::Value);
        if spec.layers[layer].attention.latent.is_some() && linears.iter().any(of_attention) {
            let hint = "the base model has latent attention, of whose linears adapters change the output alone; merge it into the \
                        base model (peft's merge_and_unload)";
            return Err(WeightsError::unsupported(&shown, name, hint));
        }
        let base = &spec.layers[layer];
        if base.delta.is_some() && linears.iter().any(|linear| of_attention(linear) || *linear == Linear::Out) {
            return Err(damaged(format!(
                "{name} is of attention; layer {layer} of the base model has a gated delta rule"
            )));
        }
        if base.attention.output_gate && linears.contains(&Linear::Query) {
            let hint = "in the base model queries are one matrix with gates of the output, and adapters of it are not implemented; merge \
                        it into the base model (peft's merge_and_unload)";
            return Err(WeightsError::unsupported(&shown, name, hint));
        }
        if linears.iter().any(|linear| !spec.has_tensor(tensor(layer, *linear))) {
            let hint =
                "adapters of experts are not implemented; merge it into the base model (peft's merge_and_unload)";
            return Err(WeightsError::unsupported(&shown, format!("{name}, where the base model has experts"), hint));
        }
        let k = dims(spec, layer, linears[0])[1];
        let n: usize = linears.iter().map(|linear| dims(spec, layer, *linear)[0]).sum();
        for (tensor, which, expected) in [(&a, "A", [rank, k]), (&b, "B", [n, rank])] {
            if tensor.shape() != expected {
                let shape = tensor.shape();
                return Err(damaged(format!(
                    "lora_{which} of {name} has shape {shape:?}; the base model and adapter_config.json ask for {expected:?}"
                )));
            }
        }
        rank_max = rank_max.max(rank);
        changes.push(Change { layer, linears, rank, scale, a, b });
    }
    let elements: u64 = changes.iter().map(|change| elements_of(spec, change, rank_max)).sum();
    let bytes = elements * size_of::<f32>() as u64;
    if bytes > limits.bytes_max {
        let what = format!("an adapter of {bytes} bytes in f32");
        let hint = format!("at most {} are accepted here; raise engine.lora.memory_bytes_max", limits.bytes_max);
        return Err(WeightsError::unsupported(&shown, what, hint));
    }
    let linears = changes.iter().flat_map(|change| change.linears_of(spec, rank_max)).collect();
    Ok(Adapter { rank: rank_max, linears })
}

/// The change of one module.
struct Change<'a> {
    layer: usize,
    linears: &'static [Linear],
    rank: usize,
    scale: f32,
    a: TensorView<'a>,
    b: TensorView<'a>,
}

/// Elements of a module's matrices at this rank.
fn elements_of(spec: &DecoderSpec, change: &Change<'_>, rank: usize) -> u64 {
    change.linears.iter().map(|linear| dims(spec, change.layer, *linear).iter().sum::<usize>() * rank).sum::<usize>()
        as u64
}

impl Change<'_> {
    /// Each of its linears, of rank `padded`.
    fn linears_of(&self, spec: &DecoderSpec, padded: usize) -> Vec<AdapterLinear> {
        let mut a = floats(&self.a);
        let b = floats(&self.b);
        a.resize(a.len() / self.rank * padded, 0.0);
        let mut rows = b.chunks_exact(self.rank);
        let of = |linear: &Linear| {
            let n = dims(spec, self.layer, *linear)[0];
            let zeros = std::iter::repeat_n(0.0, padded - self.rank);
            let row = |row: &[f32]| row.iter().copied().chain(zeros.clone()).collect::<Vec<_>>();
            let b = rows.by_ref().take(n).flat_map(row).collect();
            AdapterLinear { layer: self.layer as u32, linear: *linear, a: a.clone(), b, scale: self.scale }
        };
        self.linears.iter().map(of).collect()
    }
}

/// The file's bytes.
fn read_weights(path: &Path, shown: &str, bytes_max: u64) -> Result<Vec<u8>, WeightsError> {
    let io = |source| WeightsError::Io { path: shown.to_owned(), source };
    if !path.exists() {
        let hint = "adapters are read from safetensors files; save it again with peft's save_pretrained";
        return Err(WeightsError::unsupported(shown, format!("a folder without {WEIGHTS}"), hint));
    }
    let file = open_regular(path)?;
    // A file of a larger size is not read first.
    let size = file.metadata().map_err(io)?.len();
    let mut bytes = Vec::new();
    if size <= bytes_max {
        file.take(bytes_max.saturating_add(1)).read_to_end(&mut bytes).map_err(io)?;
    }
    if size.max(bytes.len() as u64) > bytes_max {
        let hint = format!("at most {bytes_max} are accepted here; raise engine.lora.memory_bytes_max");
        return Err(WeightsError::unsupported(shown, "a larger file", hint));
    }
    Ok(bytes)
}

/// Layer, index in [`MODULES`], and 0 for A or 1 for B; `None` if no such tensor is known.
fn place(name: &str) -> Option<(usize, usize, usize)> {
    let module = name.strip_prefix(PREFIX)?;
    let module = module.strip_prefix("model.").unwrap_or(module);
    let (layer, of_layer) = module.strip_prefix("layers.")?.split_once('.')?;
    let (module, which) = match of_layer.strip_suffix(".lora_A.weight") {
        Some(module) => (module, 0),
        None => (of_layer.strip_suffix(".lora_B.weight")?, 1),
    };
    Some((layer_index(layer)?, MODULES.iter().position(|(known, _)| *known == module)?, which))
}

fn floats(tensor: &TensorView<'_>) -> Vec<f32> {
    let format = match tensor.dtype() {
        Dtype::F32 => StorageFormat::F32,
        Dtype::F16 => StorageFormat::F16,
        _ => StorageFormat::Bf16,
    };
    let mut out = vec![0.0; tensor.shape().iter().product()];
    format.expand(tensor.data(), &mut out);
    out
}
