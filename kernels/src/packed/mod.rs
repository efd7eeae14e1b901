//! Packed weights on disk, so that a device packs those of a model once.
//!
//! A file holds the packed weights of one model in one packing. Its name is the digest of a `Key`: the model's fingerprint, the numerics
//! class, the revisions of kernels and packing, and the layout that the instruction set wants. It lies in a [`PrivateFolder`], comes there by
//! renaming a complete file, and each weight has a digest, which is compared whenever the weight is read. What is damaged is packed again. A
//! disk that cannot be written to costs time and nothing else.
//!
//! This module knows files and bytes, and neither models nor kernels: [`crate::host`] fills it.

mod evict;
mod file;
mod folder;
mod session;
#[cfg(test)]
mod tests;

pub(crate) use file::Packed;
pub use folder::{Listed, PrivateFolder, Replacement};
pub(crate) use session::Session;

use crate::numerics::Numerics;
use baton_types::Digest;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Ending of files of packed weights.
const PACKED: &str = "packed";
/// Ending of the file that whoever writes them has locked.
const LOCK: &str = "lock";

/// Longest wait for another process that packs the same weights. Packing alone takes seconds; those of a large model take longer than
/// that, and then both processes pack.
pub const WAIT_MAX: Duration = Duration::from_secs(10);

/// Why packed weights cannot be kept or used. Never a reason to fail a start.
#[derive(Debug, thiserror::Error)]
pub enum CacheError {
    /// A system call failed.
    #[error("{path}: {source}")]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What the system said.
        #[source]
        source: io::Error,
    },
    /// A file or folder that is not used.
    #[error("{path}: {what}")]
    Refused {
        /// The file or folder.
        path: PathBuf,
        /// What is wrong with it.
        what: String,
    },
}

impl CacheError {
    pub(crate) fn io(path: &Path) -> impl Fn(io::Error) -> Self + use<> {
        let path = path.to_owned();
        move |source| Self::Io { path: path.clone(), source }
    }

    fn refused(path: &Path, what: &str) -> Self {
        Self::Refused { path: path.to_owned(), what: what.to_owned() }
    }
}

/// What packed weights depend on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Key {
    /// Fingerprint of the model.
    pub(crate) model: Digest,
    pub(crate) numerics: Numerics,
    /// Revision of the canonical orders.
    pub(crate) revision: u32,
    /// Name and revision of the layout.
    pub(crate) packing: String,
}

impl Key {
    /// Lines with all of it.
    fn text(&self) -> String {
        let Self { model, numerics, revision, packing } = self;
        let weights = numerics.weights();
        format!("model {model}\nclass {numerics} {weights}\nrevision {revision}\npacking {packing}\n")
    }

    fn file_name(&self) -> String {
        format!("{}.{PACKED}", self.stem())
    }

    fn lock_name(&self) -> String {
        format!("{}.{LOCK}", self.stem())
    }

    fn stem(&self) -> String {
        blake3::hash(self.text().as_bytes()).to_hex()[..32].to_owned()
    }
}

/// A folder of packed weights with a bound. Clones are the same cache.
#[derive(Clone, Debug)]
pub struct PackedCache {
    folder: Arc<PrivateFolder>,
    bytes_max: u64,
    wait_max: Duration,
    /// Files that threads of this process are writing.
    writes: Arc<(Mutex<usize>, Condvar)>,
}

impl PackedCache {
    /// Keeps packed weights of at most `bytes_max` in `folder`. Waits for another process that packs the same at most for `wait_max`, usually
    /// [`WAIT_MAX`].
    pub fn new(folder: PrivateFolder, bytes_max: u64, wait_max: Duration) -> Self {
        Self { folder: Arc::new(folder), bytes_max, wait_max, writes: Arc::default() }
    }

    /// The folder.
    pub fn folder(&self) -> &PrivateFolder {
        &self.folder
    }

    /// Waits until no thread of this process writes; false if `deadline` came first.
    pub fn settle(&self, deadline: Instant) -> bool {
        let (count, changed) = &*self.writes;
        let mut count = count.lock();
        while *count > 0 {
            if changed.wait_until(&mut count, deadline).timed_out() {
                return *count == 0;
            }
        }
        true
    }

    /// Counts a write until it is dropped.
    fn writing(&self) -> Writing {
        *self.writes.0.lock() += 1;
        Writing(self.writes.clone())
    }
}

/// A write under way.
pub(crate) struct Writing(Arc<(Mutex<usize>, Condvar)>);

impl Drop for Writing {
    fn drop(&mut self) {
        *self.0.0.lock() -= 1;
        self.0.1.notify_all();
    }
}
