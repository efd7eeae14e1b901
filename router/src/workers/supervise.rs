//! Follows membership: one task per worker receives its load reports, loads its text, and admits or evicts it.

use super::{WorkerHandle, WorkerSet};
use crate::metrics::{MembershipChange, MembershipChanges};
use crate::models::TextCache;
use crate::placement::why_unpaired;
use crate::port::{Connector, WorkerReport};
use crate::prefixes::{Dropped, Prefixes};
use baton_node::backoff::Backoff;
use baton_node::membership::RouterMembership;
use baton_types::{Party, Runtime};
use futures::{FutureExt as _, StreamExt as _};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::{CancellationToken, DropGuard};

/// Wait before a worker is called again; doubles to the maximum, with jitter.
const BACKOFF_MIN: Duration = Duration::from_millis(50);
const BACKOFF_MAX: Duration = Duration::from_secs(2);
/// A stream with missing reports is reopened at once, but no more often than this.
const MISSED_EVERY: Duration = Duration::from_secs(1);

/// What all workers' tasks share.
#[derive(Clone)]
pub(crate) struct Supervisor {
    pub(crate) membership: Arc<dyn RouterMembership>,
    /// Clock, tasks and random numbers.
    pub(crate) runtime: Arc<dyn Runtime>,
    /// How to connect to workers.
    pub(crate) connector: Arc<dyn Connector>,
    /// Where workers are kept.
    pub(crate) workers: Arc<WorkerSet>,
    /// Counts workers that join and leave.
    pub(crate) changes: MembershipChanges,
    /// What they have cached; `None` without an index.
    pub(crate) prefixes: Option<Arc<Prefixes>>,
    /// Cache of tokenizers and templates.
    pub(crate) texts: Arc<TextCache>,
    /// Name of this router, for the workers' logs.
    pub(crate) name: String,
    /// A worker without reports for this long is called again.
    pub(crate) silent_max: Duration,
}

/// Why a stream of reports ended.
enum End {
    /// The worker's reports do not arrive.
    Lost(String),
    /// A cache report is missing: the next stream begins with a complete snapshot.
    Missed,
}

/// A followed worker: dropping it ends its task.
struct Followed {
    revision: u64,
    handle: Arc<WorkerHandle>,
    _task: DropGuard,
}

/// Runs until `stop` is cancelled.
pub(crate) async fn supervise(supervisor: Supervisor, stop: CancellationToken) {
    let mut view = supervisor.membership.view();
    let mut followed: BTreeMap<Party, Followed> = BTreeMap::new();
    loop {
        let members = view.borrow_and_update().clone();
        followed.retain(|party, known| {
            let stays = members.get(party).is_some();
            if !stays {
                supervisor.changes.count(&known.handle.record, MembershipChange::Left);
                supervisor.workers.remove(party, supervisor.runtime.now());
            }
            stays
        });
        for member in members.members.values() {
            let (party, revision) = (&member.record.party, member.registration.revision);
            match followed.get_mut(party) {
                Some(known) if known.revision == revision => {}
                Some(known) => {
                    known.revision = revision;
                    supervisor.changes.count(&member.record, MembershipChange::RegisteredAgain);
                    // Registered again: the worker lost its admitted state.
                    if known.handle.is_admitted() {
                        supervisor.membership.admit(party);
                    }
                }
                None => match supervisor.connector.connect(&member.record) {
                    Ok(link) => {
                        let handle = Arc::new(WorkerHandle::new(member.record.clone(), link));
                        supervisor.workers.insert(handle.clone());
                        supervisor.changes.count(&member.record, MembershipChange::Joined);
                        let task = stop.child_token();
                        let following = follow(supervisor.clone(), handle.clone(), task.clone());
                        supervisor.runtime.spawn(following.boxed());
                        followed.insert(party.clone(), Followed { revision, handle, _task: task.drop_guard() });
                    }
                    Err(error) => {
                        supervisor.membership.evict(party, &error.to_string());
                    }
                },
            }
        }
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            changed = view.changed() => if changed.is_err() { return },
        }
    }
}

async fn follow(supervisor: Supervisor, worker: Arc<WorkerHandle>, stop: CancellationToken) {
    let runtime = supervisor.runtime.clone();
    let mut backoff = Backoff::new(BACKOFF_MIN, BACKOFF_MAX);
    let listen = async {
        let mut missed = None;
        loop {
            let mut heard = false;
            let end = match supervisor.listen(&worker, &mut heard).await {
                End::Lost(end) => end,
                End::Missed => {
                    let now = runtime.now();
                    let last: Option<Instant> = missed.replace(now);
                    runtime.sleep_until(last.map_or(now, |last| last + MISSED_EVERY)).await;
                    continue;
                }
            };
            worker.load.lost();
            worker.set_trouble(Some(&end));
            if heard {
                backoff.reset();
            } else {
                supervisor.evict(&worker, &end, &mut backoff);
            }
            runtime.sleep(backoff.wait_by(runtime.random_share())).await;
        }
    };
    tokio::select! {
        biased;
        () = stop.cancelled() => {}
        () = listen => {}
    }
}

impl Supervisor {
    /// Receives one stream of reports to its end, and returns why it ended. `heard` becomes true once the worker is
    /// admitted on it.
    async fn listen(&self, worker: &WorkerHandle, heard: &mut bool) -> End {
        let mut follower = self.prefixes.as_ref().map(|prefixes| prefixes.follow(&worker.record));
        let runtime = &*self.runtime;
        let silent_max = self.silent_max;
        let endpoint = &worker.record.endpoint;
        let watch = worker.link().watch(&self.name, follower.is_some());
        let mut reports = match runtime.until(runtime.now() + silent_max, watch).await {
            Some(Ok(reports)) => reports,
            Some(Err(e)) => return End::Lost(format!("it cannot be reached at {endpoint}: {}", e.error())),
            None => return End::Lost(format!("it did not answer at {endpoint} within {silent_max:?}")),
        };
        loop {
            let report = match runtime.until(runtime.now() + silent_max, reports.next()).await {
                Some(Some(Ok(report))) => report,
                Some(Some(Err(e))) => return End::Lost(format!("its reports broke off: {}", e.error())),
                Some(None) => return End::Lost("it ended its reports".into()),
                None => return End::Lost(format!("it reported nothing for {silent_max:?}")),
            };
            let report = match report {
                WorkerReport::Load(report) => report,
                WorkerReport::Cache(update) => {
                    match follower.as_mut().map_or(Ok(()), |follower| follower.take(&update)) {
                        Ok(()) => {}
                        Err(Dropped::Missed) => {
                            tracing::info!(worker = %worker.party(), "misses cache changes of a worker, and requests a snapshot");
                            return End::Missed;
                        }
                        Err(reason) => {
                            tracing::warn!(worker = %worker.party(), %reason, "does not know what a worker has cached");
                            follower = None;
                        }
                    }
                    continue;
                }
                WorkerReport::Adapters(Ok(cards)) => {
                    worker.set_adapters(cards);
                    continue;
                }
                WorkerReport::Adapters(Err(reason)) => {
                    tracing::warn!(worker = %worker.party(), reason, "does not know which adapters a worker has");
                    worker.set_adapters(Vec::new());
                    continue;
                }
                WorkerReport::AnotherProcess => {
                    return End::Lost(format!("another process answers at {endpoint}"));
                }
            };
            if worker.text().is_none()
                && let Some(digest) = worker.record.card.bundle
            {
                match self.texts.get(digest, worker.link(), runtime).await {
                    Ok(text) => worker.set_text(Some(text)),
                    Err(error) => return End::Lost(error.to_string()),
                }
            } else if worker.text().is_none() {
                worker.set_text(None);
            }
            if report.draining {
                worker.set_draining();
            }
            worker.load.report(&report, &worker.record, runtime.now());
            worker.set_trouble(None);
            *heard = true;
            self.admit(worker);
        }
    }

    fn admit(&self, worker: &WorkerHandle) {
        if !worker.set_admitted(true) {
            tracing::info!(worker = %worker.party(), model = worker.record.card.id, "admits a worker");
            self.changes.count(&worker.record, MembershipChange::Admitted);
            self.membership.admit(worker.party());
            let ready = self.workers.ready(self.runtime.now());
            let all: Vec<_> = ready.iter().map(|other| &*other.record).collect();
            if let Some(mismatch) = why_unpaired(&worker.record, &all) {
                tracing::warn!(worker = %worker.party(), %mismatch, "no worker of the other role fits this one: no KV passes to or from it");
            }
        }
    }

    fn evict(&self, worker: &WorkerHandle, reason: &str, backoff: &mut Backoff<String>) {
        let is_news = backoff.is_news(reason.to_owned());
        if worker.set_admitted(false) {
            tracing::warn!(worker = %worker.party(), reason, "evicts a worker");
            self.changes.count(&worker.record, MembershipChange::Evicted);
            self.membership.evict(worker.party(), reason);
        } else if is_news {
            tracing::warn!(worker = %worker.party(), reason, "does not admit a worker");
        }
    }
}
