//! Read-only memory maps of weight files: the one place under `formats` where `unsafe` is allowed.
#![allow(unsafe_code)]

use super::{KnownFingerprints, WeightsError};
use baton_types::Digest;
use memmap2::{Mmap, UncheckedAdvice};
use std::fs::{File, OpenOptions};
use std::ops::Range;
use std::path::Path;

/// Bytes that are digested before their pages are given back, so that no whole file is ever resident.
const WINDOW: usize = 64 << 20;

/// Opens a regular file, and refuses what is none. Never waits: opening a FIFO would wait for a writer otherwise, and a file may become one
/// between a look at it and the opening.
pub(crate) fn open_regular(path: &Path) -> Result<File, WeightsError> {
    let shown = path.display().to_string();
    let io = |source| WeightsError::Io { path: shown.clone(), source };
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(&mut options, libc::O_NONBLOCK);
    let file = options.open(path).map_err(io)?;
    if !file.metadata().map_err(io)?.is_file() {
        return Err(WeightsError::damaged(&shown, "not a regular file"));
    }
    Ok(file)
}

/// A whole file, mapped read-only, with the path that error messages name.
#[derive(Debug)]
pub(crate) struct MappedFile {
    path: String,
    file: File,
    map: Option<Mmap>,
}

impl MappedFile {
    /// Maps `path`. An empty file is an empty slice.
    pub(crate) fn open(path: &Path) -> Result<Self, WeightsError> {
        let shown = path.display().to_string();
        let io = |source| WeightsError::Io { path: shown.clone(), source };
        let file = open_regular(path)?;
        if file.metadata().map_err(io)?.len() == 0 {
            return Ok(Self { path: shown, file, map: None });
        }
        // SAFETY: the map is private and read-only, and nothing in this process writes to the file. That no other process
        // rewrites or cuts it while it is mapped is the contract of every model folder: downloads replace files by rename,
        // which leaves the mapped inode whole. What is read is bytes only, valid for any bit pattern.
        let map = unsafe { Mmap::map(&file) }.map_err(io)?;
        Ok(Self { path: shown, file, map: Some(map) })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        self.map.as_deref().unwrap_or(&[])
    }

    /// The path as given, for messages.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// BLAKE3 of the content, as `b3sum` prints; on several threads, because files can have hundreds of gigabytes.
    pub(crate) fn digest(&self) -> Digest {
        let mut hasher = blake3::Hasher::new();
        let mut at = 0;
        for window in self.bytes().chunks(WINDOW) {
            hasher.update_rayon(window);
            self.release(at..at + window.len());
            at += window.len();
        }
        Digest(*hasher.finalize().as_bytes())
    }

    /// As [`MappedFile::digest`], without reading a file whose digest is known.
    pub(crate) fn known_digest(&self, known: &KnownFingerprints) -> Digest {
        known.digest(&self.file, || self.digest())
    }

    /// Gives the pages of a range back to the system; what is read again comes from the file again.
    pub(crate) fn release(&self, range: Range<usize>) {
        if let Some(map) = &self.map {
            // SAFETY: nothing was ever written to this map, so its pages are the file's, before and after. If the system refuses, they
            // stay.
            unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, range.start, range.len()) }.ok();
        }
    }
}
