//! The file of keys, read at start and then at an interval. Orchestrators replace the file under the same name, so its
//! content is compared, not its modification time. It is parsed only if the content changed.

use super::keys::{Hash, Keys, hash};
use super::{KeyLimits, KeysError};
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

/// The result of the last read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Keys(Hash),
    Wrong(Hash),
    Unreadable(io::ErrorKind),
}

/// The file of keys, and what the last read of it gave.
#[derive(Debug)]
pub(super) struct KeysFile {
    path: PathBuf,
    /// Limits of keys for which the file sets none.
    limits: KeyLimits,
    seen: Seen,
    metrics: AuthMetrics,
    /// A slow read that has not finished; there is never a second one at the same time.
    reading: Option<JoinHandle<io::Result<Vec<u8>>>>,
}

impl KeysFile {
    /// Reads the file for the first time.
    pub(super) async fn open(
        path: PathBuf,
        limits: KeyLimits,
        metrics: AuthMetrics,
    ) -> Result<(Self, Keys), KeysError> {
        let (seen, reading) = (Seen::Unreadable(io::ErrorKind::NotFound), None);
        let mut file = Self { path, limits, seen, metrics, reading };
        let read = file.bytes(START_MAX).await;
        let bytes = read.map_err(|source| KeysError::Read { path: file.path.clone(), source })?;
        let keys = file.parse(&bytes)?;
        file.seen = Seen::Keys(hash(&bytes));
        file.metrics.keys(keys.len());
        Ok((file, keys))
    }

    /// Applies the keys of the file whenever it changes, until `stop` is cancelled. A file that is not valid changes
    /// nothing.
    pub(super) async fn follow(mut self, keys: Arc<ArcSwap<Keys>>, every: Duration, stop: CancellationToken) {
        let reread = async {
            loop {
                sleep(every).await;
                match self.look(every).await {
                    Ok(None) => {}
                    Ok(Some(found)) => {
                        tracing::info!(keys = found.len(), "takes the keys file's new keys");
                        self.metrics.keys(found.len());
                        keys.store(Arc::new(found));
                    }
                    Err(news) => {
                        self.metrics.file_error();
                        if let Some(error) = news {
                            let source = std::error::Error::source(&error).map(ToString::to_string);
                            tracing::warn!(%error, source, "keeps the current keys");
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

    /// The keys of the file, or what is wrong with it. `None` if the content is that of the last read: then nothing was
    /// parsed.
    async fn look(&mut self, within: Duration) -> Result<Option<Keys>, Option<KeysError>> {
        let bytes = match self.bytes(within).await {
            Ok(bytes) => bytes,
            Err(source) => {
                let seen = Seen::Unreadable(source.kind());
                let is_news = std::mem::replace(&mut self.seen, seen) != seen;
                return Err(is_news.then(|| KeysError::Read { path: self.path.clone(), source }));
            }
        };
        let hash = hash(&bytes);
        if self.seen == Seen::Keys(hash) {
            return Ok(None);
        }
        if self.seen == Seen::Wrong(hash) {
            return Err(None);
        }
        let keys = self.parse(&bytes);
        self.seen = if keys.is_ok() { Seen::Keys(hash) } else { Seen::Wrong(hash) };
        keys.map(Some).map_err(Some)
    }

    async fn bytes(&mut self, within: Duration) -> io::Result<Vec<u8>> {
        let path = self.path.clone();
        let reading = self.reading.get_or_insert_with(|| spawn_blocking(move || content(&path)));
        match timeout(within, reading).await {
            Ok(read) => {
                self.reading = None;
                read.unwrap_or_else(|panic| Err(io::Error::other(panic)))
            }
            Err(_) => Err(io::Error::new(io::ErrorKind::TimedOut, format!("nothing was read within {within:?}"))),
        }
    }

    fn parse(&self, bytes: &[u8]) -> Result<Keys, KeysError> {
        let path = self.path.clone();
        if bytes.len() as u64 > FILE_BYTES_MAX {
            return Err(KeysError::TooLarge { path });
        }
        Keys::parse(bytes, self.limits).map_err(|problem| KeysError::Wrong { path, problem })
    }
}

/// Longest wait for the first read.
const START_MAX: Duration = Duration::from_secs(30);

/// The file's bytes; at most one byte more than the limit.
fn content(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;
    use std::os::unix::fs::symlink;

    const SOON: Duration = Duration::from_secs(20);

    #[tokio::test]
    async fn what_did_not_change_is_not_parsed_again() {
        let folder = tempfile::tempdir().unwrap();
        let at = |name: &str| folder.path().join(name);
        let key = |name: &str| format!("{} {name}\n", hex::encode(hash(name.as_bytes())));
        // As Kubernetes does: keys -> ..data/keys, ..data -> the newest of folders, swapped by renaming the link.
        let swap = |version: &str, text: &str| {
            std::fs::create_dir(at(version)).unwrap();
            std::fs::write(at(version).join("keys"), text).unwrap();
            symlink(version, at("..new")).unwrap();
            std::fs::rename(at("..new"), at("..data")).unwrap();
        };
        swap("1", &key("alice"));
        symlink("..data/keys", at("keys")).unwrap();
        let metrics = AuthMetrics::register(&mut Registry::default());
        let (mut file, keys) = KeysFile::open(at("keys"), KeyLimits::NONE, metrics).await.unwrap();
        assert!(keys.caller(b"alice").is_some());
        assert!(matches!(file.look(SOON).await, Ok(None)));
        swap("2", &key("alice"));
        assert!(matches!(file.look(SOON).await, Ok(None)), "another file of the same content");
        // Of the same length, and as old as the file before it.
        let old = std::fs::metadata(at("keys")).unwrap().modified().unwrap();
        swap("3", &key("carol"));
        File::options().write(true).open(at("keys")).unwrap().set_modified(old).unwrap();
        let found = file.look(SOON).await.unwrap().expect("other keys");
        assert!(found.caller(b"carol").is_some() && found.caller(b"alice").is_none());

        swap("4", "wrong\n");
        assert!(matches!(file.look(SOON).await, Err(Some(KeysError::Wrong { .. }))));
        assert!(matches!(file.look(SOON).await, Err(None)), "told once");
        std::fs::remove_file(at("keys")).unwrap();
        assert!(matches!(file.look(SOON).await, Err(Some(KeysError::Read { .. }))));
        assert!(matches!(file.look(SOON).await, Err(None)));
        symlink("..data/keys", at("keys")).unwrap();
        assert!(
            matches!(file.look(SOON).await, Err(Some(KeysError::Wrong { .. }))),
            "wrong in another way than before"
        );
    }
}
