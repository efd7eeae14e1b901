//! The table of docs/configuration.md against the shipped processes: each setting has its row, and each row is a setting.

use anyhow::{Context, ensure};
use baton_tests::processes::binary;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const ROUTER: &str = "baton-router";
const WORKERS: [&str; 2] = ["baton-prefill-worker", "baton-decode-worker"];

/// Keys of the table, each with the processes that it is for.
fn documented(page: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        ensure!(cells.len() >= 6, "{line}");
        let (key, process) = (cells[1].trim_matches('`').to_owned(), cells[4].to_owned());
        ensure!(["router", "worker", "both"].contains(&process.as_str()), "{line}: no process {process:?}");
        ensure!(rows.insert(key, process).is_none(), "{line}: a second time");
    }
    Ok(rows)
}

/// Keys that a process prints with their defaults. An empty table is a key with nothing in it, or a section of keys without one.
fn dumped(process: &str) -> anyhow::Result<BTreeSet<String>> {
    let output = Command::new(binary(process)?).arg("--dump-config").env_clear().output()?;
    ensure!(output.status.success(), "{process}: {}", String::from_utf8_lossy(&output.stderr));
    let (mut section, mut keys) = (String::new(), BTreeSet::new());
    for line in String::from_utf8(output.stdout)?.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = format!("{name}.");
        } else if let Some((key, _)) = line.split_once(" = ") {
            keys.insert(format!("{section}{key}"));
        }
    }
    Ok(keys)
}

/// What a process says of a key that is set to something.
fn refusal(process: &str, key: &str, folder: &Path) -> anyhow::Result<String> {
    let (section, name) = key.rsplit_once('.').with_context(|| format!("{key} has no section"))?;
    let file = folder.join("config.toml");
    std::fs::write(&file, format!("[{section}]\n{name} = 1\n"))?;
    let output = Command::new(binary(process)?).arg("--config").arg(&file).arg("--dump-config").env_clear().output()?;
    Ok(String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn each_setting_has_its_row_and_each_row_is_a_setting() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("docs/configuration.md"))?;
    let rows = documented(&page)?;
    let folder = tempfile::tempdir()?;
    let is_for = |process: &str, row: &str| row == "both" || (row == "router") == (process == ROUTER);
    for process in WORKERS.into_iter().chain([ROUTER]) {
        let dumped = dumped(process)?;
        let named: BTreeSet<_> = rows.iter().filter(|(_, of)| is_for(process, of)).map(|(key, _)| key).collect();
        let missing: Vec<_> = dumped.iter().filter(|key| !named.contains(key)).collect();
        ensure!(missing.is_empty(), "{process} has settings that the page does not name for it: {missing:?}");
        // Those without a default are not printed: they are known all the same.
        for key in named.into_iter().filter(|key| !dumped.contains(*key)) {
            let refusal = refusal(process, key, folder.path())?;
            ensure!(!refusal.contains("unknown key"), "the page names {key} for {process}, which says: {refusal}");
        }
        let unknown = refusal(process, "telemetry.nothing", folder.path())?;
        ensure!(unknown.contains("unknown key"), "{process} takes what it does not know: {unknown}");
    }
    // The counts that are told.
    let of = |process: &str| rows.values().filter(|row| *row == process).count();
    let (router, worker, both) = (of("router"), of("worker"), of("both"));
    let (all, routers, workers) = (rows.len(), router + both, worker + both);
    let told =
        format!("There are {all} settings: {routers} on a router, {workers} on a worker, {both} of them on both.");
    ensure!(page.contains(&told), "docs/configuration.md should say: {told}");
    let map = std::fs::read_to_string(root.join("ARCHITECTURE.md"))?;
    let told = format!("There are {all} settings: {routers} on routers, {workers} on workers, {both} shared.");
    ensure!(map.contains(&told), "ARCHITECTURE.md should say: {told}");
    Ok(())
}
