//! The table of docs/metrics.md with the possible values of labels with a fixed set of values.

use anyhow::ensure;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

/// Values by metric and label.
pub type LabelValues = BTreeMap<(String, String), BTreeSet<String>>;

/// Reads the table.
pub fn told() -> anyhow::Result<LabelValues> {
    let text = fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs/metrics.md"))?;
    let section = text.split("\n## ").find(|section| section.starts_with("Values of labels\n")).unwrap_or_default();
    let mut told = LabelValues::new();
    for line in section.lines() {
        let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
        let [metric, label, values] = cells[..] else { continue };
        let Some(metric) = metric.strip_prefix('`').and_then(|m| m.strip_suffix('`')) else { continue };
        let values = values.split(", ").map(|value| value.trim_matches('`').to_owned()).collect();
        let former = told.insert((metric.to_owned(), label.to_owned()), values);
        ensure!(former.is_none(), "{metric} has {label} twice");
    }
    ensure!(!told.is_empty(), "docs/metrics.md has no values of labels");
    Ok(told)
}
