//! The adapters that this worker can load: those of the settings, and those that are in its folder now.

use super::settings::LoraSettings;
use crate::error::WorkerError;
use baton_engine::families::DecoderSpec;
use baton_engine::formats::{AdapterLimits, WeightsError, read_peft};
use baton_kernels::adapter::PackedAdapter;
use baton_kernels::device::DeviceError;
use baton_types::{AdapterCard, Digest};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Files whose change means another adapter.
const FILES: [&str; 2] = ["adapter_config.json", "adapter_model.safetensors"];

/// Why an adapter is not served.
#[derive(Debug, thiserror::Error)]
pub enum AdapterError {
    /// Its files cannot be read, or do not fit the model.
    #[error(transparent)]
    Files(#[from] WeightsError),
    /// It does not fit the device.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The files hold another adapter than the one that was announced.
    #[error("{} has changed since it was read; it is read again soon", .0.display())]
    Changed(PathBuf),
}

/// How an adapter is read: for which model, and within which limits.
#[derive(Clone, Debug)]
pub(super) struct Reader {
    pub(super) spec: Arc<DecoderSpec>,
    pub(super) limits: AdapterLimits,
    /// Only one adapter is read at a time: what that takes is bounded by the largest one. Between two of a folder, loads have their turn.
    pub(super) one: Arc<Mutex<()>>,
}

impl Reader {
    /// Reads, checks and packs an adapter. Takes time and memory with its size; blocks the thread.
    pub(super) fn read(&self, folder: &Path) -> Result<PackedAdapter, AdapterError> {
        let _one = self.one.lock();
        Ok(read_peft(folder, &self.spec, self.limits)?.pack()?)
    }

    /// Reads an adapter that was announced with this digest.
    pub(super) fn read_again(&self, folder: &Path, digest: Digest) -> Result<PackedAdapter, AdapterError> {
        let adapter = self.read(folder)?;
        if adapter.digest() != digest { Err(AdapterError::Changed(folder.to_owned())) } else { Ok(adapter) }
    }
}

/// An adapter that was read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct KnownAdapter {
    pub(super) digest: Digest,
    pub(super) folder: PathBuf,
    /// Its memory once it is loaded.
    pub(super) bytes: u64,
}

/// Size, inode and times of an adapter's files; `None` for one that is not there.
type Stamp = [Option<(u64, u64, i64, i64, i64, i64)>; 2];

fn stamp(folder: &Path) -> Stamp {
    FILES.map(|file| {
        let of = fs::metadata(folder.join(file)).ok()?;
        Some((of.size(), of.ino(), of.mtime(), of.mtime_nsec(), of.ctime(), of.ctime_nsec()))
    })
}

/// What was read of one name, when its files had this stamp.
#[derive(Clone, Debug)]
struct Read {
    stamp: Stamp,
    /// `None` where it is refused.
    adapter: Option<KnownAdapter>,
}

/// All adapters by name.
#[derive(Clone, Debug)]
pub(super) struct Known {
    modules: Vec<(String, PathBuf)>,
    folder: Option<PathBuf>,
    /// Names of the model, which no adapter may have.
    reserved: Vec<String>,
    read: BTreeMap<String, Read>,
    /// Folders that were refused for their name, so that this is logged once.
    unnamed: Vec<String>,
}

impl Known {
    /// Reads all adapters of the settings.
    ///
    /// # Errors
    /// If a module cannot be read or has a name of the model, or the folder cannot be listed. What is wrong in the folder is only logged.
    pub(super) fn start(settings: &LoraSettings, reserved: Vec<String>, reader: &Reader) -> Result<Self, WorkerError> {
        let modules: Vec<_> = settings.named().map(|(name, path)| (name.to_owned(), path.to_owned())).collect();
        if let Some((name, _)) = modules.iter().find(|(name, _)| reserved.contains(name)) {
            return Err(WorkerError::AdapterName { name: name.clone() });
        }
        let mut read = BTreeMap::new();
        for (name, folder) in &modules {
            let stamp = stamp(folder);
            let adapter = reader.read(folder).map_err(|source| WorkerError::Adapter { name: name.clone(), source })?;
            let adapter =
                Some(KnownAdapter { digest: adapter.digest(), bytes: adapter.bytes(), folder: folder.clone() });
            read.insert(name.clone(), Read { stamp, adapter });
        }
        let folder = settings.folder.clone();
        let mut known = Self { modules, folder, reserved, read, unnamed: Vec::new() };
        known.read_again(reader).map_err(|source| WorkerError::AdapterFolder {
            folder: known.folder.clone().unwrap_or_default(),
            source,
        })?;
        Ok(known)
    }

    /// Reads what has changed: new folders, changed ones, and those that are gone.
    ///
    /// # Errors
    /// If the folder cannot be listed. Then everything stays as it is.
    pub(super) fn read_again(&mut self, reader: &Reader) -> io::Result<()> {
        let mut wanted: BTreeMap<String, PathBuf> = self.modules.iter().cloned().collect();
        for (name, path) in self.folder.as_deref().map(folders).transpose()?.unwrap_or_default() {
            if wanted.len() >= AdapterCard::COUNT_MAX || !AdapterCard::is_name(&name) || self.reserved.contains(&name) {
                if !self.unnamed.contains(&name) && self.unnamed.len() < AdapterCard::COUNT_MAX {
                    tracing::warn!(
                        name,
                        "does not serve an adapter: its name is the model's or has spaces, or there are more than 4096"
                    );
                    self.unnamed.push(name);
                }
                continue;
            }
            wanted.entry(name).or_insert(path);
        }
        for name in self.read.keys().filter(|name| !wanted.contains_key(*name)) {
            tracing::info!(name, "serves an adapter no more: its folder is gone");
        }
        self.read.retain(|name, _| wanted.contains_key(name));
        for (name, folder) in wanted {
            let stamp = stamp(&folder);
            if self.read.get(&name).is_some_and(|read| read.stamp == stamp) {
                continue;
            }
            let adapter = match reader.read(&folder) {
                Ok(adapter) => {
                    tracing::info!(name, digest = %adapter.digest(), "serves an adapter");
                    Some(KnownAdapter { digest: adapter.digest(), bytes: adapter.bytes(), folder })
                }
                Err(error) => {
                    tracing::warn!(name, %error, "does not serve an adapter");
                    None
                }
            };
            self.read.insert(name, Read { stamp, adapter });
        }
        Ok(())
    }

    /// The adapters for routers, by name.
    pub(super) fn cards(&self) -> Arc<[AdapterCard]> {
        let card = |(name, read): (&String, &Read)| {
            Some(AdapterCard { name: name.clone(), digest: read.adapter.as_ref()?.digest })
        };
        self.read.iter().filter_map(card).collect()
    }

    /// An adapter of this digest.
    pub(super) fn find(&self, digest: &Digest) -> Option<&KnownAdapter> {
        self.read.values().filter_map(|read| read.adapter.as_ref()).find(|adapter| adapter.digest == *digest)
    }
}

/// Name and path of each folder in `folder`; hidden ones are left out, so that one can be filled and then renamed.
fn folders(folder: &Path) -> io::Result<Vec<(String, PathBuf)>> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let Some(name) = path.file_name().map(|name| name.to_string_lossy().into_owned()) else { continue };
        if !name.starts_with('.') && path.is_dir() {
            found.push((name, path));
        }
    }
    found.sort_unstable();
    Ok(found)
}
