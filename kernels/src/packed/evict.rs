//! The bound of the cache's size: what was not used for longest goes first.

use super::folder::{Listed, PrivateFolder, is_unfinished};
use super::{CacheError, LOCK, PACKED};

/// Removes files until `bytes` more fit below `bytes_max`. `but` is not counted and stays: it is about to be replaced, or was just written.
/// False if there is no room for so many.
pub(super) fn make_room(folder: &PrivateFolder, bytes: u64, bytes_max: u64, but: &str) -> Result<bool, CacheError> {
    folder.remove_unfinished()?;
    let listed: Vec<Listed> = folder.list()?;
    remove_useless_locks(folder, &listed)?;
    let (mut packed, unfinished): (Vec<_>, Vec<_>) = listed
        .into_iter()
        .filter(|file| file.name != but && (stem(&file.name, PACKED).is_some() || is_unfinished(&file.name)))
        .partition(|file| !is_unfinished(&file.name));
    packed.sort_by(|a, b| a.used.cmp(&b.used).then_with(|| a.name.cmp(&b.name)));
    let mut total = packed.iter().chain(&unfinished).fold(bytes, |sum, file| sum.saturating_add(file.bytes));
    for Listed { name, bytes, .. } in packed {
        if total <= bytes_max {
            break;
        }
        let lock = name.replace(PACKED, LOCK);
        // What others write now is theirs.
        let Ok(Some(_locked)) = folder.lock(&lock) else { continue };
        tracing::info!(file = name, bytes, "removes packed weights that were not used for longest");
        folder.remove(&name)?;
        folder.remove(&lock)?;
        total -= bytes;
    }
    Ok(total <= bytes_max)
}

/// Removes the locks of keys of which nothing is stored, unless somebody is about to.
fn remove_useless_locks(folder: &PrivateFolder, listed: &[Listed]) -> Result<(), CacheError> {
    for (file, key) in listed.iter().filter_map(|file| Some((file, stem(&file.name, LOCK)?))) {
        let is_stored = listed.iter().any(|other| stem(&other.name, PACKED) == Some(key));
        if !is_stored && let Ok(Some(_locked)) = folder.lock(&file.name) {
            folder.remove(&file.name)?;
        }
    }
    Ok(())
}

/// A name before this ending.
fn stem<'a>(name: &'a str, ending: &str) -> Option<&'a str> {
    name.rsplit_once('.').and_then(|(stem, found)| (found == ending).then_some(stem))
}
