//! The cache of packed weights that the settings name.

use crate::settings::PackedCacheSettings;
use baton_engine::formats::{KnownFingerprints, ModelSource};
use baton_kernels::packed::{PackedCache, PrivateFolder, WAIT_MAX};
use baton_node::environment;
use baton_types::Digest;
use std::path::PathBuf;

/// Where the packed weights of one model are kept.
pub(crate) struct Kept {
    pub(crate) cache: PackedCache,
    pub(crate) model: Digest,
}

/// `None` if nothing is kept: by configuration, of a model that is in no files, or because the folder cannot be used. The last is no reason not to
/// start.
pub(crate) fn kept(settings: &PackedCacheSettings, source: &dyn ModelSource) -> Option<Kept> {
    if settings.bytes_max.0 == 0 {
        return None;
    }
    let Some(dir) = folder(settings) else {
        tracing::info!("packed weights are not kept: there is no home folder (engine.packed_cache.dir)");
        return None;
    };
    match PrivateFolder::open(&dir) {
        Ok(folder) => {
            let model = source.known_fingerprint(&KnownFingerprints::new(folder.clone()))?;
            Some(Kept { cache: PackedCache::new(folder, settings.bytes_max.0, WAIT_MAX), model })
        }
        Err(error) => {
            tracing::warn!(%error, "packed weights are not kept (engine.packed_cache.dir)");
            None
        }
    }
}

fn folder(settings: &PackedCacheSettings) -> Option<PathBuf> {
    let configured = Some(&settings.dir).filter(|dir| !dir.as_os_str().is_empty()).cloned();
    configured.or_else(|| Some(environment::cache_home()?.join("baton/packed")))
}
