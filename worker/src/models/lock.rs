//! A lock file between processes, so that two do not download the same model into the same place.

use super::{ModelsError, Progress};
use std::fs::{File, TryLockError};
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for another process's download.
const WAIT_MAX: Duration = Duration::from_secs(2 * 3600);
const POLL: Duration = Duration::from_millis(200);

/// Holds the lock until dropped, or until the process dies.
#[derive(Debug)]
pub(super) struct DirLock(#[allow(dead_code, reason = "closing the file releases the lock")] File);

impl DirLock {
    /// Takes the lock of `folder`, which must exist; waits while another process has it.
    pub(super) fn take(folder: &Path, progress: Progress<'_>) -> Result<Self, ModelsError> {
        let path = folder.join(".lock");
        let file = File::create(&path).map_err(ModelsError::cache(&path))?;
        let started = Instant::now();
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(Self(file)),
                Err(TryLockError::WouldBlock) if started.elapsed() > WAIT_MAX => {
                    return Err(ModelsError::Locked { path, waited_s: WAIT_MAX.as_secs() });
                }
                Err(TryLockError::WouldBlock) => {
                    progress("waiting for another process's download", 0.0);
                    std::thread::sleep(POLL);
                }
                Err(TryLockError::Error(source)) => return Err(ModelsError::Cache { path, source }),
            }
        }
    }
}
