//! Random LoRA adapters in folders, as peft writes them, and one engine that answers with them: what a cluster's answers must equal.

use anyhow::Context;
use baton_engine::api::{AdapterUse, Run, SequenceEvent, SequenceRequest, SequenceSink};
use baton_engine::families::{DecoderSpec, LayerTensor, TensorName};
use baton_engine::formats::{AdapterLimits, ModelSource, read_peft};
use baton_engine::{Engine, EngineConfig, EngineHandle, Model};
use baton_kernels::adapter::AdapterBounds;
use baton_kernels::cpu::{self, CpuConfig};
use baton_kernels::numerics::Numerics;
use baton_kernels::step::AdapterSlot;
use baton_types::{Digest, RequestId, SamplingParams, Share, TokenId};
use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};
use serde_json::json;
use std::path::Path;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

/// Longest wait for an answer of one engine.
const WAIT_MAX: Duration = Duration::from_secs(120);

/// Tokens, and the bits of their log-probabilities.
pub type Tokens = Vec<(TokenId, u32)>;

/// The matrices that [`write_peft_folder`] changes: those that peft changes of a Llama by default.
pub const MODULES: [(&str, LayerTensor); 2] =
    [("self_attn.q_proj", LayerTensor::Query), ("self_attn.v_proj", LayerTensor::Value)];

/// Writes an adapter of queries and values in all layers to a new folder. The seed decides its numbers. The folder gets its name once it is
/// complete.
pub fn write_peft_folder(folder: &Path, spec: &DecoderSpec, rank: usize, seed: u64) -> anyhow::Result<()> {
    let mut rng = StdRng::seed_from_u64(seed);
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for layer in 0..spec.layers.len() {
        for (module, tensor) in MODULES {
            let [n, k] = spec.tensor_dims(TensorName::Layer(layer, tensor));
            for (which, shape, scale) in [("A", [rank, k], (k as f32).powf(-0.5)), ("B", [n, rank], 0.5)] {
                let begin = data.len();
                for _ in 0..shape[0] * shape[1] {
                    data.extend((scale * rng.random_range(-1.0f32..1.0)).to_le_bytes());
                }
                let name = format!("base_model.model.model.layers.{layer}.{module}.lora_{which}.weight");
                header.insert(name, json!({"dtype": "F32", "shape": shape, "data_offsets": [begin, data.len()]}));
            }
        }
    }
    let config = json!({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": 2 * rank, "bias": "none",
        "target_modules": MODULES.map(|(module, _)| module), "base_model_name_or_path": "random",
    });
    let header = serde_json::Value::from(header).to_string().into_bytes();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    let name = folder.file_name().context("a folder with a name")?.to_string_lossy();
    let hidden = folder.with_file_name(format!(".{name}"));
    std::fs::create_dir_all(&hidden)?;
    std::fs::write(hidden.join("adapter_config.json"), config.to_string())?;
    std::fs::write(hidden.join("adapter_model.safetensors"), file)?;
    if folder.exists() {
        std::fs::remove_dir_all(folder)?;
    }
    Ok(std::fs::rename(hidden, folder)?)
}

/// An engine with at most one sequence, and one adapter or none.
pub struct Alone {
    engine: EngineHandle,
    adapter: Option<Digest>,
}

struct Sink(Sender<SequenceEvent>);

impl SequenceSink for Sink {
    fn has_room(&self, _: usize) -> bool {
        true
    }

    fn send(&mut self, event: SequenceEvent) -> bool {
        self.0.send(event).is_ok()
    }
}

impl Alone {
    /// Loads a model in the class that workers choose, and the adapter of a folder.
    pub fn start(source: &dyn ModelSource, adapter: Option<&Path>) -> anyhow::Result<Self> {
        let adapters = AdapterBounds { slots_max: 1, rank_max: 64 };
        let config = EngineConfig {
            model_len_max: source.spec().context,
            kv_cache_bytes: 64 << 20,
            running_max: 1,
            prefix_cache: None,
            adapters,
            ..EngineConfig::default()
        };
        let device = cpu::device(CpuConfig { threads: 1, simd: None, numerics: Numerics::Bf16x32 })?;
        let mut model = Model::load(source, &*device, config.model_config(), &|_| ())?;
        let limits = AdapterLimits { rank_max: 64, bytes_max: 1 << 30 };
        let load = |folder: &Path| -> anyhow::Result<Digest> {
            let adapter = read_peft(folder, source.spec(), limits)?.pack()?;
            Ok(model.load_adapter(AdapterSlot(0), Arc::new(adapter))?)
        };
        let adapter = adapter.map(load).transpose()?;
        let map = config.pool_map(model.layout(16)?)?;
        let memory = device.alloc_pool(&map)?;
        Ok(Self { engine: Engine::start(model, memory, &map, config)?, adapter })
    }

    /// The answer to a prompt.
    pub fn answer(&self, prompt: &[TokenId], sampling: SamplingParams) -> anyhow::Result<Tokens> {
        let kept = || Arc::new(());
        let request = SequenceRequest {
            id: RequestId::try_new("alone")?,
            tokens: prompt.to_vec(),
            prompt_len: prompt.len(),
            sampling,
            sample_index: 0,
            deadline: Instant::now() + WAIT_MAX,
            priority: 0,
            share: Share::default(),
            prefix: None,
            adapter: self.adapter.map(|digest| AdapterUse { slot: AdapterSlot(0), digest, kept: kept() }),
        };
        let (sender, events) = channel();
        self.engine.submit(request, Run::Full, Box::new(Sink(sender)))?.detach();
        let mut tokens = Tokens::new();
        loop {
            match events.recv_timeout(WAIT_MAX).context("one engine answers")? {
                SequenceEvent::Token { token, logprobs, .. } => {
                    tokens.push((token, logprobs.context("log-probabilities")?.chosen.to_bits()));
                }
                SequenceEvent::Finished { .. } => return Ok(tokens),
                SequenceEvent::Failed { message, .. } => anyhow::bail!(message),
                SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) | SequenceEvent::Prefilled { .. } => {}
            }
        }
    }
}
