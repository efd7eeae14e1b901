//! Models of a Hugging Face hub, or of a mirror with the same protocol: downloads the needed files of a repository into the cache.
//!
//! Cache: `<cache_dir>/hub/<org>--<name>/<commit>/<file>`, with an empty `.complete` once all files are there. `refs/<revision>` names
//! the commit that a branch or tag last pointed to, so that a server starts without its hub.
//! Not the crate `hf-hub`: it restarts a broken download from the beginning, and doubles the number of crates to build.

mod api;
mod client;
mod download;
mod files;
mod id;
#[cfg(test)]
pub(super) mod stand_in;
#[cfg(test)]
mod tests;

pub use id::HubId;

use super::lock::lock;
use super::{ModelsError, Progress};
use api::Repository;
use client::Client;
use std::path::{Path, PathBuf};

/// Address of the hub, and the cache folder.
#[derive(Clone)]
pub(super) struct HubSettings {
    /// Without a trailing slash.
    pub(super) endpoint: String,
    pub(super) token: Option<String>,
    pub(super) cache_dir: PathBuf,
}

/// The folder with the model's files; downloads those missing from the cache.
pub(super) fn fetch(id: &HubId, settings: &HubSettings, progress: Progress<'_>) -> Result<PathBuf, ModelsError> {
    let home = settings.cache_dir.join("hub").join(id.folder());
    let complete = |commit: &str| Some(home.join(commit)).filter(|folder| folder.join(".complete").exists());
    if id.is_commit()
        && let Some(folder) = complete(id.revision())
    {
        return Ok(folder);
    }
    let client = Client::new(settings);
    let refs = home.join("refs").join(id.revision().replace('/', "--"));
    let repository = match client.repository(id) {
        Ok(repository) => repository,
        Err(error @ ModelsError::Network { .. }) => {
            let known = std::fs::read_to_string(&refs).ok().and_then(|commit| complete(&commit));
            let Some(folder) = known else { return Err(error) };
            tracing::warn!(model = %id.repository(), %error, "serves the cached model, since the hub is away");
            return Ok(folder);
        }
        Err(error) => return Err(error),
    };
    let folder = home.join(repository.commit());
    if complete(repository.commit()).is_none() {
        std::fs::create_dir_all(&folder).map_err(ModelsError::cache(&folder))?;
        let _lock = lock(&home, progress)?;
        fetch_files(&client, id, &repository, &folder, progress)?;
    }
    let parent = home.join("refs");
    std::fs::create_dir_all(&parent).map_err(ModelsError::cache(&parent))?;
    std::fs::write(&refs, repository.commit()).map_err(ModelsError::cache(&refs))?;
    Ok(folder)
}

fn fetch_files(
    client: &Client,
    id: &HubId,
    repository: &Repository,
    folder: &Path,
    progress: Progress<'_>,
) -> Result<(), ModelsError> {
    let marker = folder.join(".complete");
    if marker.exists() {
        return Ok(());
    }
    let get = |name: &str| client.file(id, repository, name, folder, progress);
    let refuse = |problem: String| ModelsError::Hub { url: client.page(id), problem };
    for name in files::small(repository).map_err(refuse)? {
        get(name)?;
    }
    for name in files::weights(repository, folder).map_err(refuse)? {
        get(&name)?;
    }
    std::fs::write(&marker, "").map_err(ModelsError::cache(&marker))
}
