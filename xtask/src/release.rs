//! Compares the records in the documentation with the current code: `cargo xtask release-check`.
//!
//! A record (`docs/recorded/*.json`) states by which command, at which commit and from which trees it was made. If the tree of a crate
//! that it covers has changed since, the record must be made again before a release. This is not part of `make lint`: between releases a
//! record may be older than the code.

use anyhow::{Context, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Where the records are.
const FOLDER: &str = "docs/recorded";
/// The page that shows them.
const PAGE: &str = "docs/reliability.md";

/// The fields of one record that this check needs.
struct Record {
    command: String,
    commit: String,
    /// Tree hashes by folder.
    trees: BTreeMap<String, String>,
}

impl Record {
    fn read(path: &Path) -> anyhow::Result<Self> {
        let text = std::fs::read_to_string(path)?;
        Self::of(&serde_json::from_str(&text)?).with_context(|| path.display().to_string())
    }

    fn of(value: &Value) -> anyhow::Result<Self> {
        let text = |key: &str| value[key].as_str().map(str::to_owned).with_context(|| format!("no {key}"));
        let trees = value["trees"].as_object().context("no trees")?;
        let tree = |(folder, hash): (&String, &Value)| Some((folder.clone(), hash.as_str()?.to_owned()));
        Ok(Self { command: text("command")?, commit: text("commit")?, trees: trees.iter().filter_map(tree).collect() })
    }

    /// Why the record must be made again, given the current tree of each folder; `None` if it is up to date.
    fn stale(&self, tree_now: impl Fn(&str) -> String) -> Option<String> {
        if self.trees.is_empty() || self.trees.values().any(String::is_empty) {
            return Some("it names no trees".into());
        }
        if self.commit.ends_with("+changes") {
            return Some(format!("it was made from changes to {} that nobody else has", self.commit));
        }
        let differ: Vec<&str> =
            self.trees.iter().filter(|(folder, hash)| tree_now(folder) != **hash).map(|(f, _)| f.as_str()).collect();
        (!differ.is_empty()).then(|| format!("since {} these have changed: {}", self.commit, differ.join(", ")))
    }
}

/// Names of the records that a page shows.
fn shown(page: &str) -> impl Iterator<Item = &str> {
    page.lines().filter_map(|line| line.strip_prefix("<!-- Recorded: ")?.strip_suffix(" -->"))
}

/// Compares all records that the page shows with the commit that is checked out.
pub(crate) fn check(root: &Path) -> anyhow::Result<ExitCode> {
    let page = std::fs::read_to_string(root.join(PAGE)).context(PAGE)?;
    let (mut stale, mut all) = (0, 0);
    for name in shown(&page) {
        all += 1;
        let path = root.join(FOLDER).join(name).with_extension("json");
        if !path.exists() {
            stale += 1;
            println!("{name}: nothing is recorded; CONTRIBUTING.md, \"Records\", says how");
            continue;
        }
        let record = Record::read(&path)?;
        match record.stale(|folder| git(root, &["rev-parse", &format!("HEAD:{folder}")])) {
            None => println!("{name}: as recorded at {}", record.commit),
            Some(why) => {
                stale += 1;
                println!("{name}: {why}\n    run again: {}", record.command);
            }
        }
    }
    ensure!(all > 0, "{PAGE} shows no record");
    println!("release-check: {stale} of {all} records have to be made again");
    Ok(if stale == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Stores the summary of a run as the record `name`, or marks the existing record as made at this commit.
pub(crate) fn record(root: &Path, name: &str, summary: Option<&str>) -> anyhow::Result<ExitCode> {
    let path = root.join(FOLDER).join(name).with_extension("json");
    let value = match summary {
        Some(summary) => serde_json::from_str(&std::fs::read_to_string(summary).context(summary.to_owned())?)?,
        None => {
            let former: Value = serde_json::from_str(&std::fs::read_to_string(&path)?)?;
            let Record { command, trees, .. } = Record::of(&former)?;
            let tree = |folder: String| {
                let hash = git(root, &["rev-parse", &format!("HEAD:{folder}")]);
                (folder, hash)
            };
            let trees: BTreeMap<String, String> = trees.into_keys().map(tree).collect();
            let changes = git(root, &["status", "--porcelain", "--untracked-files=no"]);
            ensure!(changes.is_empty(), "commit first: a record names a commit\n{changes}");
            json!({"command": command, "commit": git(root, &["rev-parse", "--short", "HEAD"]), "trees": trees})
        }
    };
    Record::of(&value)?;
    std::fs::write(&path, serde_json::to_string_pretty(&value)? + "\n")?;
    println!(
        "{}; write the page anew: UPDATE_EXPECT=1 cargo test --release -p baton-tests --test faults page",
        path.display()
    );
    Ok(ExitCode::SUCCESS)
}

/// Output of git; empty if it fails, as for a folder that no longer exists.
fn git(root: &Path, arguments: &[&str]) -> String {
    let said = Command::new("git").args(arguments).current_dir(root).output();
    said.map(
        |out| if out.status.success() { String::from_utf8_lossy(&out.stdout).trim().to_owned() } else { String::new() },
    )
    .unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stale(commit: &str, trees: &Value) -> Option<String> {
        let record = Record::of(&json!({"command": "make it", "commit": commit, "trees": trees})).unwrap();
        record.stale(|folder| format!("tree-of-{folder}"))
    }

    #[test]
    fn a_page_names_its_records() {
        let page = "# Page\n<!-- Recorded: chaos -->\ntext\n<!-- End of chaos -->\n<!-- Recorded: etcd -->\n";
        assert_eq!(shown(page).collect::<Vec<_>>(), ["chaos", "etcd"]);
    }

    #[test]
    fn a_record_of_other_trees_has_to_be_made_again() {
        let same = json!({"router": "tree-of-router", "engine": "tree-of-engine"});
        assert_eq!(stale("abc", &same), None);
        let why = stale("abc", &json!({"router": "another", "engine": "tree-of-engine"})).unwrap();
        assert!(why.contains("abc") && why.contains("router") && !why.contains("engine"), "{why}");
        assert!(stale("abc+changes", &same).is_some() && stale("abc", &json!({})).is_some());
        assert!(stale("abc", &json!({"router": ""})).is_some(), "a tree that nobody knows");
        assert!(Record::of(&json!({"commit": "abc", "trees": {}})).is_err());
    }
}
