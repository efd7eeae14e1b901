//! `config.json` of models that the engine does not support: reads which KV attention stores, and nothing else.
//!
//! Reads only model types whose defaults and keys are known. A guess would give a plausible but wrong number.

use super::error::KvSizeError;
use super::named::all_but;
use baton_types::{Attention, LayerKv, SlidingWindow};
use serde_json::{Map, Value};
use std::io::Read as _;
use std::path::Path;

/// Largest file that is read; real files have a few kilobytes.
const BYTES_MAX: u64 = 1 << 20;
/// Most layers; far above any published model.
const LAYERS_MAX: u32 = 4_096;
/// Values of `model_type` whose attention is known.
const TYPES: [&str; 12] = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "phi3",
    "gemma2",
    "gemma3_text",
    "falcon",
    "deepseek_v2",
    "deepseek_v3",
    "qwen3_5_text",
];

/// Attention and longest context of the model in `folder`; 0 if no context is stated.
pub(super) fn read(folder: &Path) -> Result<(Attention, u64), KvSizeError> {
    let path = folder.join("config.json");
    let refuse = |problem: String| KvSizeError::Config { path: path.clone(), problem };
    let mut text = String::new();
    let file = std::fs::File::open(&path).map_err(|error| refuse(error.to_string()))?;
    file.take(BYTES_MAX).read_to_string(&mut text).map_err(|error| refuse(error.to_string()))?;
    let keys = serde_json::from_str(&text).map_err(|error| refuse(format!("it is not a JSON object: {error}")))?;
    of(&keys).map_err(refuse)
}

fn of(keys: &Map<String, Value>) -> Result<(Attention, u64), String> {
    let model_type = keys.get("model_type").and_then(Value::as_str).ok_or("model_type is missing")?;
    if model_type == "qwen3_5" {
        // A model of images too, around the decoder.
        return of(keys.get("text_config").and_then(Value::as_object).ok_or("text_config is missing")?);
    }
    if !TYPES.contains(&model_type) {
        return Err(format!("model_type `{model_type}` is not supported; supported are {}", TYPES.join(", ")));
    }
    let layers = need(keys, &["num_hidden_layers", "n_layer"])?;
    if layers > LAYERS_MAX {
        return Err(format!("{layers} layers are over {LAYERS_MAX}"));
    }
    let kv = match model_type {
        "deepseek_v2" | "deepseek_v3" => {
            let (rank, rotated) = (need(keys, &["kv_lora_rank"])?, need(keys, &["qk_rope_head_dim"])?);
            LayerKv::Latent { dim: rank.saturating_add(rotated) }
        }
        _ => LayerKv::Heads { kv_heads: kv_heads(keys, model_type)?, head_dim: head_dim(keys, model_type)? },
    };
    let context = size(keys, &["max_position_embeddings"])?.map_or(0, u64::from);
    if model_type == "qwen3_5_text" {
        let state = state(keys)?;
        let of_layer = |recurrent| (None, if recurrent { state } else { kv });
        return Ok((Attention::of_layers(recurrent(keys, layers)?.into_iter().map(of_layer)), context));
    }
    let window = window(keys, model_type, layers)?;
    Ok((Attention::alike(layers, kv, window.as_ref()), context))
}

/// What a recurrent layer keeps of a sequence.
fn state(keys: &Map<String, Value>) -> Result<LayerKv, String> {
    let of = |name: &str| need(keys, &[name]);
    let (key_heads, heads) = (of("linear_num_key_heads")?, of("linear_num_value_heads")?);
    let (key_dim, value_dim) = (of("linear_key_head_dim")?, of("linear_value_head_dim")?);
    let (key, value) = (key_heads.saturating_mul(key_dim), heads.saturating_mul(value_dim));
    let channels = key.saturating_mul(2).saturating_add(value);
    let inputs = match of("linear_conv_kernel_dim")? {
        1 => return Err("linear_conv_kernel_dim is 1; it is at least 2".into()),
        taps => taps - 1,
    };
    Ok(LayerKv::State { heads, key_dim, value_dim, inputs, channels })
}

/// Which layers are recurrent.
fn recurrent(keys: &Map<String, Value>, layers: u32) -> Result<Vec<bool>, String> {
    let Some(types) = keys.get("layer_types").and_then(Value::as_array) else {
        let interval = need(keys, &["full_attention_interval"])?;
        return Ok((1..=layers).map(|layer| !layer.is_multiple_of(interval)).collect());
    };
    if types.len() != layers as usize {
        return Err(format!("layer_types names {} layers of {layers}", types.len()));
    }
    let of = |kind: &Value| match kind.as_str() {
        Some("linear_attention") => Ok(true),
        Some("full_attention") => Ok(false),
        _ => Err(format!("layer_types has {kind}; linear_attention and full_attention are understood")),
    };
    types.iter().map(of).collect()
}

/// A size under the first of these names that is present; null counts as absent.
fn size(keys: &Map<String, Value>, names: &[&str]) -> Result<Option<u32>, String> {
    let Some((name, value)) = names.iter().find_map(|n| Some((n, keys.get(*n).filter(|v| !v.is_null())?))) else {
        return Ok(None);
    };
    // No model comes near this; a larger value means a damaged file.
    let size = value.as_u64().filter(|n| (1..=1 << 30).contains(n)).and_then(|n| u32::try_from(n).ok());
    size.map(Some).ok_or_else(|| format!("{name} = {value} is no size"))
}

fn need(keys: &Map<String, Value>, names: &[&str]) -> Result<u32, String> {
    size(keys, names)?.ok_or_else(|| format!("{} is missing", names[0]))
}

fn is_on(keys: &Map<String, Value>, name: &str, default: bool) -> bool {
    keys.get(name).and_then(Value::as_bool).unwrap_or(default)
}

fn kv_heads(keys: &Map<String, Value>, model_type: &str) -> Result<u32, String> {
    match model_type {
        "falcon" if is_on(keys, "new_decoder_architecture", false) => need(keys, &["num_kv_heads"]),
        "falcon" if is_on(keys, "multi_query", true) => Ok(1),
        "falcon" => need(keys, &["num_attention_heads", "n_head"]),
        // The only types for which the meaning of an absent key is certain.
        "llama" | "phi3" => need(keys, &["num_key_value_heads", "num_attention_heads"]),
        _ => need(keys, &["num_key_value_heads"]),
    }
}

fn head_dim(keys: &Map<String, Value>, model_type: &str) -> Result<u32, String> {
    if let Some(stated) = size(keys, &["head_dim"])? {
        return Ok(stated);
    }
    if matches!(model_type, "gemma2" | "gemma3_text" | "qwen3" | "qwen3_5_text") {
        return Err(format!("head_dim is missing, and a {model_type} needs it"));
    }
    let (hidden, heads) = (need(keys, &["hidden_size"])?, need(keys, &["num_attention_heads", "n_head"])?);
    match hidden.is_multiple_of(heads) {
        true => Ok(hidden / heads),
        false => Err(format!("hidden_size = {hidden} does not divide among {heads} heads")),
    }
}

fn window(keys: &Map<String, Value>, model_type: &str, layers: u32) -> Result<Option<SlidingWindow>, String> {
    let can_slide = ["mistral", "mixtral", "qwen2", "qwen3", "phi3", "gemma2", "gemma3_text"].contains(&model_type);
    let off = model_type.starts_with("qwen") && !is_on(keys, "use_sliding_window", false);
    if !can_slide || off {
        return Ok(None);
    }
    if model_type == "mistral" && !keys.contains_key("sliding_window") {
        return Err("sliding_window is missing; state it as null if the model has none".into());
    }
    let tokens = match (size(keys, &["sliding_window"])?, model_type) {
        (Some(tokens), _) => tokens,
        (None, "gemma2" | "gemma3_text") => return Err("sliding_window is missing".into()),
        (None, _) => return Ok(None),
    };
    if let Some(types) = keys.get("layer_types").and_then(Value::as_array) {
        if types.len() != layers as usize {
            return Err(format!("layer_types names {} layers of {layers}", types.len()));
        }
        let unknown = types.iter().find(|t| !matches!(t.as_str(), Some("sliding_attention" | "full_attention")));
        if let Some(unknown) = unknown {
            return Err(format!("layer_types has {unknown}; sliding_attention and full_attention are understood"));
        }
        let slides = |layer: &u32| types.get(*layer as usize).is_some_and(|t| t == "sliding_attention");
        let layers: Vec<u32> = (0..layers).filter(slides).collect();
        return Ok((!layers.is_empty()).then_some(SlidingWindow { tokens, layers }));
    }
    match model_type {
        "gemma2" => Ok(Some(all_but(tokens, 2, layers))),
        "gemma3_text" => Ok(Some(all_but(tokens, size(keys, &["sliding_window_pattern"])?.unwrap_or(6), layers))),
        "qwen2" | "qwen3" => {
            let first = keys.get("max_window_layers").and_then(Value::as_u64).unwrap_or(u64::from(layers));
            let layers: Vec<u32> = (0..layers).filter(|&layer| u64::from(layer) >= first).collect();
            Ok((!layers.is_empty()).then_some(SlidingWindow { tokens, layers }))
        }
        _ => Ok(Some(SlidingWindow { tokens, layers: (0..layers).collect() })),
    }
}

#[cfg(test)]
mod tests {
    use super::super::named;
    use super::*;
    use serde_json::json;

    fn read(config: Value) -> Result<(Attention, u64), String> {
        of(config.as_object().unwrap())
    }

    #[test]
    fn the_models_that_are_known_by_name_are_read_alike() {
        let check = |name: &str, config: Value| {
            let known = named::find(name).unwrap().0;
            assert_eq!(read(config).unwrap().0, known.attention, "{name}");
        };
        let falcon = json!({"model_type": "falcon", "num_hidden_layers": 32, "num_attention_heads": 71, "hidden_size": 4544,
            "multi_query": true, "new_decoder_architecture": false});
        check("falcon-7b", falcon);
        let mistral = json!({"model_type": "mistral", "num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096,
            "num_key_value_heads": 8, "sliding_window": 4096, "max_position_embeddings": 32768});
        check("mistral-7b-v0.1", mistral.clone());
        assert_eq!(read(mistral).unwrap().1, 32_768);
        let gemma = json!({"model_type": "gemma2", "num_hidden_layers": 42, "num_attention_heads": 16, "hidden_size": 3584,
            "num_key_value_heads": 8, "head_dim": 256, "sliding_window": 4096});
        check("gemma-2-9b", gemma);
        let deepseek = json!({"model_type": "deepseek_v3", "num_hidden_layers": 61, "num_attention_heads": 128,
            "num_key_value_heads": 128, "hidden_size": 7168, "kv_lora_rank": 512, "qk_rope_head_dim": 64});
        check("deepseek-v3", deepseek);
        // It contains a sliding_window that is disabled.
        let qwen = json!({"model_type": "qwen2", "num_hidden_layers": 28, "num_attention_heads": 28, "hidden_size": 3584,
            "num_key_value_heads": 4, "sliding_window": 131072, "use_sliding_window": false, "max_window_layers": 28});
        check("qwen2.5-7b", qwen);
    }

    #[test]
    fn stated_layers_go_before_the_rule() {
        let types = ["full_attention", "sliding_attention", "full_attention"];
        let config = json!({"model_type": "gemma2", "num_hidden_layers": 3, "num_attention_heads": 2, "hidden_size": 64,
            "num_key_value_heads": 1, "head_dim": 32, "sliding_window": 128, "layer_types": types});
        let window = SlidingWindow { tokens: 128, layers: vec![1] };
        let kv = LayerKv::Heads { kv_heads: 1, head_dim: 32 };
        assert_eq!(read(config.clone()).unwrap().0, Attention::alike(3, kv, Some(&window)));
        let mut other = config;
        other["layer_types"] = json!(["full_attention"]);
        assert!(read(other).unwrap_err().contains("1 layers of 3"));
    }

    #[test]
    fn recurrent_layers_have_states() {
        let text = json!({"model_type": "qwen3_5_text", "num_hidden_layers": 8, "num_attention_heads": 16, "hidden_size": 4096,
            "num_key_value_heads": 4, "head_dim": 256, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
            "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4,
            "max_position_embeddings": 262144});
        let heads = LayerKv::Heads { kv_heads: 4, head_dim: 256 };
        let state = LayerKv::State { heads: 32, key_dim: 128, value_dim: 128, inputs: 3, channels: 8192 };
        let layers = (1..=8u32).map(|layer| (None, if layer.is_multiple_of(4) { heads } else { state }));
        let expected = (Attention::of_layers(layers), 262_144);
        assert_eq!(read(text.clone()).unwrap(), expected);
        assert_eq!(read(json!({"model_type": "qwen3_5", "text_config": text})).unwrap(), expected);
        let check = |key: &str, value: Value, expected: &str| {
            let mut config = text.clone();
            config[key] = value;
            let error = read(config).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check("layer_types", json!(["linear_attention"]), "layer_types names 1 layers of 8");
        check("layer_types", json!(vec!["sliding_attention"; 8]), "linear_attention and full_attention are understood");
        check("linear_conv_kernel_dim", json!(1), "linear_conv_kernel_dim is 1");
        check("linear_key_head_dim", json!(null), "linear_key_head_dim is missing");
        check("full_attention_interval", json!(null), "full_attention_interval is missing");
        assert!(read(json!({"model_type": "qwen3_5"})).unwrap_err().contains("text_config"));
    }

    #[test]
    fn what_is_not_known_is_refused_by_name() {
        let base = json!({"model_type": "mistral", "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 64,
            "num_key_value_heads": 2, "sliding_window": null});
        let kv = LayerKv::Heads { kv_heads: 2, head_dim: 32 };
        assert_eq!(read(base.clone()).unwrap().0, Attention::alike(2, kv, None));
        let check = |key: &str, value: Value, expected: &str| {
            let mut config = base.clone();
            config[key] = value;
            let error = read(config).unwrap_err();
            assert!(error.contains(expected), "{error}");
        };
        check("model_type", json!("mamba"), "`mamba` is not supported");
        check("num_hidden_layers", json!(0), "num_hidden_layers = 0");
        check("num_hidden_layers", json!(4_097), "over 4096");
        check("num_hidden_layers", json!(null), "num_hidden_layers is missing");
        check("num_key_value_heads", json!("two"), "num_key_value_heads");
        check("num_attention_heads", json!(3), "does not divide");
        check("model_type", json!("gemma2"), "head_dim");
        let mut silent = base.clone();
        silent.as_object_mut().unwrap().remove("sliding_window");
        assert!(read(silent).unwrap_err().contains("sliding_window"));
    }
}
