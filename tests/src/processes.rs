//! The shipped binaries as child processes.

use anyhow::{Context, ensure};
use std::path::PathBuf;

/// Path of a built binary; `make test` builds them all in the profile of the tests.
pub fn binary(name: &str) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe()?;
    // target/<profile>/deps/<test> -> target/<profile>/<name>
    let path = me.parent().and_then(|deps| deps.parent()).context("the test runs from a target folder")?.join(name);
    ensure!(path.exists(), "{} is not built: run `cargo build --release --bins` first, as `make test` does", path.display());
    Ok(path)
}
