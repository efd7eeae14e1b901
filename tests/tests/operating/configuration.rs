//! The table of docs/configuration.md against the shipped processes: each setting has its row and its default, and each row is a setting.

use anyhow::{Context, ensure};
use baton_tests::processes::binary;
use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::process::Command;

const ROUTER: &str = "baton-router";
const WORKERS: [&str; 2] = ["baton-prefill-worker", "baton-decode-worker"];

/// A row of the table.
struct Setting {
    /// `router`, `worker` or `both`.
    process: String,
    default: String,
}

/// Rows of the table by their keys.
fn documented(page: &str) -> anyhow::Result<BTreeMap<String, Setting>> {
    let mut rows = BTreeMap::new();
    for line in page.lines().filter(|line| line.starts_with("| `")) {
        let cells: Vec<&str> = line.split('|').map(str::trim).collect();
        ensure!(cells.len() >= 6, "{line}");
        let (key, process) = (cells[1].trim_matches('`').to_owned(), cells[4].to_owned());
        ensure!(["router", "worker", "both"].contains(&process.as_str()), "{line}: no process {process:?}");
        let setting = Setting { process, default: cells[2].to_owned() };
        ensure!(rows.insert(key, setting).is_none(), "{line}: a second time");
    }
    Ok(rows)
}

/// A default of the table as [`dumped`] gives it; `None` where the table has words.
fn stated(default: &str) -> Option<String> {
    if let Some(literal) = default.strip_prefix('`').and_then(|rest| rest.strip_suffix('`')) {
        return (!literal.contains('`')).then(|| literal.to_owned());
    }
    match default.split_once(' ') {
        Some((number, unit)) => {
            let shift = [("KiB", 10), ("MiB", 20), ("GiB", 30)].into_iter().find(|(name, _)| *name == unit)?.1;
            Some((number.parse::<u64>().ok()? << shift).to_string())
        }
        None if default == "empty" => Some(String::new()),
        None => Some(default.parse::<f64>().ok()?.to_string()),
    }
}

/// Keys that a process prints, with their defaults: numbers in their shortest form, the items of lists. An empty table is a key with
/// nothing in it, or a section of keys without one.
fn dumped(process: &str) -> anyhow::Result<BTreeMap<String, String>> {
    let output = Command::new(binary(process)?).arg("--dump-config").env_clear().output()?;
    ensure!(output.status.success(), "{process}: {}", String::from_utf8_lossy(&output.stderr));
    let (mut section, mut keys) = (String::new(), BTreeMap::new());
    for line in String::from_utf8(output.stdout)?.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            section = format!("{name}.");
        } else if let Some((key, value)) = line.split_once(" = ") {
            let value = value.trim_matches(['[', ']', '"']);
            let value = value.parse::<f64>().map_or_else(|_| value.to_owned(), |number| number.to_string());
            keys.insert(format!("{section}{key}"), value);
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
fn each_setting_has_its_row_and_default_and_each_row_is_a_setting() -> anyhow::Result<()> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let page = std::fs::read_to_string(root.join("docs/configuration.md"))?;
    let rows = documented(&page)?;
    let folder = tempfile::tempdir()?;
    let is_for = |process: &str, row: &str| row == "both" || (row == "router") == (process == ROUTER);
    for process in WORKERS.into_iter().chain([ROUTER]) {
        let dumped = dumped(process)?;
        let named: BTreeSet<_> =
            rows.iter().filter(|(_, of)| is_for(process, &of.process)).map(|(key, _)| key).collect();
        let missing: Vec<_> = dumped.keys().filter(|key| !named.contains(key)).collect();
        ensure!(missing.is_empty(), "{process} has settings that the page does not name for it: {missing:?}");
        // Those without a default are not printed: they are known all the same.
        for key in named.into_iter().filter(|key| !dumped.contains_key(*key)) {
            let refusal = refusal(process, key, folder.path())?;
            ensure!(!refusal.contains("unknown key"), "the page names {key} for {process}, which says: {refusal}");
        }
        let compared = dumped.iter().filter_map(|(key, value)| Some((key, value, stated(&rows[key].default)?)));
        let compared: Vec<_> = compared.collect();
        let wrong: Vec<_> = compared.iter().filter(|(_, value, stated)| *value != stated).collect();
        ensure!(wrong.is_empty(), "{process} has defaults that differ from those of the page: {wrong:?}");
        let words = dumped.len() - compared.len();
        ensure!(words <= 5, "{process}: the page describes {words} defaults in words, which are not compared");
        let unknown = refusal(process, "telemetry.nothing", folder.path())?;
        ensure!(unknown.contains("unknown key"), "{process} takes what it does not know: {unknown}");
    }
    // The counts that are told.
    let of = |process: &str| rows.values().filter(|row| row.process == process).count();
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
