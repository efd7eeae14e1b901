//! Style and structure as a test. Each check takes the tracked files and returns findings; any finding fails the run. Each check has a
//! test with a deliberate violation.

use std::collections::HashSet;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

mod clocks;
mod dependencies;
mod environment;
mod fences;
mod hazards;
mod images;
mod length;
mod links;
mod modules;
mod pools;
mod protobuf;
mod simulation;
mod words;

/// What `tidy` checks, in one line.
pub(crate) const SUMMARY: &str = "dependency direction, unsafe fences, protobuf edges, clocks of pure cores, environment, hazards, \
     state machines of the simulation, who names host memory, module style, what images are built from, file length, banned words, links";

/// One tracked text file.
#[derive(Clone)]
pub(crate) struct Source {
    /// Path from the repository's root, with `/`.
    path: String,
    text: String,
}

impl Source {
    /// Whether this is Rust product code: not a test, bench or example, and not this crate, which must name what it bans.
    fn is_product_code(&self) -> bool {
        let aside = ["/tests/", "/testing/", "/benches/", "/examples/"].iter().any(|d| self.path.contains(d));
        let test_file = ["/tests.rs", "_tests.rs", "/testing.rs"].iter().any(|name| self.path.ends_with(name));
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

    /// Its lines without items under `#[cfg(test)]`, numbered from 1. Relies on rustfmt's layout.
    fn product_lines(&self) -> impl Iterator<Item = (usize, &str)> {
        // Indentation of the item that is skipped.
        let mut skipped: Option<usize> = None;
        let mut is_product = move |line: &str| {
            let text = line.trim();
            let indent = line.len() - line.trim_start().len();
            match skipped {
                Some(at) => {
                    if indent == at && text.ends_with(['}', ';', ',']) {
                        skipped = None;
                    }
                    false
                }
                None if text.starts_with("#[cfg(test)]") || text.starts_with("#[cfg(all(test") => {
                    skipped = Some(indent);
                    false
                }
                None => true,
            }
        };
        (1..).zip(self.text.lines()).filter(move |(_, line)| is_product(line))
    }
}

/// Runs every check and prints the findings.
pub(crate) fn run(root: &Path) -> anyhow::Result<ExitCode> {
    let (sources, metadata) = (tracked(root)?, metadata(root)?);
    let product = without_test_modules(&sources);
    let mut findings = Vec::new();
    findings.extend(dependencies::check(&metadata));
    findings.extend(hazards::check(&metadata, &sources));
    findings.extend(fences::check(&sources));
    findings.extend(protobuf::check(&product));
    findings.extend(clocks::check(&product));
    findings.extend(environment::check(&product));
    findings.extend(simulation::check(&product));
    findings.extend(modules::check(&sources));
    findings.extend(pools::check(&product));
    findings.extend(images::check(&sources));
    findings.extend(length::check(&sources));
    findings.extend(words::check(&product));
    findings.extend(links::check(root, &sources));
    for finding in &findings {
        eprintln!("tidy: {finding}");
    }
    println!("tidy: {} files, {} findings ({SUMMARY})", sources.len(), findings.len());
    Ok(if findings.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The files that no `#[cfg(test)] mod name;` declares.
fn without_test_modules(sources: &[Source]) -> Vec<Source> {
    let declared = |source: &Source| {
        let (folder, file) = source.path.rsplit_once('/').unwrap_or(("", &source.path));
        let own = match file {
            "mod.rs" | "lib.rs" | "main.rs" => folder.to_owned(),
            file => format!("{folder}/{}", file.trim_end_matches(".rs")),
        };
        let lines: Vec<&str> = source.text.lines().map(str::trim).collect();
        let names = lines
            .windows(2)
            .filter(|pair| pair[0].starts_with("#[cfg(test)]") || pair[0].starts_with("#[cfg(all(test"));
        let names = names.filter_map(|pair| pair[1].strip_suffix(';')?.rsplit_once("mod ").map(|(_, name)| name));
        names.map(|name| format!("{own}/{name}")).collect::<Vec<_>>()
    };
    let rust = || sources.iter().filter(|s| s.path.ends_with(".rs"));
    let tests: HashSet<String> = rust().flat_map(declared).collect();
    let is_test = |path: &str| {
        let module = path.trim_end_matches(".rs").trim_end_matches("/mod");
        module.match_indices('/').any(|(at, _)| tests.contains(&module[..at])) || tests.contains(module)
    };
    sources.iter().filter(|s| !is_test(&s.path)).cloned().collect()
}

fn metadata(root: &Path) -> anyhow::Result<serde_json::Value> {
    let arguments = ["metadata", "--no-deps", "--offline", "--format-version", "1"];
    let out = Command::new(env!("CARGO")).args(arguments).current_dir(root).output()?;
    anyhow::ensure!(out.status.success(), "cargo metadata failed: {}", String::from_utf8_lossy(&out.stderr));
    Ok(serde_json::from_slice(&out.stdout)?)
}

fn tracked(root: &Path) -> anyhow::Result<Vec<Source>> {
    let out = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(root)
        .output()?;
    anyhow::ensure!(out.status.success(), "git ls-files failed: {}", String::from_utf8_lossy(&out.stderr));
    let paths = String::from_utf8(out.stdout)?;
    let text = |path: &str| std::fs::read_to_string(root.join(PathBuf::from(path))).ok();
    // Files that are not UTF-8 are fixtures; no check applies to them.
    Ok(paths.split_terminator('\0').filter_map(|p| Some(Source { path: p.to_owned(), text: text(p)? })).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_of_tests_are_no_product() {
        let source = |path: &str, text: &str| Source { path: path.into(), text: text.into() };
        let declares = "mod a;\n#[cfg(test)]\npub(crate) mod t;\n";
        let sources = [
            source("x/src/b/mod.rs", declares),
            source("x/src/b/t.rs", ""),
            source("x/src/b/t/deep.rs", ""),
            source("x/src/b/a.rs", declares),
            source("x/src/b/a/t/mod.rs", ""),
            source("x/src/t.rs", ""),
        ];
        let left: Vec<String> = without_test_modules(&sources).into_iter().map(|s| s.path).collect();
        assert_eq!(left, ["x/src/b/mod.rs", "x/src/b/a.rs", "x/src/t.rs"]);
    }

    #[test]
    fn items_of_tests_are_no_product() {
        let text = "a\n#[cfg(test)]\nmod tests;\nb\nimpl A {\n    #[cfg(test)]\n    fn f() {\n        x;\n    }\n    c\n}\n#[cfg(test)]\nmod more {\n    y;\n}\nd\n";
        let source = Source { path: "a/src/lib.rs".into(), text: text.into() };
        let lines: Vec<(usize, &str)> = source.product_lines().collect();
        assert_eq!(lines, [(1, "a"), (4, "b"), (5, "impl A {"), (10, "    c"), (11, "}"), (16, "d")]);
    }
}
