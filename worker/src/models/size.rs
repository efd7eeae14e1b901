//! The size of a model, without loading it: read as for serving, but of a folder only its `config.json`.

use super::{ModelSpec, ModelsError, cache_dir, default_model};
use crate::settings::ModelSettings;
use baton_engine::families::DecoderSpec;
use baton_engine::formats::{GgufModel, HuggingFaceModel, ModelSource as _, RandomModel};
use baton_types::Attention;
use std::path::Path;

/// The properties that decide how much memory a model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSize {
    /// The KV that attention stores.
    pub attention: Attention,
    /// Parameters of all tensors.
    pub parameters: u64,
    /// Longest context that the model supports, in tokens.
    pub context: u64,
}

/// The size of the model that the settings name. Downloads nothing: a hub model is refused, and the default model must have been
/// downloaded.
pub fn size(settings: &ModelSettings) -> Result<ModelSize, ModelsError> {
    match ModelSpec::parse(&settings.model)? {
        ModelSpec::Random(spec) => Ok(of(RandomModel::parse(&spec)?.spec())),
        ModelSpec::Path(path) => of_path(&path),
        ModelSpec::Default => of_path(&default_model::find(&cache_dir(settings)?)?),
        ModelSpec::Hub(_) => Err(ModelsError::Spec {
            model: settings.model.clone(),
            problem: "a model on a hub is not fetched to tell its size; its config.json in a folder is enough",
        }),
    }
}

fn of_path(path: &Path) -> Result<ModelSize, ModelsError> {
    Ok(match path.is_dir() {
        true => of(&HuggingFaceModel::read_spec(path)?),
        false => of(GgufModel::open(path, None)?.spec()),
    })
}

fn of(spec: &DecoderSpec) -> ModelSize {
    ModelSize { attention: spec.attention(), parameters: spec.parameters(), context: spec.context as u64 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::{Attention, LayerKv};

    fn sized(model: &str) -> Result<ModelSize, ModelsError> {
        size(&ModelSettings { model: model.into(), ..ModelSettings::default() })
    }

    #[test]
    fn a_folder_needs_its_config_alone() {
        let folder = tempfile::tempdir().unwrap();
        let config = r#"{"architectures":["LlamaForCausalLM"],"model_type":"llama","hidden_size":4096,"vocab_size":128256,
            "num_hidden_layers":32,"num_attention_heads":32,"num_key_value_heads":8,"intermediate_size":14336,
            "max_position_embeddings":8192,"rms_norm_eps":1e-5,"rope_theta":500000.0}"#;
        std::fs::write(folder.path().join("config.json"), config).unwrap();
        let size = sized(folder.path().to_str().unwrap()).unwrap();
        // Llama-3-8B has 8,030,261,248 parameters.
        assert_eq!((size.parameters, size.context), (8_030_261_248, 8_192));
        let kv = LayerKv::Heads { kv_heads: 8, head_dim: 128 };
        assert_eq!(size.attention, Attention::alike(32, kv, None));
        std::fs::write(folder.path().join("config.json"), config.replace("Llama", "Falcon")).unwrap();
        assert!(sized(folder.path().to_str().unwrap()).unwrap_err().is_unsupported());
        assert!(!sized("random:layers=0").unwrap_err().is_unsupported());
    }

    #[test]
    fn nothing_is_downloaded() {
        let error = sized("org/name").unwrap_err().to_string();
        assert!(error.contains("not fetched") && error.contains("config.json"), "{error}");
    }
}
