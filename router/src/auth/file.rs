//! The file of keys: read at start, and again and again. Orchestrators swap it under its name, so its content is compared, not its times.

use super::keys::{Hash, Keys, hash};
use super::{KeysError, keys::Problem};
use crate::metrics::AuthMetrics;
use arc_swap::ArcSwap;
use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::task::{JoinHandle, spawn_blocking};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

/// Largest file, in bytes: a Kubernetes Secret holds no more.
pub(super) const FILE_BYTES_MAX: u64 = 1 << 20;

/// What was found when the file was last looked at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Content(Hash),
    Unreadable(io::ErrorKind),
}

/// Reads one file.
#[derive(Debug)]
pub(super) struct KeysFile {
    path: PathBuf,
    seen: Seen,
    metrics: AuthMetrics,
    /// A read that takes long; there is never a second one beside it.
    reading: Option<JoinHandle<io::Result<Vec<u8>>>>,
}

impl KeysFile {
    /// Reads the file for the first time.
    pub(super) async fn open(path: PathBuf, metrics: AuthMetrics) -> Result<(Self, Keys), KeysError> {
        let (seen, reading) = (Seen::Unreadable(io::ErrorKind::NotFound), None);
        let mut file = Self { path, seen, metrics, reading };
        let (seen, keys) = file.read(START_MAX).await;
        let keys = keys?;
        file.seen = seen;
        file.metrics.keys(keys.len());
        Ok((file, keys))
    }

    /// Puts the keys of the file in force whenever it changes, until `stop` is cancelled. A file that is wrong changes nothing.
    pub(super) async fn follow(mut self, keys: Arc<ArcSwap<Keys>>, every: Duration, stop: CancellationToken) {
        let reread = async {
            loop {
                sleep(every).await;
                let (seen, found) = self.read(every).await;
                let is_news = std::mem::replace(&mut self.seen, seen) != seen;
                match found {
                    Ok(found) if is_news => {
                        tracing::info!(keys = found.len(), "takes the keys file's new keys");
                        self.metrics.keys(found.len());
                        keys.store(Arc::new(found));
                    }
                    Ok(_) => {}
                    Err(error) => {
                        self.metrics.file_error();
                        if is_news {
                            let source = std::error::Error::source(&error).map(ToString::to_string);
                            tracing::warn!(%error, source, "goes on with the keys it has");
                        }
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
            () = reread => {}
        }
    }

    async fn read(&mut self, within: Duration) -> (Seen, Result<Keys, KeysError>) {
        let path = self.path.clone();
        let reading = self.reading.get_or_insert_with(|| spawn_blocking(move || content(&path)));
        let late = || io::Error::new(io::ErrorKind::TimedOut, format!("nothing was read within {within:?}"));
        let read = match timeout(within, reading).await {
            Ok(read) => {
                self.reading = None;
                read.unwrap_or_else(|panic| Err(io::Error::other(panic)))
            }
            Err(_) => Err(late()),
        };
        let path = self.path.clone();
        match read {
            Err(source) => (Seen::Unreadable(source.kind()), Err(KeysError::Read { path, source })),
            Ok(bytes) => {
                let seen = Seen::Content(hash(&bytes));
                let wrong = |problem: Problem| KeysError::Wrong { path: self.path.clone(), problem };
                let is_large = bytes.len() as u64 > FILE_BYTES_MAX;
                let keys =
                    if is_large { Err(KeysError::TooLarge { path }) } else { Keys::parse(&bytes).map_err(wrong) };
                (seen, keys)
            }
        }
    }
}

/// Longest first read.
const START_MAX: Duration = Duration::from_secs(30);

/// The file's bytes, at most one more than it may have.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}
