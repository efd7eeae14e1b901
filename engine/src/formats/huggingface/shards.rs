//! The safetensors files of a folder.

use super::json::JsonObject;
use crate::formats::WeightsError;
use std::collections::HashMap;
use std::path::Path;

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
/// This file's presence means that the folder's weights are an adapter for another model.
const ADAPTER: &str = "adapter_config.json";
/// Most files of one model; the largest published ones have about 200.
const SHARDS_MAX: usize = 1024;
/// Tensor name to file name.
pub(super) type Index = HashMap<String, String>;

/// The files to open, in a fixed order, and the index if there is one.
pub(super) fn shard_names(folder: &Path) -> Result<(Vec<String>, Option<Index>), WeightsError> {
    if folder.join(ADAPTER).exists() {
        let hint =
            "an adapter is served beside its base model: give that as the model, and this folder to --lora-modules";
        return Err(WeightsError::unsupported(&folder.display().to_string(), ADAPTER, hint));
    }
    if folder.join(SINGLE).exists() {
        return Ok((vec![SINGLE.to_owned()], None));
    }
    let Some(index) = JsonObject::read(&folder.join(INDEX))? else {
        let what = format!("a folder without {SINGLE} and {INDEX}");
        let hint = "weights are read from safetensors files; convert others with transformers' save_pretrained";
        return Err(WeightsError::unsupported(&folder.display().to_string(), what, hint));
    };
    let map = index.need("weight_map", index.object("weight_map")?)?;
    let mut files = Index::new();
    for (tensor, file) in map.keys() {
        let file = file.as_str().filter(|file| is_plain_name(file));
        let file =
            file.ok_or_else(|| map.damaged(format!("{tensor} is in no plain `.safetensors` file of the folder")))?;
        files.insert(tensor.clone(), file.to_owned());
    }
    let mut names: Vec<String> = files.values().cloned().collect();
    names.sort_unstable();
    names.dedup();
    if names.is_empty() || names.len() > SHARDS_MAX {
        return Err(map.damaged(format!("it names {} files; 1 to {SHARDS_MAX} are possible", names.len())));
    }
    Ok((names, Some(files)))
}

/// Whether a name stays within its folder.
fn is_plain_name(name: &str) -> bool {
    let plain = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    plain && !name.starts_with('.') && name.ends_with(".safetensors")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_adapter_is_refused_by_name() {
        let folder = tempfile::tempdir().unwrap();
        for name in [SINGLE, ADAPTER] {
            std::fs::write(folder.path().join(name), "{}").unwrap();
        }
        let message = shard_names(folder.path()).unwrap_err().to_string();
        assert!(
            message.contains("adapter_config.json is not supported") && message.contains("--lora-modules"),
            "{message}"
        );
    }
}
