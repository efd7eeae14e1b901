//! All workers, and those that a request may be placed on.

use super::WorkerHandle;
use super::adapters::{self, AnnouncedAdapters};
use crate::models::ModelText;
use crate::placement::{Own, Worker, pair_alike, tokens_max};
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
    /// Tokens that end an answer.
    pub(crate) end_tokens: Vec<TokenId>,
}

impl From<&ModelCard> for ModelKey {
    fn from(card: &ModelCard) -> Self {
        let end_tokens = card.end_tokens.clone();
        Self { id: card.id.clone(), fingerprint: card.fingerprint, bundle: card.bundle, end_tokens }
    }
}

/// The current workers. Reads are lock-free; only the supervisor writes.
#[derive(Debug)]
pub(crate) struct WorkerSet {
    known: ArcSwap<WorkersByModel>,
    /// Models that were served at the last lookup.
    served: ArcSwap<Served>,
    /// Names of models whose workers left, and when they left.
    left: Mutex<BTreeMap<String, Instant>>,
    /// When models were first served.
    since: Mutex<BTreeMap<ModelKey, Instant>>,
    stale_max: Duration,
}

/// All workers, sorted into models and groups when one joins or leaves.
#[derive(Debug, Default)]
struct WorkersByModel {
    workers: BTreeMap<Party, Arc<WorkerHandle>>,
    /// The workers of each model, in order.
    models: BTreeMap<ModelKey, Vec<Member>>,
}

/// A worker among those of its model.
#[derive(Debug)]
struct Member {
    worker: Arc<WorkerHandle>,
    /// Workers with the same number have the same compatibility.
    group: u32,
}

impl WorkersByModel {
    fn new(workers: BTreeMap<Party, Arc<WorkerHandle>>) -> Self {
        let mut models: BTreeMap<ModelKey, Vec<Member>> = BTreeMap::new();
        for worker in workers.values() {
            let members = models.entry(worker.key.clone()).or_default();
            let alike = members.iter().find(|member| pair_alike(&member.worker.record, &worker.record));
            let group = alike.map_or(members.len() as u32, |member| member.group);
            members.push(Member { worker: worker.clone(), group });
        }
        Self { workers, models }
    }

    fn decode_workers(&self) -> impl Iterator<Item = &Arc<WorkerHandle>> {
        let all = self.models.values().flatten().map(|member| &member.worker);
        all.filter(|worker| worker.record.role == Role::Decode)
    }
}

/// Served models, and the readiness that they were computed from.
#[derive(Debug, Default)]
struct Served {
    known: Arc<WorkersByModel>,
    /// Which decode workers were ready, with the adapters that they had announced.
    ready: Vec<Option<Arc<AnnouncedAdapters>>>,
    models: Arc<[Arc<ServedModel>]>,
}

/// A model whose workers left is remembered this long: a model whose workers restart is not an unknown model.
const REMEMBERED: Duration = Duration::from_secs(60);
/// Most names of models that are remembered.
const LEFT_MAX: usize = 1024;
/// Most models of which it is remembered since when they are served.
const SINCE_MAX: usize = 1024;

/// A model as served now.
#[derive(Clone, Debug)]
pub(crate) struct ServedModel {
    /// The key of its workers.
    pub(crate) key: ModelKey,
    pub(crate) card: ModelCard,
    /// Its text, if it has one.
    pub(crate) text: Option<Arc<ModelText>>,
    /// Most tokens of prompt and answer together: the context, or the largest pool if that is smaller.
    pub(crate) tokens_max: u64,
    /// When this router first served it.
    pub(crate) since: Instant,
    /// Adapters that clients may name in its place.
    pub(crate) adapters: BTreeMap<String, Digest>,
}

/// Workers that a request may be placed on: the view for the decision, and their handles.
#[derive(Debug, Default)]
pub(crate) struct Candidates {
    /// The view for placement.
    pub(crate) view: Vec<Worker>,
    /// In the same order.
    pub(crate) handles: Vec<Arc<WorkerHandle>>,
}

/// Why a name identifies no worker.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NotNamed {
    /// No worker has it.
    Nobody { known: Vec<String> },
    /// More than one incarnation of an instance has it: one replaces the other.
    Several {
        /// Their names, as the operator can use them.
        starts: Vec<String>,
    },
}

impl WorkerSet {
    /// An empty set. A load older than `stale_max` is ignored.
    pub(crate) fn new(stale_max: Duration) -> Self {
        Self {
            known: ArcSwap::default(),
            served: ArcSwap::default(),
            left: Mutex::default(),
            since: Mutex::default(),
            stale_max,
        }
    }

    /// Adds a worker. An older incarnation stays until its lease ends, since its streams depend on that.
    pub(crate) fn insert(&self, worker: Arc<WorkerHandle>) {
        self.change(|all| {
            all.insert(worker.party().clone(), worker);
        });
    }

    pub(crate) fn remove(&self, party: &Party, now: Instant) {
        if let Some(worker) = self.known.load().workers.get(party).filter(|w| w.record.role == Role::Decode) {
            let mut left = self.left.lock();
            left.retain(|_, at| now.saturating_duration_since(*at) < REMEMBERED);
            if left.len() < LEFT_MAX {
                let adapters = worker.adapters();
                let names = worker.record.card.names().chain(adapters.names());
                left.extend(names.take(LEFT_MAX).map(|name| (name.to_owned(), now)));
            }
        }
        self.change(|all| {
            all.remove(party);
        });
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<Party, Arc<WorkerHandle>>)) {
        let mut all = self.known.load().workers.clone();
        change(&mut all);
        self.known.store(Arc::new(WorkersByModel::new(all)));
    }

    /// Every worker known, admitted or not.
    pub(crate) fn all(&self) -> Vec<Arc<WorkerHandle>> {
        self.known.load().workers.values().cloned().collect()
    }

    /// Workers that a request of their model may be placed on.
    pub(crate) fn ready(&self, now: Instant) -> Vec<Arc<WorkerHandle>> {
        self.known.load().workers.values().filter(|worker| self.is_ready(worker, now)).cloned().collect()
    }

    fn is_ready(&self, worker: &WorkerHandle, now: Instant) -> bool {
        worker.text().is_some() && worker.load.measured(now, self.stale_max).is_some()
    }

    /// The worker that an operator names: an instance, or `name@incarnation`.
    pub(crate) fn named(&self, name: &str) -> Result<Arc<WorkerHandle>, NotNamed> {
        let known = self.known.load();
        let workers = &known.workers;
        let is_meant = |party: &Party| party.instance.as_str() == name || party.to_string() == name;
        let mut meant = workers.iter().filter(|(party, _)| is_meant(party));
        match (meant.next(), meant.next()) {
            (Some((_, worker)), None) => Ok(worker.clone()),
            (None, _) => Err(NotNamed::Nobody { known: workers.keys().map(|p| p.instance.to_string()).collect() }),
            (Some(_), Some(_)) => {
                let starts = workers.keys().filter(|p| is_meant(p)).map(Party::to_string).collect();
                Err(NotNamed::Several { starts })
            }
        }
    }

    /// Admitted workers of a model with a fresh load that satisfy `fits`.
    pub(crate) fn candidates(&self, key: &ModelKey, fits: impl Fn(&WorkerHandle) -> bool, now: Instant) -> Candidates {
        let mut candidates = Candidates::default();
        for Member { worker, group } in self.known.load().models.get(key).into_iter().flatten() {
            if worker.text().is_none() || !fits(worker) {
                continue;
            }
            if let Some(load) = worker.load.measured(now, self.stale_max) {
                let (record, not_with) = (worker.record.clone(), Vec::new());
                let (group, own) = (Some(*group), Own::default());
                candidates.view.push(Worker { record, group, load, own, not_with, cached_tokens: 0 });
                candidates.handles.push(worker.clone());
            }
        }
        candidates
    }

    /// Whether a decode worker with this model or adapter is registered but not ready, or left recently: it may be back soon.
    pub(crate) fn may_be_back(&self, name: &str, now: Instant) -> bool {
        let is_it = |worker: &Arc<WorkerHandle>| {
            let is_adapter = || worker.adapters().names().any(|n| n == name);
            worker.record.role == Role::Decode && (worker.record.card.names().any(|n| n == name) || is_adapter())
        };
        let left = |at: &Instant| now.saturating_duration_since(*at) < REMEMBERED;
        self.known.load().workers.values().any(is_it) || self.left.lock().get(name).is_some_and(left)
    }

    /// Models for which a request would be served now, by key.
    pub(crate) fn models(&self, now: Instant) -> Arc<[Arc<ServedModel>]> {
        let known = self.known.load_full();
        let ready = |worker: &Arc<WorkerHandle>| self.is_ready(worker, now).then(|| worker.adapters());
        let ready: Vec<_> = known.decode_workers().map(ready).collect();
        let served = self.served.load();
        let is_same = |(a, b): (&Option<Arc<_>>, &Option<Arc<_>>)| match (a, b) {
            (Some(a), Some(b)) => Arc::ptr_eq(a, b),
            (None, None) => true,
            _ => false,
        };
        if Arc::ptr_eq(&served.known, &known) && served.ready.iter().zip(&ready).all(is_same) {
            return served.models.clone();
        }
        let serving = known.decode_workers().zip(&ready).filter(|(_, ready)| ready.is_some()).map(|(worker, _)| worker);
        let models = served_by(serving, &mut self.since.lock(), now);
        self.served.store(Arc::new(Served { known: known.clone(), ready, models: models.clone() }));
        models
    }
}

/// The models of decode workers that are ready, by key.
fn served_by<'a>(
    ready: impl Iterator<Item = &'a Arc<WorkerHandle>>,
    since: &mut BTreeMap<ModelKey, Instant>,
    now: Instant,
) -> Arc<[Arc<ServedModel>]> {
    let mut models: BTreeMap<ModelKey, ServedModel> = BTreeMap::new();
    let mut workers: BTreeMap<ModelKey, Vec<&Arc<WorkerHandle>>> = BTreeMap::new();
    for worker in ready {
        workers.entry(worker.key.clone()).or_default().push(worker);
        let (card, tokens_max) = (&worker.record.card, tokens_max(&worker.record));
        let (key, text) = (worker.key.clone(), worker.text().cloned().flatten());
        let (adapters, since) = (BTreeMap::new(), since.get(&key).copied().unwrap_or(now));
        let served = || ServedModel { key: key.clone(), card: card.clone(), text, tokens_max, adapters, since };
        let entry = models.entry(key.clone()).or_insert_with(served);
        entry.tokens_max = entry.tokens_max.max(tokens_max);
        // During a rollout, a new alias is valid as soon as one worker has it.
        for name in &card.served_names {
            if !entry.card.served_names.contains(name) {
                entry.card.served_names.push(name.clone());
            }
        }
    }
    if since.len() + models.len() > SINCE_MAX {
        since.retain(|key, _| models.contains_key(key));
    }
    since.extend(models.iter().map(|(key, model)| (key.clone(), model.since)));
    for (key, workers) in workers {
        let adapters = adapters::by_name(workers.into_iter());
        models.entry(key).and_modify(|model| model.adapters = adapters);
    }
    models.into_values().map(Arc::new).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{handle, record};
    use baton_types::{AdapterCard, LoadReport};

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
        assert_eq!(set.named("d").unwrap_err(), NotNamed::Nobody { known: vec![] });
        let d = admitted(Role::Decode, "d", "m", 100);
        set.insert(d.clone());
        set.insert(admitted(Role::Prefill, "d-1", "m", 100));
        assert_eq!(set.named("d").unwrap().party(), d.party());
        assert_eq!(set.named(&d.party().to_string()).unwrap().party(), d.party());
        let known = vec!["d".to_owned(), "d-1".to_owned()];
        assert_eq!(set.named("d-").unwrap_err(), NotNamed::Nobody { known }, "a part of a name may mean somebody else");
        let mut again = (*d.record).clone();
        again.party.incarnation.0 += 1;
        let again = Arc::new(handle(again));
        set.insert(again.clone());
        let starts = vec![d.party().to_string(), again.party().to_string()];
        assert_eq!(set.named("d").unwrap_err(), NotNamed::Several { starts });
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
    fn adapters_are_those_that_most_ready_decode_workers_have() {
        let set = WorkerSet::new(Duration::from_secs(3));
        let now = Instant::now();
        let card = |name: &str, content: u8| AdapterCard { name: name.into(), digest: Digest([content; 32]) };
        let announce = |name: &str, role, cards: &[AdapterCard]| {
            let worker = admitted(role, name, "m", 100);
            set.insert(worker.clone());
            worker.set_adapters(cards.to_vec());
            worker
        };
        let served = || {
            let models = set.models(now);
            models[0].adapters.iter().map(|(name, digest)| (name.clone(), digest.0[0])).collect::<Vec<_>>()
        };
        announce("d-0", Role::Decode, &[card("a", 1), card("b", 9)]);
        announce("p-0", Role::Prefill, &[card("only-prefill", 1)]);
        let changes = announce("d-1", Role::Decode, &[card("a", 2), card("b", 8)]);
        assert_eq!(served(), [("a".into(), 1), ("b".into(), 8)], "of equally many, the smallest digest");
        announce("d-2", Role::Decode, &[card("a", 2)]);
        assert_eq!(served(), [("a".into(), 2), ("b".into(), 8)], "most of them have this one");
        changes.set_adapters(vec![card("c", 3)]);
        assert_eq!(served(), [("a".into(), 1), ("b".into(), 9), ("c".into(), 3)]);
        assert!(changes.adapters().has(&Digest([3; 32])) && !changes.adapters().has(&Digest([2; 32])));
        set.remove(changes.party(), now);
        assert!(set.may_be_back("c", now) && set.may_be_back("a", now) && !set.may_be_back("only-prefill", now));
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
        assert!(Arc::ptr_eq(&models, &set.models(now)), "what nothing changed is kept");
        assert_eq!(models.iter().map(|m| m.card.served_names.clone()).collect::<Vec<_>>(), [["old", "new"]]);
        set.remove(old.party(), now);
        let later = now + Duration::from_secs(1);
        assert_eq!(set.models(later).iter().map(|m| m.since).collect::<Vec<_>>(), [now], "since it was first served");
        assert!(set.may_be_back("old", now) && set.may_be_back("new", now) && !set.may_be_back("other", now));
        assert!(!set.may_be_back("old", now + REMEMBERED));
    }
}
