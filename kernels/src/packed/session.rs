//! One device's use of the cache: it reads what is there, and what it had to pack is written afterwards.

use super::file::{self, Packed, Reader, Run};
use super::{Key, PackedCache, Writing, evict};
use crate::device::{PartShape, WeightShape};
use parking_lot::Mutex;
use std::fs::File;
use std::time::{Duration, Instant};

const POLL: Duration = Duration::from_millis(20);

/// The file of a key, and the right to write it.
pub(crate) struct Session {
    cache: PackedCache,
    key: Key,
    reader: Option<Reader>,
    /// Locked until it is dropped: nobody else writes the key's file.
    lock: Mutex<Option<File>>,
}

impl Session {
    /// Opens the key's file. If there is none and another process is writing it, this waits for it.
    pub(crate) fn begin(cache: PackedCache, key: Key) -> Self {
        let mut session = Self { reader: None, lock: Mutex::new(None), cache, key };
        let unusable = session.open();
        if session.reader.is_none() {
            session.wait(unusable);
        }
        session
    }

    /// Opens the file, if it is there. True if it is, and cannot be used.
    fn open(&mut self) -> bool {
        match Reader::open(&self.cache.folder, &self.key) {
            Ok(reader) => self.reader = reader,
            Err(error) => {
                tracing::warn!(%error, "packed weights cannot be used: they are packed again");
                return true;
            }
        }
        false
    }

    /// Takes the lock. What another process wrote meanwhile is used instead.
    fn wait(&mut self, unusable: bool) {
        let (begin, mut waited) = (Instant::now(), false);
        while begin.elapsed() <= self.cache.wait_max {
            match self.cache.folder.lock(&self.key.lock_name()) {
                Ok(Some(lock)) => {
                    if waited || !unusable {
                        self.open();
                    }
                    *self.lock.lock() = self.reader.is_none().then_some(lock);
                    return;
                }
                Ok(None) => waited = true,
                Err(error) => {
                    tracing::warn!(%error, "packed weights cannot be kept");
                    return;
                }
            }
            std::thread::sleep(POLL);
        }
        tracing::info!(waited = ?begin.elapsed(), "another process is still packing these weights: both pack");
    }

    /// The parts of a weight as they were stored, if it can be read.
    pub(crate) fn parts(&self, shape: &WeightShape<'_>) -> Option<&[PartShape]> {
        self.reader.as_ref()?.parts(shape)
    }

    /// Reads a weight. If that fails, `into` is undefined and the weight has to be packed.
    pub(crate) fn read(&self, name: &str, into: Vec<&mut [u8]>, run: Run<'_>) -> bool {
        let Some(reader) = &self.reader else { return false };
        let read = reader.read(name, into, run);
        if let Err(problem) = read {
            let file = self.cache.folder.path().join(self.key.file_name());
            tracing::warn!(weight = name, file = %file.display(), problem, "a packed weight is damaged: it is packed again");
        }
        read.is_ok()
    }

    /// Nothing was packed: the lock is not needed.
    pub(crate) fn unlock(&self) {
        *self.lock.lock() = None;
    }

    /// Counts a write that is about to begin.
    pub(crate) fn writing(&self) -> Writing {
        self.cache.writing()
    }

    /// Writes the key's file, unless another process does.
    pub(crate) fn save(&self, weights: &[Packed<'_>], _: Writing) {
        let lock = match self.lock.lock().take() {
            Some(lock) => lock,
            None => match self.cache.folder.lock(&self.key.lock_name()) {
                Ok(Some(lock)) => lock,
                Ok(None) => return,
                Err(error) => return tracing::warn!(%error, "packed weights cannot be kept"),
            },
        };
        let (folder, name, begin) = (&self.cache.folder, self.key.file_name(), Instant::now());
        let bytes = file::size(&self.key, weights);
        let kept = evict::make_room(folder, bytes, self.cache.bytes_max, &name).and_then(|room| match room {
            true => file::write(folder, &self.key, weights).map(|()| true),
            false => Ok(false),
        });
        match kept {
            Ok(true) => tracing::info!(file = name, bytes, took = ?begin.elapsed(), "keeps packed weights"),
            Ok(false) => tracing::warn!(
                bytes,
                bytes_max = self.cache.bytes_max,
                "packed weights are not kept: there is no room for them (engine.packed_cache.bytes_max)"
            ),
            Err(error) => tracing::warn!(%error, "packed weights cannot be kept"),
        }
        drop(lock);
    }
}
