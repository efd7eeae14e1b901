//! Files of this user alone: folders that nobody else may enter, files that are replaced whole, locks between processes.

use std::ffi::OsString;
use std::fs::{DirBuilder, File, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

/// Creates a folder, and those above it, with mode 0700; one that exists stays as it is.
pub fn make_folder(path: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(path)
}

/// Gives a file other contents, which only its owner may read. Whoever opens it gets the former or the new ones, whole,
/// also where several processes do this at the same time.
pub fn replace_file(path: &Path, contents: &[u8]) -> io::Result<()> {
    let folder = match path.parent() {
        Some(folder) if !folder.as_os_str().is_empty() => folder,
        _ => Path::new("."),
    };
    let mut prefix = OsString::from(".");
    prefix.push(path.file_name().unwrap_or_default());
    prefix.push(".");
    // The rest of its name is random, and its mode 0600. If it does not take the other's place, it is removed.
    let mut unfinished = tempfile::Builder::new().prefix(&prefix).tempfile_in(folder)?;
    unfinished.write_all(contents)?;
    unfinished.as_file().sync_all()?;
    unfinished.persist(path)?;
    Ok(())
}

/// A lock between processes. It is held until it is dropped, or until its process ends.
#[derive(Debug)]
pub struct FileLock {
    _file: File,
}

impl FileLock {
    /// Takes the lock of a file, which is created if it is missing; `None` while another process has it.
    pub fn try_take(path: &Path) -> io::Result<Option<Self>> {
        Self::of(File::create(path)?)
    }

    /// The same of a file that must exist.
    pub fn try_take_existing(path: &Path) -> io::Result<Option<Self>> {
        Self::of(File::open(path)?)
    }

    fn of(file: File) -> io::Result<Option<Self>> {
        match file.try_lock() {
            Ok(()) => Ok(Some(Self { _file: file })),
            Err(TryLockError::WouldBlock) => Ok(None),
            Err(TryLockError::Error(error)) => Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn what_is_written_is_its_owners_and_whole() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("a/b");
        make_folder(&folder).unwrap();
        make_folder(&folder).unwrap();
        let (file, mode) = (folder.join("file"), |path: &Path| path.metadata().unwrap().permissions().mode() & 0o777);
        for contents in [&b"long contents"[..], b"short"] {
            replace_file(&file, contents).unwrap();
            assert_eq!(std::fs::read(&file).unwrap(), contents);
        }
        assert_eq!((mode(&folder), mode(&file)), (0o700, 0o600));
        std::thread::scope(|scope| {
            for byte in 0..4 {
                let file = &file;
                scope.spawn(move || (0..50).for_each(|_| replace_file(file, &[byte; 1000]).unwrap()));
            }
            for _ in 0..200 {
                let found = std::fs::read(&file).unwrap();
                assert!(found == b"short" || found == [found[0]; 1000], "{} bytes", found.len());
            }
        });
        // A folder takes no file's place.
        std::fs::create_dir_all(folder.join("folder/below")).unwrap();
        replace_file(&folder.join("folder"), b"x").unwrap_err();
        assert_eq!(std::fs::read_dir(&folder).unwrap().count(), 2, "nothing is left beside them");
    }

    #[test]
    fn a_lock_is_held_until_it_is_dropped() {
        let root = tempfile::tempdir().unwrap();
        let path = root.path().join("lock");
        assert_eq!(FileLock::try_take_existing(&path).unwrap_err().kind(), io::ErrorKind::NotFound);
        let held = FileLock::try_take(&path).unwrap().unwrap();
        assert!(FileLock::try_take(&path).unwrap().is_none() && FileLock::try_take_existing(&path).unwrap().is_none());
        drop(held);
        assert!(FileLock::try_take_existing(&path).unwrap().is_some());
    }
}
