//! The figures of a run: a table for people, `target/bench/summary.json` for programs.

use anyhow::Context;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// One figure, as the file has it.
#[derive(Clone, Debug, Deserialize, Serialize)]
pub(crate) struct Figure {
    pub(crate) value: f64,
    pub(crate) unit: String,
    /// `value` divided by what `of` names, or another quotient that `of` spells out.
    pub(crate) ratio: Option<f64>,
    /// What the ratio is to, and how it was measured.
    pub(crate) of: Option<String>,
}

impl Figure {
    /// A figure by itself.
    pub(crate) fn plain(value: f64, unit: &str) -> Self {
        Self { value, unit: unit.into(), ratio: None, of: None }
    }

    /// A figure beside what it is compared with.
    pub(crate) fn ratio(value: f64, unit: &str, ratio: f64, of: impl Into<String>) -> Self {
        Self { value, unit: unit.into(), ratio: Some(ratio), of: Some(of.into()) }
    }
}

/// What a ratio should be.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Target {
    AtMost(f64),
    AtLeast(f64),
}

impl Target {
    fn is_met(self, ratio: f64) -> bool {
        match self {
            Self::AtMost(bound) => ratio <= bound,
            Self::AtLeast(bound) => ratio >= bound,
        }
    }
}

/// All figures so far, in the order of measurement.
#[derive(Default)]
pub(crate) struct Summary {
    rows: Vec<(String, Figure, Option<Target>)>,
}

impl Summary {
    /// Adds a figure, which should meet `target` where there is one.
    pub(crate) fn add(&mut self, name: &str, figure: Figure, target: impl Into<Option<Target>>) {
        eprintln!("  {name}: {:.3} {}", figure.value, figure.unit);
        self.rows.push((name.to_owned(), figure, target.into()));
    }

    /// Prints the table and writes the file. Missed targets are marked; judging them is left to who reads.
    pub(crate) fn finish(&self) -> anyhow::Result<()> {
        println!("\n{:<40} {:>11} {:<9} {:>7}  {:<16} of", "figure", "value", "unit", "ratio", "target");
        for (name, figure, target) in &self.rows {
            let ratio = figure.ratio.map(|r| format!("{r:.3}")).unwrap_or_default();
            let of = figure.of.as_deref().unwrap_or_default();
            println!(
                "{name:<40} {:>11.3} {:<9} {ratio:>7}  {:<16} {of}",
                figure.value,
                figure.unit,
                verdict(figure, *target)
            );
        }
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/bench");
        std::fs::create_dir_all(&folder)?;
        let path: PathBuf = folder.join("summary.json");
        let figures: BTreeMap<&str, &Figure> =
            self.rows.iter().map(|(name, figure, _)| (name.as_str(), figure)).collect();
        std::fs::write(&path, serde_json::to_string_pretty(&figures)? + "\n")
            .with_context(|| format!("cannot write {}", path.display()))?;
        println!("\n{}", path.display());
        Ok(())
    }
}

fn verdict(figure: &Figure, target: Option<Target>) -> String {
    let (Some(target), Some(ratio)) = (target, figure.ratio) else { return String::new() };
    let bound = match target {
        Target::AtMost(bound) => format!("<= {bound:.2}"),
        Target::AtLeast(bound) => format!(">= {bound:.2}"),
    };
    format!("{bound} {}", if target.is_met(ratio) { "met" } else { "MISSED" })
}
