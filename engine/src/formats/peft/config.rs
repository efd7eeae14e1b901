//! `adapter_config.json`: which rank and factor each module has.
//!
//! As with a model's `config.json`, every key is read here, known not to affect the computation, or switched off. Any other is refused by
//! name.

use crate::formats::WeightsError;
use crate::formats::huggingface::{JsonObject, is_off};
use baton_types::shown;
use serde_json::Value;
use std::path::Path;

const FILE: &str = "adapter_config.json";

/// Read by this module.
const READ: &[&str] =
    &["alpha_pattern", "bias", "init_lora_weights", "lora_alpha", "peft_type", "r", "rank_pattern", "use_rslora"];

/// About training, the file's history, and options of features that are off. The tensors themselves say which modules are changed.
const HARMLESS: &[&str] = &[
    "base_model_name_or_path",
    "corda_config",
    "eva_config",
    "exclude_modules",
    "inference_mode",
    "layers_pattern",
    "layers_to_transform",
    "loftq_config",
    "lora_dropout",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
];

/// Ways to initialize an adapter that also change the base model's weights, unless the adapter was converted when it was saved.
const CHANGES_BASE: &[&str] = &["corda", "loftq", "olora", "pissa"];

fn hint(key: &str) -> &'static str {
    match key {
        "modules_to_save" => "the adapter brings whole modules; merge it into its base model (merge_and_unload)",
        "use_dora" => "DoRA is not implemented; merge it into its base model (merge_and_unload)",
        "lora_bias" => "biases of adapters are not implemented",
        "fan_in_fan_out" => "only linears are implemented, no Conv1D",
        "trainable_token_indices" => "changed embeddings are not implemented",
        "target_parameters" => "experts are not implemented",
        _ => {
            "it may change the mathematics, so the adapter is refused rather than computed wrongly; if you know that it does not, delete the key"
        }
    }
}

/// Ranks and factors of an adapter's modules.
#[derive(Debug)]
pub(super) struct PeftConfig {
    path: String,
    rank: usize,
    alpha: f64,
    rs: bool,
    ranks: Vec<(String, usize)>,
    alphas: Vec<(String, f64)>,
}

impl PeftConfig {
    pub(super) fn read(folder: &Path) -> Result<Self, WeightsError> {
        let Some(config) = JsonObject::read(&folder.join(FILE))? else {
            let hint = format!("an adapter is a folder that peft's save_pretrained wrote, with {FILE}");
            return Err(WeightsError::unsupported(
                &folder.display().to_string(),
                format!("a folder without {FILE}"),
                hint,
            ));
        };
        for (key, value) in config.keys() {
            let known = [READ, HARMLESS].iter().any(|keys| keys.contains(&key.as_str()));
            if !known && !is_off(value) {
                let shown: String = value.to_string().chars().take(60).collect();
                return Err(config.unsupported(format!("{key} = {shown}"), hint(key)));
            }
        }
        match config.text("peft_type")? {
            None | Some("LORA") => {}
            Some(other) => {
                return Err(config.unsupported(format!("peft_type = {}", shown(other)), "only LORA is implemented"));
            }
        }
        match config.text("bias")? {
            None | Some("none") => {}
            Some(other) => {
                return Err(config.unsupported(format!("bias = {}", shown(other)), "only none is implemented"));
            }
        }
        let init = config.get("init_lora_weights").and_then(Value::as_str).unwrap_or_default();
        if CHANGES_BASE.iter().any(|name| init.to_ascii_lowercase().starts_with(name)) {
            let hint = "the adapter belongs to changed base weights; save it with \
                        path_initial_model_for_weight_conversion, which makes a plain LoRA of it";
            return Err(config.unsupported(format!("init_lora_weights = {}", shown(init)), hint));
        }
        let rank = config.need("r", config.size("r")?)?;
        let number = |value: &Value| value.as_f64().filter(|x| x.is_finite());
        let alpha = config.need("lora_alpha", config.get("lora_alpha").and_then(number))?;
        let whole = |value: &Value| usize::try_from(value.as_u64()?).ok().filter(|rank| *rank > 0);
        Ok(Self {
            rank: Some(rank).filter(|rank| *rank > 0).ok_or_else(|| config.damaged("r is 0"))?,
            alpha,
            rs: config.bool("use_rslora")?.unwrap_or(false),
            ranks: pattern(&config, "rank_pattern", whole)?,
            alphas: pattern(&config, "alpha_pattern", number)?,
            path: folder.join(FILE).display().to_string(),
        })
    }

    /// Rank and factor of a module, such as `model.layers.0.self_attn.q_proj`: `alpha / rank`, or `alpha / sqrt(rank)` with rsLoRA
    /// (Kalajdzievski, arXiv:2312.03732).
    pub(super) fn of(&self, module: &str) -> Result<(usize, f32), WeightsError> {
        let rank = self.matching("rank_pattern", &self.ranks, module)?.unwrap_or(self.rank);
        let alpha = self.matching("alpha_pattern", &self.alphas, module)?.unwrap_or(self.alpha);
        let divisor = if self.rs { (rank as f64).sqrt() } else { rank as f64 };
        Ok((rank, (alpha / divisor) as f32))
    }

    /// The value of the key that names the module, which ends with it, or equals it where the key begins with `^`.
    fn matching<T: Copy + PartialEq>(
        &self,
        name: &str,
        pattern: &[(String, T)],
        module: &str,
    ) -> Result<Option<T>, WeightsError> {
        let names = |key: &str| match key.strip_prefix('^') {
            Some(whole) => whole == module,
            None => module.strip_suffix(key).is_some_and(|before| before.is_empty() || before.ends_with('.')),
        };
        let mut found = pattern.iter().filter(|(key, _)| names(key)).map(|(_, value)| *value);
        let first = found.next();
        match first {
            Some(first) if found.any(|other| other != first) => {
                Err(WeightsError::damaged(&self.path, format!("{name} has several values for {module}")))
            }
            _ => Ok(first),
        }
    }
}

/// A pattern's keys with their values. peft takes them for regular expressions; here they are module names.
fn pattern<T>(
    config: &JsonObject,
    name: &str,
    read: impl Fn(&Value) -> Option<T>,
) -> Result<Vec<(String, T)>, WeightsError> {
    let Some(pattern) = config.object(name)? else { return Ok(Vec::new()) };
    let entries = pattern.keys().iter().map(|(key, value)| {
        let plain = key.strip_prefix('^').unwrap_or(key);
        if plain.is_empty() || !plain.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_')) {
            let hint = "regular expressions are not implemented; write the names of modules";
            return Err(pattern.unsupported(format!("the key {}", shown(key)), hint));
        }
        let value = read(value).ok_or_else(|| pattern.damaged(format!("{key} has no value that is possible")))?;
        Ok((key.clone(), value))
    });
    entries.collect()
}
