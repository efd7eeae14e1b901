//! Settings of adapters.

use baton_kernels::adapter::AdapterBounds;
use baton_node::config::{ByteSize, Check, Checker};
use baton_types::AdapterCard;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// LoRA adapters that this worker serves beside its model; on where `modules` or `folder` is set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LoraSettings {
    /// Adapters as `name=folder`. One that cannot be read ends the start.
    pub modules: Vec<String>,
    /// Folder of adapters: each folder in it is one, named like it. Read again while the worker runs: adapters come and go with their
    /// folders.
    pub folder: Option<PathBuf>,
    /// Time between two readings of `folder`.
    pub reread_ms: u64,
    /// Most adapters that are loaded at once, and so in one batch.
    pub max_loras: usize,
    /// Largest rank.
    pub max_rank: usize,
    /// Most memory of loaded adapters together, in f32.
    pub memory_bytes_max: ByteSize,
    /// How long a request waits for a slot. Below the routers' `limits.claim_ack_ms_max`.
    pub wait_ms_max: u64,
}

impl Default for LoraSettings {
    fn default() -> Self {
        Self {
            modules: Vec::new(),
            folder: None,
            reread_ms: 2_000,
            max_loras: 8,
            max_rank: 64,
            memory_bytes_max: ByteSize(4 << 30),
            wait_ms_max: 4_000,
        }
    }
}

impl LoraSettings {
    /// Whether any adapters may be served.
    pub fn is_on(&self) -> bool {
        !self.modules.is_empty() || self.folder.is_some()
    }

    /// Bounds for the engine; no slots where no adapters are served.
    pub(crate) fn bounds(&self) -> AdapterBounds {
        match self.is_on() {
            true => AdapterBounds { slots_max: self.max_loras, rank_max: self.max_rank },
            false => AdapterBounds::default(),
        }
    }

    /// Name and folder of each module.
    pub(super) fn named(&self) -> impl Iterator<Item = (&str, &Path)> {
        self.modules.iter().filter_map(|module| parse(module))
    }
}

/// `name=folder`.
fn parse(module: &str) -> Option<(&str, &Path)> {
    let (name, path) = module.split_once('=')?;
    (AdapterCard::is_name(name) && !path.is_empty()).then(|| (name, Path::new(path)))
}

impl Check for LoraSettings {
    fn check(&self, at: &mut Checker) {
        let mut names: Vec<&str> = self.named().map(|(name, _)| name).collect();
        names.sort_unstable();
        let (all, count) = (names.len(), self.modules.len());
        names.dedup();
        at.require("modules", all == count, "name=folder each, where names have no spaces")
            .require("modules", names.len() == all, "names that differ")
            .require("modules", count <= AdapterCard::COUNT_MAX, "at most 4096 adapters")
            .range("reread_ms", self.reread_ms, 100..=3_600_000)
            .range("max_loras", self.max_loras, 1..=1024)
            .range("max_rank", self.max_rank, 1..=AdapterBounds::RANK_MAX)
            .range("memory_bytes_max", self.memory_bytes_max, ByteSize(1 << 16)..=ByteSize(1 << 44))
            .range("wait_ms_max", self.wait_ms_max, 1..=600_000);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_are_names_and_folders() {
        let problems = |modules: &[&str]| {
            let modules = modules.iter().map(|module| (*module).to_owned()).collect();
            let mut checker = Checker::default();
            LoraSettings { modules, ..LoraSettings::default() }.check(&mut checker);
            checker.into_problems().len()
        };
        assert_eq!(problems(&["a=/x", "b=y=z"]), 0);
        for modules in [&["a"][..], &["=x"], &["a="], &["a b=x"], &["a=x", "a=y"]] {
            assert_eq!(problems(modules), 1, "{modules:?}");
        }
        assert_eq!(parse("b=y=z"), Some(("b", Path::new("y=z"))));
    }

    #[test]
    fn without_adapters_the_engine_has_no_slots() {
        let off = LoraSettings::default();
        assert_eq!((off.is_on(), off.bounds().slots_max), (false, 0));
        let on = LoraSettings { folder: Some("x".into()), ..off };
        assert_eq!((on.is_on(), on.bounds()), (true, AdapterBounds { slots_max: 8, rank_max: 64 }));
    }
}
