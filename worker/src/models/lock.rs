//! The wait for a lock between processes, so that two do not download the same model into the same place.

use super::{ModelsError, Progress};
use baton_node::private::FileLock;
use std::path::Path;
use std::time::{Duration, Instant};

/// Longest wait for another process's download.
const WAIT_MAX: Duration = Duration::from_secs(2 * 3600);
const POLL: Duration = Duration::from_millis(200);

/// Takes the lock of `folder`, which must exist; waits while another process has it.
pub(super) fn lock(folder: &Path, progress: Progress<'_>) -> Result<FileLock, ModelsError> {
    let path = folder.join(".lock");
    let started = Instant::now();
    loop {
        match FileLock::try_take(&path).map_err(ModelsError::cache(&path))? {
            Some(lock) => return Ok(lock),
            None if started.elapsed() > WAIT_MAX => {
                return Err(ModelsError::Locked { path, waited_s: WAIT_MAX.as_secs() });
            }
            None => {
                progress("waiting for another process's download", 0.0);
                std::thread::sleep(POLL);
            }
        }
    }
}
