//! All workers, and those that a request may be placed on.

use super::WorkerHandle;
use crate::models::ModelText;
use crate::placement::{Worker, tokens_max};
use arc_swap::ArcSwap;
use baton_types::{Digest, ModelCard, Party, Role, TokenId};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Workers with the same key answer the same requests with the same tokens.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ModelKey {
    /// Id of the model.
    pub(crate) id: String,
    /// Digest of configuration and weights.
    pub(crate) fingerprint: Digest,
    /// Digest of the text bundle.
    pub(crate) bundle: Option<Digest>,
    /// What ends an answer.
    pub(crate) end_tokens: Vec<TokenId>,
}

impl From<&ModelCard> for ModelKey {
    fn from(card: &ModelCard) -> Self {
        let end_tokens = card.end_tokens.clone();
        Self { id: card.id.clone(), fingerprint: card.fingerprint, bundle: card.bundle, end_tokens }
    }
}

/// The workers of this moment. Reads are lock-free; the supervisor alone writes.
#[derive(Debug)]
pub(crate) struct WorkerSet {
    workers: ArcSwap<BTreeMap<Party, Arc<WorkerHandle>>>,
    /// Names of models whose workers left, and when.
    left: Mutex<BTreeMap<String, Instant>>,
    stale_max: Duration,
}

/// A model whose workers left is remembered for so long: one that restarts is no model that nobody knows.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Most names remembered.
const LEFT_MAX: usize = 1024;

/// A model as served now.
#[derive(Clone, Debug)]
pub(crate) struct ServedModel {
    /// Names its workers.
    pub(crate) key: ModelKey,
    /// Its card.
    pub(crate) card: ModelCard,
    /// Its text, where it has one.
    pub(crate) text: Option<Arc<ModelText>>,
    /// Prompt and answer together may hold so many tokens: the context, or the largest pool where that is smaller.
    pub(crate) tokens_max: u64,
}

/// Workers that a request may be placed on: a view for the decision, and the handles behind it.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    /// What placement sees.
    pub(crate) view: Vec<Worker>,
    /// In the same order.
    pub(crate) handles: Vec<Arc<WorkerHandle>>,
}

/// Why a name names no worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Unnamed {
    /// Nobody has it.
    Nobody {
        /// Who is registered.
        known: Vec<String>,
    },
    /// More than one start of an instance has it: one replaces the other.
    Several {
        /// Which, as they may be named.
        starts: Vec<String>,
    },
}

impl WorkerSet {
    /// An empty set. Load older than `stale_max` counts as none.
    pub(crate) fn new(stale_max: Duration) -> Self {
        Self { workers: ArcSwap::default(), left: Mutex::default(), stale_max }
    }

    /// Adds a worker; an older incarnation stays until its lease ends, which is what its streams go by.
    pub(crate) fn insert(&self, worker: Arc<WorkerHandle>) {
        self.workers.rcu(|all| {
            let mut all = BTreeMap::clone(all);
            all.insert(worker.party().clone(), worker.clone());
            all
        });
    }

    /// Removes a worker.
    pub(crate) fn remove(&self, party: &Party, now: Instant) {
        if let Some(worker) = self.workers.load().get(party).filter(|w| w.record.role == Role::Decode) {
            let mut left = self.left.lock();
            left.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
            if left.len() < LEFT_MAX {
                left.extend(worker.record.card.names().map(|name| (name.to_owned(), now)));
            }
        }
        self.workers.rcu(|all| {
            let mut all = BTreeMap::clone(all);
            all.remove(party);
            all
        });
    }

    /// Every worker known, admitted or not.
    pub(crate) fn all(&self) -> Vec<Arc<WorkerHandle>> {
        self.workers.load().values().cloned().collect()
    }

    /// Workers that a request of their model may be placed on.
    pub(crate) fn ready(&self, now: Instant) -> Vec<Arc<WorkerHandle>> {
        let is_ready = |w: &&Arc<WorkerHandle>| w.text().is_some() && w.load.measured(now, self.stale_max).is_some();
        self.workers.load().values().filter(is_ready).cloned().collect()
    }

    /// The worker that an operator means: the name of an instance, or `name@incarnation`.
    pub(crate) fn named(&self, name: &str) -> Result<Arc<WorkerHandle>, Unnamed> {
        let workers = self.workers.load();
        let is_meant = |party: &Party| party.instance.as_str() == name || party.to_string() == name;
        let mut meant = workers.iter().filter(|(party, _)| is_meant(party));
        match (meant.next(), meant.next()) {
            (Some((_, worker)), None) => Ok(worker.clone()),
            (None, _) => Err(Unnamed::Nobody { known: workers.keys().map(|p| p.instance.to_string()).collect() }),
            (Some(_), Some(_)) => {
                let starts = workers.keys().filter(|p| is_meant(p)).map(Party::to_string).collect();
                Err(Unnamed::Several { starts })
            }
        }
    }

    /// Admitted workers of a model with a fresh load, as far as they fit.
    pub(crate) fn candidates(&self, key: &ModelKey, fits: impl Fn(&WorkerHandle) -> bool, now: Instant) -> Candidates {
        let mut candidates = Candidates::default();
        for worker in self.workers.load().values() {
            if worker.text().is_none() || worker.key != *key || !fits(worker) {
                continue;
            }
            if let Some(load) = worker.load.measured(now, self.stale_max) {
                let (record, not_with) = (worker.record.clone(), Vec::new());
                candidates.view.push(Worker { record, load, not_with, cached_tokens: 0 });
                candidates.handles.push(worker.clone());
            }
        }
        candidates
    }

    /// Whether a decode worker serves this name that is registered and not ready, or left a while ago: it may be back in a moment.
    pub(crate) fn may_be_back(&self, name: &str, now: Instant) -> bool {
        let is_it = |worker: &Arc<WorkerHandle>| {
            worker.record.role == Role::Decode && worker.record.card.names().any(|n| n == name)
        };
        let left = |at: &Instant| now.saturating_duration_since(*at) < REMEMBERED;
        self.workers.load().values().any(is_it) || self.left.lock().get(name).is_some_and(left)
    }

    /// Models that a request would be served for now, by key.
    pub(crate) fn models(&self, now: Instant) -> Vec<ServedModel> {
        let mut models: BTreeMap<ModelKey, ServedModel> = BTreeMap::new();
        for worker in self.workers.load().values() {
            let (card, Some(text)) = (&worker.record.card, worker.text()) else { continue };
            if worker.record.role != Role::Decode || worker.load.measured(now, self.stale_max).is_none() {
                continue;
            }
            let tokens_max = tokens_max(&worker.record);
            let key = worker.key.clone();
            let served = ServedModel { key: key.clone(), card: card.clone(), text: text.clone(), tokens_max };
            let entry = models.entry(key).or_insert(served);
            entry.tokens_max = entry.tokens_max.max(tokens_max);
            // A further name that is rolled out counts from the first worker on that has it.
            for name in &card.served_names {
                if !entry.card.served_names.contains(name) {
                    entry.card.served_names.push(name.clone());
                }
            }
        }
        models.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{handle, record};
    use baton_types::LoadReport;

    fn admitted(role: Role, name: &str, model: &str, capacity: u64) -> Arc<WorkerHandle> {
        let mut record = record(role, name);
        record.card.id = model.into();
        record.capacity_tokens = capacity;
        let worker = handle(record);
        worker.set_text(None);
        worker.load.report(&LoadReport { healthy: true, ..Default::default() }, &worker.record, Instant::now());
        Arc::new(worker)
    }

    #[test]
    fn operators_name_one_start() {
        let set = WorkerSet::new(Duration::from_secs(3));
        assert_eq!(set.named("d").unwrap_err(), Unnamed::Nobody { known: vec![] });
        let d = admitted(Role::Decode, "d", "m", 100);
        set.insert(d.clone());
        set.insert(admitted(Role::Prefill, "d-1", "m", 100));
        assert_eq!(set.named("d").unwrap().party(), d.party());
        assert_eq!(set.named(&d.party().to_string()).unwrap().party(), d.party());
        let known = vec!["d".to_owned(), "d-1".to_owned()];
        assert_eq!(set.named("d-").unwrap_err(), Unnamed::Nobody { known }, "a part of a name may mean somebody else");
        let mut again = (*d.record).clone();
        again.party.incarnation.0 += 1;
        let again = Arc::new(handle(again));
        set.insert(again.clone());
        let starts = vec![d.party().to_string(), again.party().to_string()];
        assert_eq!(set.named("d").unwrap_err(), Unnamed::Several { starts });
        assert_eq!(set.named(&again.party().to_string()).unwrap().party(), again.party());
    }

    #[test]
    fn only_admitted_workers_of_the_model_are_candidates() {
        let set = WorkerSet::new(Duration::from_secs(3));
        let small = admitted(Role::Decode, "small", "m", 100);
        set.insert(small.clone());
        set.insert(admitted(Role::Decode, "large", "m", 5000));
        set.insert(admitted(Role::Prefill, "p", "m", 5000));
        set.insert(admitted(Role::Decode, "other", "n", 5000));
        set.insert(admitted(Role::Prefill, "alone", "without-decode", 5000));
        let fresh = handle(record(Role::Decode, "not-admitted"));
        set.insert(Arc::new(fresh));
        let now = Instant::now();
        let models = set.models(now);
        assert_eq!(
            models.iter().map(|m| (m.card.id.as_str(), m.tokens_max)).collect::<Vec<_>>(),
            [("m", 5000), ("n", 5000)]
        );
        let names = |excluded: &[Party]| -> Vec<String> {
            let view = set.candidates(&models[0].key, |w| !excluded.contains(w.party()), now).view;
            view.iter().map(|w| w.record.party.instance.to_string()).collect()
        };
        let mut ends = record(Role::Decode, "ends-otherwise");
        ends.card.end_tokens.push(77);
        assert_ne!(ModelKey::from(&ends.card), models[0].key, "it would answer the same request with other tokens");
        assert_eq!(names(&[]), ["large", "p", "small"]);
        assert_eq!(names(&[small.party().clone()]), ["large", "p"]);
        set.remove(small.party(), now);
        assert_eq!(names(&[]), ["large", "p"]);
        assert!(set.models(now + Duration::from_secs(9)).is_empty(), "nobody was heard for long");
    }

    #[test]
    fn models_are_remembered_and_have_the_names_of_all_their_workers() {
        let set = WorkerSet::new(Duration::from_secs(3));
        let named = |worker: &str, name: &str| {
            let mut record = record(Role::Decode, worker);
            record.card.served_names = vec![name.into()];
            let worker = handle(record);
            worker.set_text(None);
            worker.load.report(&LoadReport { healthy: true, ..Default::default() }, &worker.record, Instant::now());
            Arc::new(worker)
        };
        let (old, new) = (named("a", "old"), named("b", "new"));
        let now = Instant::now();
        assert!(!set.may_be_back("old", now));
        set.insert(old.clone());
        set.insert(new);
        let models = set.models(now);
        assert_eq!(models.iter().map(|m| m.card.served_names.clone()).collect::<Vec<_>>(), [["old", "new"]]);
        set.remove(old.party(), now);
        assert!(set.may_be_back("old", now) && set.may_be_back("new", now) && !set.may_be_back("other", now));
        assert!(!set.may_be_back("old", now + REMEMBERED));
    }
}
