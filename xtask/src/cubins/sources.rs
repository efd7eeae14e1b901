//! The sources of the kernels, and the digest by which a stale result is noticed.

use anyhow::{Context, ensure};
use std::path::Path;

/// Where they are.
pub(super) const FOLDER: &str = "kernels/cu";

/// One file, with its path below the folder.
pub(super) struct File {
    pub(super) path: String,
    pub(super) text: String,
}

pub(super) struct Sources {
    /// Compiled each by itself: `*.cu`.
    pub(super) units: Vec<File>,
    /// Included: `*.cuh` and `*.h`.
    headers: Vec<File>,
}

impl Sources {
    pub(super) fn read(root: &Path) -> anyhow::Result<Self> {
        let mut sources = Self { units: Vec::new(), headers: Vec::new() };
        sources.read_folder(&root.join(FOLDER), "")?;
        sources.units.sort_by(|a, b| a.path.cmp(&b.path));
        sources.headers.sort_by(|a, b| a.path.cmp(&b.path));
        ensure!(!sources.units.is_empty(), "{FOLDER} has no source");
        Ok(sources)
    }

    fn read_folder(&mut self, folder: &Path, below: &str) -> anyhow::Result<()> {
        for entry in std::fs::read_dir(folder).with_context(|| folder.display().to_string())? {
            let entry = entry?;
            let path = format!("{below}{}", entry.file_name().to_string_lossy());
            if entry.file_type()?.is_dir() {
                self.read_folder(&entry.path(), &format!("{path}/"))?;
                continue;
            }
            let kind = path.rsplit_once('.').map_or("", |(_, kind)| kind);
            let list = match kind {
                "cu" => &mut self.units,
                "cuh" | "h" => &mut self.headers,
                _ => continue,
            };
            list.push(File { text: std::fs::read_to_string(entry.path()).context(path.clone())?, path });
        }
        Ok(())
    }

    /// Digest of all of them, and of how they are compiled.
    pub(super) fn digest(&self, how: &[String]) -> String {
        digest(how, self.units.iter().chain(&self.headers))
    }

    /// Digest of one unit with all headers.
    pub(super) fn digest_of(&self, unit: &File, how: &[String]) -> String {
        digest(how, std::iter::once(unit).chain(&self.headers))
    }

    /// Kernels without launch bounds: the compiler would not know how many registers a thread may have.
    pub(super) fn unbounded(&self) -> Vec<String> {
        let mut found = Vec::new();
        for File { path, text } in self.units.iter().chain(&self.headers) {
            for (at, _) in text.match_indices("__global__") {
                let declaration = text[at..].split(['{', ';']).next().unwrap_or_default();
                if !declaration.contains("__launch_bounds__") {
                    let line = text[..at].lines().count();
                    found.push(format!("{FOLDER}/{path}:{line}: a kernel without __launch_bounds__"));
                }
            }
        }
        found
    }
}

fn digest<'a>(how: &[String], files: impl Iterator<Item = &'a File>) -> String {
    let mut hasher = blake3::Hasher::new();
    let mut add = |text: &str| {
        hasher.update(&(text.len() as u64).to_le_bytes());
        hasher.update(text.as_bytes());
    };
    how.iter().for_each(|option| add(option));
    for file in files {
        add(&file.path);
        add(&file.text);
    }
    hasher.finalize().to_hex().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_digest_covers_names_texts_and_options() {
        let of = |option: &str, path: &str, text: &str| {
            let file = |path: &str, text: &str| File { path: path.into(), text: text.into() };
            let sources = Sources { units: vec![file("a.cu", "x")], headers: vec![file(path, text)] };
            sources.digest(&[option.to_owned()])
        };
        let digests = [of("-a", "b.h", "y"), of("-b", "b.h", "y"), of("-a", "c.h", "y"), of("-a", "b.h", "z")];
        for (at, digest) in digests.iter().enumerate() {
            assert_eq!(digests.iter().position(|other| other == digest), Some(at));
        }
        assert_eq!(of("-a", "b.h", "y"), digests[0]);
    }

    #[test]
    fn a_kernel_without_bounds_is_found() {
        let of = |text: &str| {
            Sources { units: vec![File { path: "a.cu".into(), text: text.into() }], headers: Vec::new() }.unbounded()
        };
        assert_eq!(of("\n__global__ void f(int a) {\n}\n").len(), 1);
        assert_eq!(of("__global__ void __launch_bounds__(64) f() {}\n"), [""; 0]);
    }
}
