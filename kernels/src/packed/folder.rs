//! A folder of this user alone: what lies in it was written by this user, or is not read.

use super::CacheError;
use std::fs::{DirBuilder, File, Metadata, OpenOptions, TryLockError};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::SystemTime;

/// Ending of files that are not complete. Whoever writes one holds its lock.
const UNFINISHED: &str = "tmp";

/// Permissions of group and others.
const FOREIGN: u32 = 0o077;

/// A file of a folder.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Listed {
    /// Within the folder.
    pub name: String,
    /// Size in bytes.
    pub bytes: u64,
    /// When it was last used: reading sets it too.
    pub used: SystemTime,
}

/// A folder with mode 0700 that belongs to this process's user. Files in it are opened without following links, and only if they belong to
/// this user and nobody else may write to them.
#[derive(Clone, Debug)]
pub struct PrivateFolder {
    path: PathBuf,
}

impl PrivateFolder {
    /// Opens the folder, and creates it with those above it if it is missing.
    pub fn open(path: &Path) -> Result<Self, CacheError> {
        match DirBuilder::new().recursive(true).mode(0o700).create(path) {
            // A read-only disk may hold a folder that was filled before; a link to nowhere is refused below.
            Err(_) if path.symlink_metadata().is_ok() => {}
            made => made.map_err(CacheError::io(path))?,
        }
        let metadata = path.symlink_metadata().map_err(CacheError::io(path))?;
        if !metadata.is_dir() {
            return Err(CacheError::refused(path, "it is no folder, or a symbolic link"));
        }
        check_private(path, &metadata, "others may enter it: its mode should be 0700")?;
        Ok(Self { path: path.to_owned() })
    }

    /// Where it is.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Opens a file to read it; `None` if there is none.
    pub fn read(&self, name: &str) -> Result<Option<File>, CacheError> {
        let path = self.path.join(name);
        match OpenOptions::new().read(true).custom_flags(flags()).open(&path) {
            Ok(file) => check_file(&path, &file).map(|()| Some(file)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(CacheError::Io { path, source: error }),
        }
    }

    /// Locks a file whose contents do not matter, and creates it if it is missing. Only who has it locked may remove it. `None` if another has it
    /// locked, or just removed it.
    pub(super) fn lock(&self, name: &str) -> Result<Option<File>, CacheError> {
        let file = self.lock_file(name)?;
        let locked = lock_named(&file).map_err(CacheError::io(&self.path.join(name)))?;
        Ok(locked.then_some(file))
    }

    /// Opens a file to lock it.
    pub(super) fn lock_file(&self, name: &str) -> Result<File, CacheError> {
        let path = self.path.join(name);
        let mut options = OpenOptions::new();
        let file = options.read(true).append(true).create(true).mode(0o600).custom_flags(flags()).open(&path);
        let file = file.map_err(CacheError::io(&path))?;
        check_file(&path, &file).map(|()| file)
    }

    /// A new file that takes the place of `name` once it is complete.
    pub fn replace(&self, name: &str) -> Result<Replacement<'_>, CacheError> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let unfinished = self.path.join(format!("{name}.{}-{number}.{UNFINISHED}", std::process::id()));
        let mut options = OpenOptions::new();
        let opened =
            options.read(true).write(true).create_new(true).mode(0o600).custom_flags(flags()).open(&unfinished);
        let file = opened.map_err(CacheError::io(&unfinished))?;
        let replacement = Replacement { folder: self, name: name.to_owned(), unfinished, file, done: false };
        // Until then, others may take it for one whose writer is gone: see `remove_unfinished`.
        replacement
            .file
            .try_lock()
            .map_err(|error| CacheError::Io { path: replacement.unfinished.clone(), source: error.into() })?;
        Ok(replacement)
    }

    /// The files of this user, in any order.
    pub fn list(&self) -> Result<Vec<Listed>, CacheError> {
        let mut listed = Vec::new();
        for entry in std::fs::read_dir(&self.path).map_err(CacheError::io(&self.path))? {
            let entry = entry.map_err(CacheError::io(&self.path))?;
            let (Ok(name), Ok(metadata)) = (entry.file_name().into_string(), entry.path().symlink_metadata()) else {
                continue; // No name of ours, or gone meanwhile.
            };
            if let (true, Ok(used)) = (metadata.is_file(), metadata.modified()) {
                listed.push(Listed { name, bytes: metadata.len(), used });
            }
        }
        Ok(listed)
    }

    /// Removes a file; one that is missing is removed already.
    pub fn remove(&self, name: &str) -> Result<(), CacheError> {
        let path = self.path.join(name);
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(CacheError::Io { path, source: error }),
            _ => Ok(()),
        }
    }

    /// Removes what writers left that ended before they were done.
    pub(super) fn remove_unfinished(&self) -> Result<(), CacheError> {
        for listed in self.list()?.iter().filter(|listed| is_unfinished(&listed.name)) {
            let Ok(Some(file)) = self.read(&listed.name) else { continue };
            if file.try_lock().is_ok() {
                self.remove(&listed.name)?;
            }
        }
        Ok(())
    }
}

/// Locks a file, unless another has it locked or it has lost its name: beside such a one, others lock a new file of that name.
pub(super) fn lock_named(file: &File) -> io::Result<bool> {
    match file.try_lock() {
        Ok(()) => Ok(file.metadata()?.nlink() > 0),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error),
    }
}

/// Whether a file of this name is not complete.
pub(super) fn is_unfinished(name: &str) -> bool {
    name.ends_with(&format!(".{UNFINISHED}"))
}

/// Notes that a file was used now. Where that is not possible, it is only evicted sooner.
pub(super) fn touch(file: &File) {
    file.set_modified(SystemTime::now()).ok();
}

/// A file that is being written; dropped before [`Replacement::finish`], it is removed.
#[derive(Debug)]
pub struct Replacement<'a> {
    folder: &'a PrivateFolder,
    name: String,
    unfinished: PathBuf,
    file: File,
    done: bool,
}

impl Replacement<'_> {
    /// The file to write to.
    pub fn file(&mut self) -> &mut File {
        &mut self.file
    }

    /// An error of a system call on this file.
    pub fn failed(&self) -> impl Fn(io::Error) -> CacheError + use<> {
        CacheError::io(&self.unfinished)
    }

    /// Brings the contents to the disk, and only then gives the file its name: whoever opens the name gets all of it.
    pub fn finish(mut self) -> Result<(), CacheError> {
        self.file.sync_all().map_err(self.failed())?;
        let path = self.folder.path.join(&self.name);
        std::fs::rename(&self.unfinished, &path).map_err(CacheError::io(&path))?;
        self.done = true;
        let folder = File::open(&self.folder.path).map_err(CacheError::io(&self.folder.path))?;
        folder.sync_all().map_err(CacheError::io(&self.folder.path))
    }
}

impl Drop for Replacement<'_> {
    fn drop(&mut self) {
        if !self.done {
            std::fs::remove_file(&self.unfinished).ok(); // Else `remove_unfinished` will.
        }
    }
}

/// Links are not followed, and a FIFO is not waited for.
fn flags() -> i32 {
    libc::O_NOFOLLOW | libc::O_NONBLOCK
}

fn check_file(path: &Path, file: &File) -> Result<(), CacheError> {
    let metadata = file.metadata().map_err(CacheError::io(path))?;
    if !metadata.is_file() {
        return Err(CacheError::refused(path, "it is no regular file"));
    }
    check_private(path, &metadata, "others may read or write it: its mode should be 0600")
}

/// Checks that it is this user's, and nobody else's by its mode; `foreign` says what is wrong with a mode that lets others in.
fn check_private(path: &Path, metadata: &Metadata, foreign: &str) -> Result<(), CacheError> {
    let user = rustix::process::geteuid().as_raw();
    if metadata.uid() != user {
        return Err(CacheError::refused(path, &format!("it belongs to user {}, not {user}", metadata.uid())));
    }
    if metadata.mode() & FOREIGN != 0 {
        return Err(CacheError::refused(path, foreign));
    }
    Ok(())
}
