//! The folder, and the bound of its size.

use super::evict::make_room;
use super::folder::lock_named;
use super::session::Session;
use super::{CacheError, Key, PackedCache, PrivateFolder, file};
use crate::numerics::Numerics;
use baton_types::Digest;
use std::fs::{File, Permissions};
use std::io::Write as _;
use std::os::unix::fs::{PermissionsExt as _, chown, symlink};
use std::path::Path;
use std::time::{Duration, SystemTime};

/// A file that was last used so many seconds ago.
fn put(folder: &PrivateFolder, name: &str, bytes: usize, ago: u64) {
    let mut replacement = folder.replace(name).unwrap();
    replacement.file().write_all(&vec![1; bytes]).unwrap();
    replacement.file().set_modified(SystemTime::now() - Duration::from_secs(ago)).unwrap();
    replacement.finish().unwrap();
}

fn names(folder: &PrivateFolder) -> Vec<String> {
    let mut names: Vec<_> = folder.list().unwrap().into_iter().map(|file| file.name).collect();
    names.sort();
    names
}

fn folder(root: &Path) -> PrivateFolder {
    PrivateFolder::open(&root.join("a/b")).unwrap()
}

fn key() -> Key {
    Key { model: Digest([7; 32]), numerics: Numerics::I8x32, revision: 2, packing: "cpu 1".into() }
}

#[test]
fn all_that_packed_weights_depend_on_is_in_their_name_and_in_the_file() {
    let key = key();
    let others = [
        Key { model: Digest([8; 32]), ..key.clone() },
        Key { numerics: Numerics::Bf16x32, ..key.clone() },
        Key { revision: 3, ..key.clone() },
        Key { packing: "cpu 2".into(), ..key.clone() },
    ];
    for other in others {
        assert_ne!((other.file_name(), other.lock_name()), (key.file_name(), key.lock_name()), "{other:?}");
        assert_ne!(other.text(), key.text(), "{other:?}");
    }
}

#[test]
fn what_was_not_used_for_longest_goes_first() {
    let root = tempfile::tempdir().unwrap();
    let folder = folder(root.path());
    let fill = || {
        for (name, ago) in [("a", 30), ("b", 10), ("c", 20)] {
            put(&folder, &format!("{name}.packed"), 100, ago);
            put(&folder, &format!("{name}.lock"), 0, ago);
        }
        put(&folder, "1-2.fingerprint", 1000, 99);
    };
    let both = |name: &str| [format!("{name}.lock"), format!("{name}.packed")];
    for (bytes, but, left) in [
        (100, "d.packed", vec!["a", "b", "c"]),
        (101, "d.packed", vec!["b", "c"]),
        (250, "d.packed", vec!["b"]),
        (400, "d.packed", vec![]),
        (200, "b.packed", vec!["a", "b", "c"]),
        (201, "a.packed", vec!["a", "b"]),
    ] {
        fill();
        assert!(make_room(&folder, bytes, 400, but).unwrap());
        let expected: Vec<String> =
            std::iter::once("1-2.fingerprint".to_owned()).chain(left.into_iter().flat_map(both)).collect();
        assert_eq!(names(&folder), expected, "{bytes} {but}");
    }
    assert!(!make_room(&folder, 401, 400, "d.packed").unwrap(), "more than the bound");
}

#[test]
fn what_others_write_counts_and_stays() {
    let root = tempfile::tempdir().unwrap();
    let folder = folder(root.path());
    put(&folder, "a.packed", 100, 1);
    // Nothing of it is written yet.
    let begun = file::begin(&folder, &key(), 150).unwrap();
    assert!(make_room(&folder, 50, 300, "c.packed").unwrap());
    assert_eq!(names(&folder).len(), 2);
    assert!(!make_room(&folder, 200, 300, "c.packed").unwrap());
    begun.finish().unwrap();
    assert_eq!(names(&folder), [key().file_name()]);
}

#[test]
fn what_others_are_about_to_replace_stays_with_its_lock() {
    let root = tempfile::tempdir().unwrap();
    let folder = folder(root.path());
    put(&folder, "a.packed", 100, 3);
    put(&folder, "b.packed", 100, 2);
    put(&folder, "c.packed", 100, 1);
    let others = folder.lock("a.lock").unwrap().unwrap();
    assert!(make_room(&folder, 100, 300, "d.packed").unwrap());
    assert_eq!(names(&folder), ["a.lock", "a.packed", "c.packed"], "the next one goes");
    assert!(folder.lock("a.lock").unwrap().is_none(), "it is theirs still");
    assert!(!make_room(&folder, 250, 300, "d.packed").unwrap());
    assert_eq!(names(&folder), ["a.lock", "a.packed"]);
    drop(others);
    assert!(make_room(&folder, 250, 300, "d.packed").unwrap());
    assert_eq!(names(&folder), [""; 0]);
}

#[test]
fn locks_of_what_was_not_stored_are_removed() {
    let root = tempfile::tempdir().unwrap();
    let cache = PackedCache::new(folder(root.path()), 1, Duration::ZERO);
    let others = cache.folder.lock("0.lock").unwrap().unwrap();
    put(&cache.folder, "b.packed", 1, 0);
    put(&cache.folder, "b.lock", 0, 0);
    // There is no room for either of these.
    let keys = ["cpu 1", "cpu 2"].map(|packing| Key { packing: packing.into(), ..key() });
    for key in &keys {
        let session = Session::begin(cache.clone(), key.clone());
        session.save(&[], session.writing());
    }
    assert_eq!(names(&cache.folder), ["0.lock".into(), keys[1].lock_name()], "those that somebody holds, or held last");
    drop(others);
    assert!(make_room(&cache.folder, 0, 1, "c.packed").unwrap());
    assert_eq!(names(&cache.folder), [""; 0]);
}

#[test]
fn a_lock_that_was_removed_before_it_was_taken_is_none() {
    let root = tempfile::tempdir().unwrap();
    let folder = folder(root.path());
    let [first, second] = [0, 1].map(|_| folder.lock_file("a.lock").unwrap());
    assert!(lock_named(&first).unwrap() && !lock_named(&second).unwrap());
    folder.remove("a.lock").unwrap();
    drop(first);
    assert!(!lock_named(&second).unwrap(), "the next one gets a new file");
    let next = folder.lock("a.lock").unwrap();
    assert!(next.is_some() && folder.lock("a.lock").unwrap().is_none());
}

#[test]
fn a_file_has_its_name_once_it_is_complete() {
    let root = tempfile::tempdir().unwrap();
    let folder = folder(root.path());
    let mut replacement = folder.replace("a").unwrap();
    replacement.file().write_all(b"half").unwrap();
    assert!(folder.read("a").unwrap().is_none());
    folder.remove_unfinished().unwrap();
    assert_eq!(names(&folder).len(), 1, "its writer is there");
    drop(replacement);
    assert_eq!(names(&folder), [""; 0]);
}

#[test]
fn a_folder_that_is_not_private_is_refused() {
    let root = tempfile::tempdir().unwrap();
    let at = root.path().join("folder");
    let refused = |what: &str| match PrivateFolder::open(&at) {
        Err(CacheError::Refused { what: said, .. }) => assert!(said.contains(what), "{said}"),
        other => panic!("{what}: {other:?}"),
    };
    PrivateFolder::open(&at).unwrap();
    for mode in [0o755, 0o770, 0o701] {
        std::fs::set_permissions(&at, Permissions::from_mode(mode)).unwrap();
        refused("0700");
    }
    std::fs::set_permissions(&at, Permissions::from_mode(0o700)).unwrap();
    PrivateFolder::open(&at).unwrap();
    // Only root can give a folder away.
    if chown(&at, Some(65_534), None).is_ok() {
        refused("65534");
    }
    std::fs::remove_dir(&at).unwrap();
    symlink(root.path(), &at).unwrap();
    refused("link");
    std::fs::remove_file(&at).unwrap();
    File::create(&at).unwrap();
    refused("no folder");
    assert!(PrivateFolder::open(&at.join("below")).is_err());
}
