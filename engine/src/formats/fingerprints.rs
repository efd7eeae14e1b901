//! Fingerprints of files that were read before, so that a start does not read the whole model again.
//!
//! A fingerprint is bound to device, inode, size and change time of the file. Nobody but the system sets the change time: whoever replaces a file
//! or writes to it changes at least one of the four. A file that changed moments ago is not remembered, since the next change could get the
//! same time. Files of two read-only images can agree in all four: images have times that were set, and inodes that count from one. So a
//! fingerprint is also bound to pieces of the file, which differ between two models of one shape.

use baton_kernels::packed::{CacheError, PrivateFolder};
use baton_types::Digest;
use std::fs::File;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Ending of the files that hold a fingerprint.
const ENDING: &str = "fingerprint";
/// Fingerprints that are kept; the ones used last.
const COUNT_MAX: usize = 1024;
/// Longest file of one.
const BYTES_MAX: u64 = 4096;
/// File systems count time in steps of up to two seconds.
const STEP: Duration = Duration::from_secs(3);

/// Pieces of a file that a fingerprint is bound to, evenly spread, and the bytes of each.
const PIECES: u64 = 64;
const PIECE_BYTES: u64 = 16 << 10;

/// What a fingerprint is bound to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Identity {
    device: u64,
    inode: u64,
    size: u64,
    /// Change time, in seconds and nanoseconds.
    changed: (i64, i64),
    /// Of the pieces.
    sample: Digest,
}

/// The digest of the pieces of a file of `size` bytes.
fn sample(file: &File, size: u64) -> std::io::Result<Digest> {
    let mut hasher = blake3::Hasher::new();
    let mut piece = [0; PIECE_BYTES as usize];
    let len = PIECE_BYTES.min(size);
    for index in 0..PIECES {
        // In 128 bits, since the product of a size and a number may not fit 64.
        let at = u128::from(size - len) * u128::from(index) / u128::from(PIECES - 1);
        file.read_exact_at(&mut piece[..len as usize], at as u64)?;
        hasher.update(&piece[..len as usize]);
    }
    Ok(Digest(hasher.finalize().into()))
}

impl Identity {
    fn of(file: &File) -> std::io::Result<Self> {
        let metadata = file.metadata()?;
        Ok(Self {
            sample: sample(file, metadata.size())?,
            device: metadata.dev(),
            inode: metadata.ino(),
            size: metadata.size(),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        })
    }

    /// Whether a change now would show as another change time.
    fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let changed = Duration::new(self.changed.0.try_into().unwrap_or(0), self.changed.1.try_into().unwrap_or(0));
        changed + STEP < now
    }

    fn file_name(&self) -> String {
        format!("{:x}-{:x}.{ENDING}", self.device, self.inode)
    }

    fn text(&self, digest: Digest) -> String {
        let Self { device, inode, size, changed: (seconds, nanoseconds), sample } = self;
        let said = format!("{device} {inode} {size} {seconds} {nanoseconds} {sample} {digest}");
        format!("{said} {}\n", blake3::hash(said.as_bytes()).to_hex())
    }
}

/// Remembered fingerprints of files, in a folder of this user alone.
#[derive(Clone, Debug)]
pub struct KnownFingerprints {
    folder: PrivateFolder,
}

impl KnownFingerprints {
    /// Remembers in `folder`.
    pub fn new(folder: PrivateFolder) -> Self {
        Self { folder }
    }

    /// The digest of a file: as it is remembered, or computed and remembered from now on.
    pub(super) fn digest(&self, file: &File, compute: impl FnOnce() -> Digest) -> Digest {
        let before = match Identity::of(file) {
            Ok(identity) => identity,
            Err(_) => return compute(),
        };
        match self.find(&before) {
            Ok(Some(digest)) => return digest,
            Ok(None) => {}
            Err(error) => tracing::warn!(%error, "a remembered fingerprint cannot be used: the file is read again"),
        }
        let settled = before.is_settled();
        let digest = compute();
        if settled
            && Identity::of(file).is_ok_and(|after| after == before)
            && let Err(error) = self.remember(&before, digest)
        {
            tracing::warn!(%error, "a fingerprint cannot be remembered");
        }
        digest
    }

    fn find(&self, identity: &Identity) -> Result<Option<Digest>, CacheError> {
        let Some(file) = self.folder.read(&identity.file_name())? else { return Ok(None) };
        let mut text = String::new();
        // What is no text or cut off is not what was written.
        if file.take(BYTES_MAX).read_to_string(&mut text).is_err() {
            return Ok(None);
        }
        let digest = text.split(' ').nth(6).and_then(Digest::from_hex);
        Ok(digest.filter(|digest| identity.text(*digest) == text))
    }

    fn remember(&self, identity: &Identity, digest: Digest) -> Result<(), CacheError> {
        let mut known = self.folder.list()?;
        known.retain(|file| file.name.ends_with(ENDING));
        known.sort_by_key(|file| std::cmp::Reverse(file.used));
        known.iter().skip(COUNT_MAX - 1).try_for_each(|file| self.folder.remove(&file.name))?;
        let mut replacement = self.folder.replace(&identity.file_name())?;
        let failed = replacement.failed();
        replacement.file().write_all(identity.text(digest).as_bytes()).map_err(failed)?;
        replacement.finish()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::fs::{FileTimes, Permissions};
    use std::os::unix::fs::PermissionsExt as _;
    use std::path::Path;

    struct Setup {
        _root: tempfile::TempDir,
        known: KnownFingerprints,
        model: std::path::PathBuf,
    }

    fn setup() -> Setup {
        let root = tempfile::tempdir().unwrap();
        let known = KnownFingerprints::new(PrivateFolder::open(&root.path().join("cache")).unwrap());
        let model = root.path().join("model");
        std::fs::write(&model, b"weights").unwrap();
        Setup { _root: root, known, model }
    }

    /// The digest, and whether the file was read for it.
    fn digest(known: &KnownFingerprints, model: &Path, content: u8) -> (Digest, bool) {
        let read = Cell::new(false);
        let digest = known.digest(&File::open(model).unwrap(), || {
            read.set(true);
            Digest([content; 32])
        });
        (digest, read.get())
    }

    /// Remembers a digest as if the file had been there for long.
    fn remember(setup: &Setup, content: u8) {
        let identity = Identity::of(&File::open(&setup.model).unwrap()).unwrap();
        setup.known.remember(&identity, Digest([content; 32])).unwrap();
    }

    #[test]
    fn a_file_that_stays_the_same_is_read_once() {
        let setup = setup();
        remember(&setup, 1);
        assert_eq!(digest(&setup.known, &setup.model, 2), (Digest([1; 32]), false));
    }

    #[test]
    fn a_file_that_has_just_changed_is_not_remembered() {
        let setup = setup();
        for content in [1, 2] {
            assert_eq!(digest(&setup.known, &setup.model, content), (Digest([content; 32]), true));
        }
        let old = Identity { changed: (1_000_000_000, 0), ..Identity::of(&File::open(&setup.model).unwrap()).unwrap() };
        assert!(old.is_settled());
    }

    #[test]
    fn whatever_happens_to_a_file_it_is_read_again() {
        type Change = fn(&Path);
        let changes: [(&str, Change); 5] = [
            ("written in place, as long and as old as before", |path| {
                let modified = path.metadata().unwrap().modified().unwrap();
                std::fs::write(path, b"WEIGHTS").unwrap();
                File::open(path).unwrap().set_times(FileTimes::new().set_modified(modified)).unwrap();
            }),
            ("replaced by one of the same name and size", |path| {
                let other = path.with_extension("new");
                std::fs::write(&other, b"WEIGHTS").unwrap();
                std::fs::rename(other, path).unwrap();
            }),
            ("longer", |path| std::fs::write(path, b"weights and more").unwrap()),
            ("truncated", |path| std::fs::write(path, b"we").unwrap()),
            ("removed and written again", |path| {
                std::fs::remove_file(path).unwrap();
                std::fs::write(path, b"WEIGHTS").unwrap();
            }),
        ];
        for (what, change) in changes {
            let setup = setup();
            remember(&setup, 1);
            std::thread::sleep(Duration::from_millis(20)); // The change time counts in ticks.
            change(&setup.model);
            assert_eq!(digest(&setup.known, &setup.model, 2), (Digest([2; 32]), true), "{what}");
        }
    }

    /// Two fine-tunes of one model, each alone in an image: nothing but their bytes differs.
    #[test]
    fn files_of_two_images_with_the_same_numbers_are_told_apart() {
        let setup = setup();
        let mut bytes = vec![0; 3 << 20];
        std::fs::write(&setup.model, &bytes).unwrap();
        remember(&setup, 1);
        let before = Identity::of(&File::open(&setup.model).unwrap()).unwrap();
        bytes.chunks_mut(40 << 10).for_each(|chunk| chunk[0] = 1);
        std::fs::write(&setup.model, &bytes).unwrap();
        let other = Identity { sample: Identity::of(&File::open(&setup.model).unwrap()).unwrap().sample, ..before };
        assert_eq!(setup.known.find(&before).unwrap(), Some(Digest([1; 32])));
        assert_eq!(setup.known.find(&other).unwrap(), None);
    }

    #[test]
    fn every_size_has_its_pieces() {
        let setup = setup();
        for size in [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, PIECES * PIECE_BYTES + 1] {
            let mut bytes = vec![7; size as usize];
            std::fs::write(&setup.model, &bytes).unwrap();
            let of = || sample(&File::open(&setup.model).unwrap(), size).unwrap();
            let before = of();
            if let Some(last) = bytes.last_mut() {
                *last = 8;
                std::fs::write(&setup.model, &bytes).unwrap();
                assert_ne!(of(), before, "the last byte of {size}");
            }
        }
    }

    #[test]
    fn what_is_damaged_is_not_believed() {
        let setup = setup();
        let name = Identity::of(&File::open(&setup.model).unwrap()).unwrap().file_name();
        let at = setup.known.folder.path().join(&name);
        remember(&setup, 1);
        let whole = std::fs::read(&at).unwrap();
        for i in 0..whole.len() {
            let mut damaged = whole.clone();
            damaged[i] ^= 1;
            std::fs::write(&at, damaged).unwrap();
            assert_eq!(digest(&setup.known, &setup.model, 2), (Digest([2; 32]), true), "byte {i}");
        }
        for other in [&whole[..whole.len() - 1], &[], &[whole.clone(), whole.clone()].concat()] {
            std::fs::write(&at, other).unwrap();
            assert!(digest(&setup.known, &setup.model, 2).1, "{} bytes", other.len());
        }
        std::fs::write(&at, &whole).unwrap();
        assert!(!digest(&setup.known, &setup.model, 2).1);
        std::fs::set_permissions(&at, Permissions::from_mode(0o644)).unwrap();
        assert!(digest(&setup.known, &setup.model, 2).1, "others may read it");
        let moved = at.with_extension("moved");
        std::fs::set_permissions(&at, Permissions::from_mode(0o600)).unwrap();
        std::fs::rename(&at, &moved).unwrap();
        std::os::unix::fs::symlink(&moved, &at).unwrap();
        assert!(digest(&setup.known, &setup.model, 2).1, "a link");
    }

    #[test]
    fn the_number_of_fingerprints_is_bounded() {
        let setup = setup();
        let identity = |inode| Identity { device: 1, inode, size: 1, changed: (1, 1), sample: Digest([0; 32]) };
        for i in 0..COUNT_MAX {
            let name = identity(i as u64).file_name();
            std::fs::write(setup.known.folder.path().join(name), "").unwrap();
        }
        setup.known.remember(&identity(u64::MAX), Digest([1; 32])).unwrap();
        assert_eq!(setup.known.folder.list().unwrap().len(), COUNT_MAX);
        assert_eq!(setup.known.find(&identity(u64::MAX)).unwrap(), Some(Digest([1; 32])));
    }
}
