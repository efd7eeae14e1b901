//! Style and structure as a test. Each check takes the tracked files and returns findings; any finding fails the run.

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

mod dependencies;
mod fences;
mod images;
mod length;
mod links;
mod words;

/// What `tidy` looks at, in one line.
pub(crate) const SUMMARY: &str =
    "dependency direction, unsafe fences, what images are built from, file length, banned words, links";

/// One tracked text file.
#[derive(Clone)]
pub(crate) struct Source {
    /// Path from the repository's root, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// Whether this is Rust code that ships (no test, bench or example, and not this crate, which must name what it bans).
    fn is_product_code(&self) -> bool {
        let aside = ["/tests/", "/benches/", "/examples/"].iter().any(|d| self.path.contains(d));
        let test_file = self.path.ends_with("/tests.rs") || self.path.ends_with("_tests.rs");
        self.path.ends_with(".rs")
            && !aside
            && !test_file
            && !self.path.starts_with("tests/")
            && !self.path.starts_with("xtask/")
    }

    /// Whether `cargo codegen` wrote it.
    fn is_generated(&self) -> bool {
        self.path.contains("/generated/")
    }

    /// Lines before the file's `#[cfg(test)]` module, numbered from 1.
    fn product_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text.lines().enumerate().take_while(|(_, l)| !l.starts_with("#[cfg(test)]")).map(|(i, l)| (i + 1, l))
    }
}

/// Runs every check and prints the findings.
pub(crate) fn run(root: &Path) -> ExitCode {
    let sources = match tracked(root) {
        Ok(sources) => sources,
        Err(error) => {
            eprintln!("tidy: cannot list tracked files: {error:#}");
            return ExitCode::FAILURE;
        }
    };
    let mut findings = Vec::new();
    findings.extend(dependencies::check(root));
    findings.extend(fences::check(&sources));
    findings.extend(images::check(&sources));
    findings.extend(length::check(&sources));
    findings.extend(words::check(&sources));
    findings.extend(links::check(root, &sources));
    for finding in &findings {
        eprintln!("tidy: {finding}");
    }
    println!("tidy: {} files, {} findings ({SUMMARY})", sources.len(), findings.len());
    if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn tracked(root: &Path) -> anyhow::Result<Vec<Source>> {
    let out = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()?;
    anyhow::ensure!(out.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&out.stderr));
    let paths = String::from_utf8(out.stdout)?;
    let text = |path: &str| std::fs::read_to_string(root.join(PathBuf::from(path))).ok();
    // Files that are not UTF-8 are fixtures; nothing here applies to them.
    Ok(paths.split_terminator('\0').filter_map(|p| Some(Source { path: p.to_owned(), text: text(p)? })).collect())
}
