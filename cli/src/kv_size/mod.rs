//! `baton kv-size`: KV bytes per token and per sequence of a model, and how many sequences fit in a GPU. Needs no cluster.

mod config_json;
mod error;
mod named;
mod report;

use crate::stdout;
use anyhow::Context as _;
use baton_node::config::ByteSize;
use baton_types::{Attention, Dtype, PoolDemand, WATERMARK_BLOCKS};
use baton_worker::models::{self, DEFAULT_MODEL};
use baton_worker::settings::{EngineSettings, ModelSettings};
use clap::Args;
use error::KvSizeError;
use report::Report;
use std::path::Path;

/// Context lengths printed by default, up to the model's own.
const CONTEXTS: [u64; 4] = [2_048, 8_192, 32_768, 131_072];
/// Bytes per parameter on GPUs by default: bf16.
const PARAMETER_BYTES: u64 = 2;

/// Printed for known models of other families than those that the engine computes.
const NOT_SERVED: &str = "the engine does not compute models of this family";

/// Arguments of `baton kv-size`.
#[derive(Args, Debug)]
pub(crate) struct KvSizeArgs {
    /// A model folder (its config.json is enough), a GGUF file, or the name of a known model, e.g. `llama-3-8b`.
    model: String,
    /// Element type of KV: bf16, f16 or f32.
    #[arg(long, default_value = "bf16", value_parser = dtype)]
    kv: Dtype,
    /// Tokens per block: a multiple of 16, up to 128.
    #[arg(long, default_value_t = 16)]
    block_tokens: u32,
    /// Memory for KV, as `engine.kv_cache_bytes`, e.g. 40GiB.
    #[arg(long, value_name = "SIZE", conflicts_with = "gpu_memory")]
    memory: Option<ByteSize>,
    /// Memory of the GPU, e.g. 80GiB. What remains after weights and reserve is for KV.
    #[arg(long, value_name = "SIZE")]
    gpu_memory: Option<ByteSize>,
    /// Size of the weights in GPU memory. Default: two bytes per parameter.
    #[arg(long, value_name = "SIZE", requires = "gpu_memory")]
    weights: Option<ByteSize>,
    /// GPU memory reserved for activations.
    #[arg(long, value_name = "SIZE", default_value = "4GiB", requires = "gpu_memory")]
    reserve: ByteSize,
    /// Context lengths in tokens (prompt and answer together), separated by commas.
    #[arg(long, value_name = "TOKENS", value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 32))]
    context: Vec<u64>,
    /// Print one JSON object on one line instead of a table.
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(args: &KvSizeArgs) -> anyhow::Result<()> {
    let report = report(args)?;
    let text = if args.json { report.json().to_string() } else { report.table() };
    // A closed stdout is not an error of this command.
    stdout::tell(&text).map(drop).context("cannot print the sizes")
}

/// The memory-related facts of a model.
struct Sized {
    attention: Attention,
    weights_bytes: Option<u64>,
    /// Longest context in tokens; 0 if unknown.
    context: u64,
    /// Why the engine does not serve it.
    refused: Option<String>,
}

fn report(args: &KvSizeArgs) -> Result<Report, KvSizeError> {
    let model = find(&args.model)?;
    let layout = model.attention.layout(args.block_tokens, args.kv)?;
    let weights_bytes = args.weights.map(|weights| weights.0).or(model.weights_bytes);
    let memory = match (args.memory, args.gpu_memory) {
        (Some(memory), _) => Some(memory.0),
        (None, Some(gpu)) => Some(left(gpu, weights_bytes, args)?),
        (None, None) => None,
    };
    let mut contexts = args.context.clone();
    if contexts.is_empty() {
        contexts.extend(CONTEXTS.into_iter().filter(|&tokens| model.context == 0 || tokens < model.context));
        contexts.extend((model.context > 0).then_some(model.context));
    }
    let longest = if model.context == 0 { contexts.iter().copied().max().unwrap_or(0) } else { model.context };
    let EngineSettings { running_max, chunk_tokens_max, .. } = EngineSettings::default();
    let demand = PoolDemand {
        sequences: running_max,
        tokens_max: usize::try_from(longest).unwrap_or(usize::MAX),
        chunk_max: chunk_tokens_max,
        watermark: WATERMARK_BLOCKS as usize,
    };
    Ok(Report { model: args.model.clone(), layout, weights_bytes, memory, demand, contexts, refused: model.refused })
}

/// The GPU memory left after weights and reserve.
fn left(gpu: ByteSize, weights: Option<u64>, args: &KvSizeArgs) -> Result<u64, KvSizeError> {
    let weights = weights.ok_or_else(|| KvSizeError::Weights { model: args.model.clone() })?;
    let left = gpu.0.checked_sub(weights).and_then(|left| left.checked_sub(args.reserve.0)).filter(|&left| left > 0);
    let [weights, reserve, gpu] = [weights, args.reserve.0, gpu.0].map(report::size);
    left.ok_or(KvSizeError::NoRoom { weights, reserve, gpu })
}

/// Reads a file or folder as the engine does. For a folder that the engine refuses, reads only which KV attention stores. Otherwise looks
/// up a known name.
fn find(model: &str) -> Result<Sized, KvSizeError> {
    let of = |size: models::ModelSize| Sized {
        attention: size.attention,
        weights_bytes: size.parameters.checked_mul(PARAMETER_BYTES),
        context: size.context,
        refused: None,
    };
    let path = Path::new(model);
    let is_read = path.exists() || model == DEFAULT_MODEL || model.starts_with("random:");
    if !is_read {
        let unknown = || KvSizeError::Unknown { model: model.to_owned(), names: named::names() };
        let (size, served) = named::find(model).ok_or_else(unknown)?;
        return Ok(Sized { refused: (!served).then(|| NOT_SERVED.into()), ..of(size) });
    }
    match models::size(&ModelSettings { model: model.to_owned(), ..ModelSettings::default() }) {
        Ok(size) => Ok(of(size)),
        Err(error) if error.is_unsupported() && path.is_dir() => {
            let (attention, context) = config_json::read(path)?;
            Ok(Sized { attention, weights_bytes: files_bytes(path), context, refused: Some(error.to_string()) })
        }
        Err(error) => Err(error.into()),
    }
}

/// Bytes of the safetensors files in `folder`, if there are any.
fn files_bytes(folder: &Path) -> Option<u64> {
    let files = std::fs::read_dir(folder).ok()?.filter_map(Result::ok);
    let weights = files.filter(|file| file.path().extension().is_some_and(|ending| ending == "safetensors"));
    let bytes: u64 = weights.filter_map(|file| Some(std::fs::metadata(file.path()).ok()?.len())).sum();
    Some(bytes).filter(|&bytes| bytes > 0)
}

fn dtype(text: &str) -> Result<Dtype, KvSizeError> {
    let known = [Dtype::Bf16, Dtype::F16, Dtype::F32].map(Dtype::name).join(", ");
    Dtype::from_name(text).ok_or_else(|| KvSizeError::Dtype { got: text.to_owned(), known })
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: KvSizeArgs,
    }

    fn told(line: &[&str]) -> Result<serde_json::Value, String> {
        let line = Line::try_parse_from(["kv-size"].iter().chain(line)).map_err(|error| error.to_string())?;
        report(&line.args).map(|report| report.json()).map_err(|error| error.to_string())
    }

    #[test]
    fn a_gpu_holds_what_its_weights_leave() {
        // Llama-3-8B: 80 GiB - 4 GiB - 2 * 8,030 million bytes = 65,544,378,624 bytes. A sequence of 8,192 tokens takes 1 GiB of them.
        let sized = told(&["llama-3-8b", "--gpu-memory", "80GiB"]).unwrap();
        assert_eq!(
            (&sized["kv_bytes"], &sized["weights_bytes"]),
            (&65_544_378_624_u64.into(), &16_060_000_000_u64.into())
        );
        assert_eq!(sized["contexts"][1]["tokens"], 8_192);
        assert_eq!(sized["contexts"][1]["sequences"], 61);
        let share = told(&["llama-3-8b", "--gpu-memory", "80GiB", "--weights", "8GiB", "--reserve", "8GiB"]).unwrap();
        assert_eq!((&share["kv_bytes"], &share["contexts"][1]["sequences"]), (&(64_u64 << 30).into(), &64.into()));
        let half = told(&["llama-3-8b", "--memory", "40GiB", "--kv", "f32", "--context", "2048,4096"]).unwrap();
        assert_eq!((&half["bytes_per_token"], &half["contexts"][1]["sequences"]), (&(256 << 10).into(), &40.into()));
    }

    #[test]
    fn without_memory_no_sequences_are_counted() {
        let sized = told(&["llama-2-7b"]).unwrap();
        assert_eq!(sized["contexts"].as_array().unwrap().len(), 2, "2,048 and the model's own 4,096");
        assert!(sized["refused"].is_null() && !told(&["falcon-7b"]).unwrap()["refused"].is_null());
        assert!(sized["kv_bytes"].is_null() && sized["contexts"][0]["sequences"].is_null());
        assert_eq!(sized["contexts"][1]["bytes"], 2_u64 << 30);
    }

    #[test]
    fn a_folder_that_the_engine_refuses_is_sized_all_the_same() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().to_str().unwrap();
        let config = r#"{"architectures":["FalconForCausalLM"],"model_type":"falcon","num_hidden_layers":32,
            "num_attention_heads":71,"hidden_size":4544,"multi_query":true,"new_decoder_architecture":false}"#;
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let sized = told(&[path]).unwrap();
        assert_eq!(sized["bytes_per_token"], 32 * 2 * 64 * 2);
        assert!(sized["refused"].as_str().unwrap().contains("FalconForCausalLM"), "{sized}");
        assert!(told(&[path, "--gpu-memory", "80GiB"]).unwrap_err().contains("--weights"));
        std::fs::write(folder.path().join("model.safetensors"), [0; 1_000]).unwrap();
        assert_eq!(told(&[path, "--gpu-memory", "80GiB"]).unwrap()["weights_bytes"], 1_000);
        std::fs::write(folder.path().join("config.json"), "[]").unwrap();
        assert!(told(&[path]).unwrap_err().contains("config.json"));
    }

    #[test]
    fn bad_input_says_what_to_do() {
        let check = |line: &[&str], expected: &str| {
            let error = told(line).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check(&["llama-9"], "one of: smollm2-135m, ");
        check(&["org/name"], "a folder with a config.json");
        check(
            &["llama-3-70b", "--gpu-memory", "80GiB"],
            "weights of 131.42 GiB and a reserve of 4 GiB leave nothing of 80 GiB",
        );
        check(&["llama-3-8b", "--kv", "fp8"], "bf16, f16, f32");
        check(&["llama-3-8b", "--block-tokens", "17"], "multiple of 16");
        check(&["llama-3-8b", "--context", "0"], "0 is not in");
        check(&["llama-3-8b", "--memory", "40GiB", "--gpu-memory", "80GiB"], "cannot be used with");
        check(&["llama-3-8b", "--memory", "much"], "is not a size");
    }
}
