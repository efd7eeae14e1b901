//! Why the keys cannot be loaded.

use super::file::FILE_BYTES_MAX;
use super::keys::Problem;
use std::path::PathBuf;

/// A keys file that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum KeysError {
    /// It cannot be read.
    #[error("cannot read the keys file {path} (auth.keys_file)")]
    Read { path: PathBuf, source: std::io::Error },
    /// It is larger than a keys file may be.
    #[error("the keys file {path} has more than {FILE_BYTES_MAX} bytes")]
    TooLarge { path: PathBuf },
    /// Its content is not valid.
    #[error("the keys file {path} is wrong: {problem}")]
    Wrong {
        path: PathBuf,
        /// What is wrong with it, and in which line.
        problem: Problem,
    },
}
