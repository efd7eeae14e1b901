//! Resolves and opens the model that an operator names: a path, a hub id, the default model, or a random model.

mod default_model;
mod error;
mod fetch_only;
mod hub;
mod lock;
mod size;
mod spec;

pub use error::ModelsError;
pub(crate) use fetch_only::{fetch_only, progress_to};
pub use hub::HubId;
pub use size::{ModelSize, size};
pub use spec::{DEFAULT_MODEL, ModelSpec};

use crate::settings::ModelSettings;
use baton_engine::formats::{GgufModel, HuggingFaceModel, ModelSource, RandomModel};
use baton_node::environment;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The hub if none is configured and `HF_ENDPOINT` names none.
const HUB: &str = "https://huggingface.co";

/// Receives the current step and its progress, 0 to 1.
pub type Progress<'a> = &'a (dyn Fn(&str, f32) + Sync);

/// Opens the model that the settings name. A hub model is downloaded first if it is not in the cache; the default model must have been
/// downloaded (`--fetch-only`, `--check-only`). Blocks until downloads are done.
pub fn open(settings: &ModelSettings, progress: Progress<'_>) -> Result<Arc<dyn ModelSource>, ModelsError> {
    Ok(match ModelSpec::parse(&settings.model)? {
        ModelSpec::Random(spec) => Arc::new(RandomModel::parse(&spec)?),
        ModelSpec::Path(path) => open_path(&path, None, settings)?,
        ModelSpec::Default => open_path(&default_model::find(&cache_dir(settings)?)?, Some(DEFAULT_MODEL), settings)?,
        ModelSpec::Hub(id) => {
            let folder = hub::fetch(&id, &hub_settings(settings)?, progress)?;
            open_path(&folder, Some(&id.repository()), settings)?
        }
    })
}

/// The hub revision in the settings: a branch, a tag or a commit. Empty for models that have none.
pub fn revision(settings: &ModelSettings) -> String {
    match ModelSpec::parse(&settings.model) {
        Ok(ModelSpec::Hub(id)) => id.revision().to_owned(),
        _ => String::new(),
    }
}

/// Downloads the default model if the settings name it and it is missing. Blocks. Its progress goes to stderr.
pub(crate) fn fetch_default(settings: &ModelSettings) -> Result<(), ModelsError> {
    match ModelSpec::parse(&settings.model)? {
        ModelSpec::Default => default_model::fetch(&cache_dir(settings)?),
        ModelSpec::Hub(_) | ModelSpec::Random(_) | ModelSpec::Path(_) => Ok(()),
    }
}

/// Makes sure that [`open`] will find the model without the network: downloads the default model or a hub model if it is missing, and
/// does nothing for other models. Blocks; call it only where blocking is allowed. The default model's progress goes to stderr.
fn prefetch(settings: &ModelSettings, progress: Progress<'_>) -> Result<(), ModelsError> {
    match ModelSpec::parse(&settings.model)? {
        ModelSpec::Hub(id) => hub::fetch(&id, &hub_settings(settings)?, progress).map(drop),
        ModelSpec::Default | ModelSpec::Random(_) | ModelSpec::Path(_) => fetch_default(settings),
    }
}

fn open_path(path: &Path, name: Option<&str>, settings: &ModelSettings) -> Result<Arc<dyn ModelSource>, ModelsError> {
    let context = settings.max_model_len as usize;
    Ok(if path.is_dir() {
        Arc::new(HuggingFaceModel::open(path, name)?.serving(context))
    } else {
        Arc::new(GgufModel::open(path, name)?.serving(context))
    })
}

/// The folder of downloaded models: as configured, else `baton/models` in the user's cache folder.
fn cache_dir(settings: &ModelSettings) -> Result<PathBuf, ModelsError> {
    if !settings.cache_dir.as_os_str().is_empty() {
        return Ok(settings.cache_dir.clone());
    }
    environment::cache_home().map(|cache| cache.join("baton/models")).ok_or(ModelsError::NoCache)
}

fn hub_settings(settings: &ModelSettings) -> Result<hub::HubSettings, ModelsError> {
    let configured = Some(settings.hub_endpoint.clone()).filter(|url| !url.is_empty());
    let endpoint = configured.or_else(environment::hub_endpoint).unwrap_or_else(|| HUB.into());
    Ok(hub::HubSettings {
        endpoint: endpoint.trim_end_matches('/').to_owned(),
        token: settings.hub_token.as_ref().map(|t| t.expose().to_owned()).or_else(environment::hub_token),
        cache_dir: cache_dir(settings)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hub_models_have_revisions() {
        for (model, expected) in [("org/name@v1.2", "v1.2"), ("org/name", "main"), ("random:seed=1", "")] {
            let settings = ModelSettings { model: model.into(), ..ModelSettings::default() };
            assert_eq!(revision(&settings), expected, "{model}");
        }
    }
}
