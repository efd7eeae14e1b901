//! The bound of the cache's size: what was not used for longest goes first.

use super::folder::{Listed, PrivateFolder, is_unfinished};
use super::{CacheError, LOCK, PACKED};

/// Removes files until `bytes` more fit below `bytes_max`. `but` is not counted and stays: it is about to be replaced, or was just written.
/// False if there is no room for so many.
pub(super) fn make_room(folder: &PrivateFolder, bytes: u64, bytes_max: u64, but: &str) -> Result<bool, CacheError> {
    folder.remove_unfinished()?;
    let mut kept: Vec<Listed> = folder.list()?;
    kept.retain(|file| file.name != but && (has_ending(&file.name, PACKED) || is_unfinished(&file.name)));
    kept.sort_by(|a, b| b.used.cmp(&a.used).then_with(|| b.name.cmp(&a.name)));
    let mut total = kept.iter().fold(bytes, |sum, file| sum.saturating_add(file.bytes));
    while total > bytes_max {
        // What others write now is theirs.
        let Some(oldest) = kept.iter().rposition(|file| !is_unfinished(&file.name)) else { return Ok(false) };
        let Listed { name, bytes, .. } = kept.remove(oldest);
        tracing::info!(file = name, bytes, "removes packed weights that were not used for longest");
        folder.remove(&name)?;
        folder.remove(&name.replace(PACKED, LOCK))?;
        total -= bytes;
    }
    Ok(true)
}

fn has_ending(name: &str, ending: &str) -> bool {
    name.rsplit_once('.').is_some_and(|(_, found)| found == ending)
}
