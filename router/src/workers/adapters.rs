//! The adapters that workers announce.

use super::WorkerHandle;
use baton_types::{AdapterCard, Digest};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;

/// What one worker announced last.
#[derive(Debug, Default)]
pub(crate) struct AnnouncedAdapters {
    cards: Vec<AdapterCard>,
    digests: HashSet<Digest>,
}

impl From<Vec<AdapterCard>> for AnnouncedAdapters {
    fn from(cards: Vec<AdapterCard>) -> Self {
        Self { digests: cards.iter().map(|card| card.digest).collect(), cards }
    }
}

impl AnnouncedAdapters {
    /// Whether the worker can serve the adapter with this digest.
    pub(crate) fn has(&self, digest: &Digest) -> bool {
        self.digests.contains(digest)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.cards.iter().map(|card| card.name.as_str())
    }
}

/// Adapters of a model by name. While workers have different contents under one name, as when a folder is replaced, it is the one that most of
/// them have, and of equally many the one with the smallest digest: a request never mixes two.
pub(super) fn by_name<'a>(workers: impl Iterator<Item = &'a Arc<WorkerHandle>>) -> BTreeMap<String, Digest> {
    let mut counts: BTreeMap<String, BTreeMap<Digest, usize>> = BTreeMap::new();
    for worker in workers {
        for AdapterCard { name, digest } in &worker.adapters().cards {
            *counts.entry(name.clone()).or_default().entry(*digest).or_default() += 1;
        }
    }
    let best = |digests: BTreeMap<Digest, usize>| {
        let best = digests.into_iter().min_by_key(|(digest, count)| (std::cmp::Reverse(*count), *digest));
        best.map(|(digest, _)| digest)
    };
    counts.into_iter().filter_map(|(name, digests)| Some((name, best(digests)?))).collect()
}
