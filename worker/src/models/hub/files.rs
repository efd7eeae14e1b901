//! Which files of a repository are downloaded.

use super::api::Repository;
use serde::Deserialize;
use std::collections::{BTreeSet, HashMap};
use std::path::Path;

const CONFIG: &str = "config.json";
const WEIGHTS: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";
/// Files downloaded with a model if they exist. `tokenizer.model` is among them only to detect a repository that has no other tokenizer.
const OPTIONAL: [&str; 6] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja",
    "tokenizer.model",
];

/// Configuration, tokenizer and, if the weights are in several files, their index.
pub(super) fn small(repository: &Repository) -> Result<Vec<&'static str>, String> {
    let has = |name: &str| repository.file(name).is_some();
    if !has(CONFIG) {
        let gguf = repository.names().find(|name| name.ends_with(".gguf"));
        return Err(match gguf {
            Some(gguf) => format!("it has no {CONFIG}; download {gguf} by hand and give its path as the model"),
            None => format!("it has no {CONFIG}, so it is not a model"),
        });
    }
    let mut names = vec![CONFIG];
    names.extend(OPTIONAL.into_iter().filter(|name| has(name)));
    if !has(WEIGHTS) {
        if !has(INDEX) {
            return Err(format!("it has neither {WEIGHTS} nor {INDEX}; other formats are not read"));
        }
        names.push(INDEX);
    }
    Ok(names)
}

#[derive(Deserialize)]
struct Index {
    weight_map: HashMap<String, String>,
}

/// The weight files, once the small files are in `folder`. Only names that the repository itself lists are downloaded.
pub(super) fn weights(repository: &Repository, folder: &Path) -> Result<Vec<String>, String> {
    if repository.file(WEIGHTS).is_some() {
        return Ok(vec![WEIGHTS.to_owned()]);
    }
    let index = std::fs::read(folder.join(INDEX)).map_err(|error| format!("{INDEX}: {error}"))?;
    let index: Index = serde_json::from_slice(&index).map_err(|error| format!("{INDEX}: {error}"))?;
    let shards: BTreeSet<String> = index.weight_map.into_values().collect();
    for shard in &shards {
        let plain = !shard.contains(['/', '\\']) && !shard.starts_with('.') && shard.ends_with(".safetensors");
        if !plain || repository.file(shard).is_none() {
            return Err(format!("{INDEX} names `{shard}`, which is not a safetensors file of the repository"));
        }
    }
    Ok(shards.into_iter().collect())
}
