//! The router's side: follows the records, and writes a verdict on each worker.

mod verdicts;

use super::cluster_check::{ClusterCheck, Nodes};
use super::connection::{Node, within};
use super::error::EtcdError;
use super::keys::Keys;
use super::lease::{Lease, connect_for, give_back};
use super::offline_start::{OfflineSources, add_offline, keep_cache};
use super::probe::{Probe, Verdict, WaitForReregistration};
use super::view::{Change, EtcdView, Position, ViewLimits};
use super::{EtcdConfig, history};
use crate::grpc::WatchProbe;
use crate::identity::Identity;
use crate::membership::state::RouterVerdict;
use crate::membership::{MembershipView, RouterMembership, StoreState};
use baton_types::{InstanceId, Party};
use etcd_client::{Client, EventType, WatchOptions, WatchResponse};
use futures::StreamExt as _;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};
use verdicts::StoredVerdicts;

/// Records that vanish within this time are evaluated together, however short the grace is. Leases that were granted
/// together end together, and etcd checks for expired ones twice a second.
const WINDOW_MIN: Duration = Duration::from_secs(2);
/// A removed record is acted on after this, as often as etcd checks for expired leases.
const SETTLE: Duration = Duration::from_millis(500);
/// Suspected workers that are asked concurrently.
const PROBES_MAX: usize = 32;

/// One router's view from etcd. Clones share it; it follows etcd until closed or dropped.
#[derive(Clone)]
pub struct EtcdRouter {
    shared: Arc<Shared>,
    _stop: Arc<DropGuard>,
}

impl fmt::Debug for EtcdRouter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("EtcdRouter").field("keys", &self.shared.keys).finish_non_exhaustive()
    }
}

pub(super) struct Shared {
    pub(super) config: EtcdConfig,
    pub(super) members_max: usize,
    keys: Keys,
    /// The name in this router's verdict keys; new at every start.
    name: String,
    pub(super) probe: Box<dyn Probe>,
    probes_max: usize,
    /// An observer writes no verdicts.
    looks_on: bool,
    cluster_check: ClusterCheck,
    inner: Mutex<Inner>,
    pub(super) view: watch::Sender<Arc<MembershipView>>,
    /// A session with etcd ended, or could not begin.
    pub(super) missed: Notify,
    /// A verdict has to be written.
    wake: Notify,
    /// A suspected member may be due to be asked.
    doubts: Notify,
    /// There is room for records that were left out.
    room: Notify,
    pub(super) stop: CancellationToken,
    /// After `stop`: the last view is in the record cache.
    remembered: CancellationToken,
}

struct Inner {
    store: StoreState,
    view: EtcdView,
    /// The verdicts to write to etcd.
    verdicts: BTreeMap<InstanceId, (Party, RouterVerdict)>,
}

impl EtcdRouter {
    /// Starts to follow etcd, without an identity; must be called within a tokio runtime.
    pub fn start(config: &EtcdConfig, members_max: usize) -> Self {
        Self::start_as(config, members_max, &Identity::default(), OfflineSources::default())
    }

    /// Like [`EtcdRouter::start`], but asks workers with this router's identity. If etcd does not answer, it uses
    /// cached records and workers that it finds.
    pub fn start_as(config: &EtcdConfig, members_max: usize, identity: &Identity, offline: OfflineSources) -> Self {
        let probe = WatchProbe { max: Duration::from_millis(config.probe_ms_max), identity: identity.clone() };
        Self::start_with(config, members_max, Box::new(probe), offline)
    }

    /// Like [`EtcdRouter::start_as`], with the caller's own probe.
    pub fn start_with(config: &EtcdConfig, members_max: usize, probe: Box<dyn Probe>, offline: OfflineSources) -> Self {
        Self::follow(config, members_max, probe, Some((StoredVerdicts::new(config), offline)))
    }

    /// The same view for a worker, which writes no verdicts and asks no worker: a suspected member has the grace to
    /// register again.
    pub(super) fn look_on(config: &EtcdConfig, members_max: usize) -> Self {
        Self::follow(
            config,
            members_max,
            Box::new(WaitForReregistration(Duration::from_millis(config.view_grace_ms))),
            None,
        )
    }

    fn follow(
        config: &EtcdConfig,
        members_max: usize,
        probe: Box<dyn Probe>,
        own: Option<(StoredVerdicts, OfflineSources)>,
    ) -> Self {
        let (verdicts, offline) = own.unzip();
        let grace = Duration::from_millis(config.view_grace_ms);
        let limits = ViewLimits {
            grace,
            settle: SETTLE,
            window: grace.max(WINDOW_MIN),
            probe_every: Duration::from_millis(config.probe_ms_max) * 2,
            members_max,
        };
        // Revisions start at the clock, so that they still grow after the router restarts.
        let start = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_millis() as u64;
        let view = EtcdView::new(limits, start);
        let stop = CancellationToken::new();
        let shared = Arc::new(Shared {
            config: config.clone(),
            members_max,
            keys: Keys(config.prefix.clone()),
            name: format!("{:016x}", rand::random::<u64>()),
            probe,
            probes_max: if verdicts.is_some() { PROBES_MAX } else { members_max },
            looks_on: verdicts.is_none(),
            cluster_check: ClusterCheck::default(),
            view: watch::Sender::new(Arc::new(view.view())),
            inner: Mutex::new(Inner {
                store: StoreState::unheard(Instant::now().into_std()),
                view,
                verdicts: BTreeMap::new(),
            }),
            missed: Notify::new(),
            wake: Notify::new(),
            doubts: Notify::new(),
            room: Notify::new(),
            stop: stop.clone(),
            remembered: CancellationToken::new(),
        });
        let follower = Follower { shared: shared.clone(), node: Node::any(), verdicts };
        tokio::spawn(follower.run(offline.unwrap_or_default()));
        Self { shared, _stop: Arc::new(stop.drop_guard()) }
    }

    /// Stops following, and removes this router's verdicts. Workers keep their readiness.
    pub fn close(&self) {
        self.shared.stop.cancel();
    }

    /// Returns once this router is closed and has tried to cache the records that it knew, if it caches any. A process that
    /// ends before loses them.
    pub async fn remembered(&self) {
        self.shared.remembered.cancelled().await;
    }

    /// Suspected members, which stay in the view although their record is gone.
    pub fn doubted(&self) -> usize {
        self.shared.inner.lock().view.doubted()
    }

    /// Members that etcd has not confirmed, if it has not answered since this router started; `None` once it has.
    pub fn unconfirmed(&self) -> Option<usize> {
        self.shared.inner.lock().view.unconfirmed()
    }

    /// Whether the view is up to date with etcd.
    pub fn store(&self) -> StoreState {
        self.shared.inner.lock().store
    }

    /// The last reported state of the etcd nodes.
    pub fn nodes(&self) -> Nodes {
        self.shared.cluster_check.nodes()
    }

    /// Records that the view had no room for at the last list, or since.
    pub fn left_out(&self) -> usize {
        self.shared.inner.lock().view.left_out()
    }
}

impl RouterMembership for EtcdRouter {
    fn view(&self) -> watch::Receiver<Arc<MembershipView>> {
        self.shared.view.subscribe()
    }

    fn admit(&self, party: &Party) -> bool {
        self.shared.say(party, RouterVerdict::Admitted)
    }

    fn evict(&self, party: &Party, reason: &str) -> bool {
        self.shared.say(party, RouterVerdict::Evicted(reason.chars().take(512).collect()))
    }
}

impl Shared {
    fn say(&self, party: &Party, verdict: RouterVerdict) -> bool {
        let mut inner = self.inner.lock();
        let known = self.view.borrow().get(party).is_some();
        if known {
            inner.verdicts.insert(party.instance.clone(), (party.clone(), verdict));
            self.wake.notify_one();
        }
        known
    }

    /// Whether etcd has ever answered.
    pub(super) fn has_answered(&self) -> bool {
        self.inner.lock().view.unconfirmed().is_none()
    }

    /// The position up to which the view follows etcd; `None` if etcd has never answered.
    pub(super) fn confirmed_position(&self) -> Option<Position> {
        let inner = self.inner.lock();
        inner.view.position().filter(|_| inner.view.unconfirmed().is_none())
    }

    /// Records whether etcd answers now.
    fn note_answer(&self, answers: bool) {
        self.inner.lock().store.answers(answers, Instant::now().into_std());
    }

    /// Changes the view and publishes it.
    pub(super) fn change(&self, change: impl FnOnce(&mut EtcdView)) {
        let mut inner = self.inner.lock();
        let inner = &mut *inner;
        let left_out = inner.view.left_out();
        change(&mut inner.view);
        if inner.view.left_out() > left_out {
            let left_out = inner.view.left_out();
            tracing::warn!(left_out, "leaves out instances beyond the limit (membership.members_max)");
        }
        if inner.view.wants_list() {
            self.room.notify_one();
        }
        if self.view.borrow().revision != inner.view.revision() {
            let view = inner.view.view();
            inner.verdicts.retain(|_, (party, _)| view.get(party).is_some());
            self.view.send_replace(Arc::new(view));
        }
        self.wake.notify_one();
        self.doubts.notify_one();
    }
}

/// The task behind a router.
struct Follower {
    shared: Arc<Shared>,
    node: Node,
    /// `None` for an observer.
    verdicts: Option<StoredVerdicts>,
}

impl Follower {
    async fn run(mut self, from: OfflineSources) {
        let shared = self.shared.clone();
        let keep_cache = async {
            keep_cache(&shared, &from).await;
            shared.remembered.cancel();
        };
        let follow = async {
            self.until_closed(&from).await;
            give_back(self.lease(), &shared.config, self.node).await;
        };
        tokio::join!(follow, keep_cache);
    }

    async fn until_closed(&mut self, from: &OfflineSources) {
        let shared = self.shared.clone();
        let mut backoff = shared.config.backoff();
        let mut resume = false;
        let sessions = async {
            loop {
                let mut worked = false;
                let Err(error) = self.session(resume, &mut worked).await;
                shared.note_answer(false);
                shared.missed.notify_one();
                self.node = self.node.next();
                // After a failed connect, another etcd may have taken over the address: list again, whatever its
                // revision.
                resume = worked && !matches!(error, EtcdError::WatchEnded(_));
                if let Some(verdicts) = self.verdicts.as_mut().filter(|_| matches!(error, EtcdError::LeaseGone)) {
                    verdicts.lost();
                }
                tokio::time::sleep(error.wait(&mut backoff, worked)).await;
            }
        };
        let add_offline = async {
            add_offline(&shared, from).await;
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = sessions => {}
            () = ask_doubted(&shared) => {}
            () = add_offline => {}
            () = shared.stop.cancelled() => {}
        }
    }

    /// From connecting to the first failure. `worked` becomes true once the view is that of etcd.
    async fn session(&mut self, resume: bool, worked: &mut bool) -> Result<Infallible, EtcdError> {
        let shared = self.shared.clone();
        let client = connect_for(self.lease(), &shared.config, self.node).await?;
        shared.cluster_check.check(&shared.config, self.node, &client).await?;
        let from = match resume_from(&shared, &client).await? {
            Some(revision) if resume => revision,
            _ => {
                self.verdicts.iter_mut().for_each(StoredVerdicts::doubt);
                list(&shared, &client).await?
            }
        };
        *worked = true;
        shared.note_answer(true);
        let cluster_check = shared.cluster_check.keep(&shared.config, self.node, &client);
        let Some(verdicts) = &mut self.verdicts else {
            return tokio::select! {
                end = follow(&shared, &client, from) => end,
                end = cluster_check => end,
            };
        };
        let mut renewal = None;
        let end = tokio::select! {
            end = follow(&shared, &client, from) => end,
            end = verdicts.keep(&shared, &client, &mut renewal) => end,
            end = cluster_check => end,
        };
        verdicts.ended(renewal);
        end
    }

    /// The lease of its verdicts.
    fn lease(&self) -> Option<Lease> {
        self.verdicts.as_ref().and_then(StoredVerdicts::lease)
    }
}

/// The revision to watch from, if etcd's history continues that of the view.
async fn resume_from(shared: &Shared, client: &Client) -> Result<Option<i64>, EtcdError> {
    let found = history::stand(client, &shared.keys, shared.config.request_max()).await?;
    let inner = shared.inner.lock();
    let goes_on = found.is_some_and(|found| inner.view.continues(found));
    Ok(inner.view.position().filter(|_| goes_on).map(|known| known.revision + 1))
}

async fn list(shared: &Shared, client: &Client) -> Result<i64, EtcdError> {
    let (found, members) = history::list(client, &shared.keys, shared.config.request_max()).await?;
    tracing::info!(revision = found.revision, members = members.len(), "lists the instances");
    shared.change(|view| view.listed(found, members, Instant::now().into_std()));
    Ok(found.revision + 1)
}

/// Watches from `revision` on. Lists again if that was compacted, or if there is room for records that were left out.
async fn follow(shared: &Shared, client: &Client, mut revision: i64) -> Result<Infallible, EtcdError> {
    let max = shared.config.request_max();
    loop {
        let options = WatchOptions::new().with_prefix().with_start_revision(revision).with_progress_notify();
        let mut watches = client.watch_client();
        let mut events = within(max, "watch", watches.watch(shared.keys.instances(), Some(options))).await?;
        loop {
            let response = tokio::select! {
                response = events.message() => response?,
                () = shared.room.notified() => break,
            };
            let Some(response) = response else {
                return Err(EtcdError::WatchEnded("its stream ended".into()));
            };
            if response.compact_revision() > 0 {
                break;
            }
            if response.canceled() {
                return Err(EtcdError::WatchEnded(response.cancel_reason().to_owned()));
            }
            apply(shared, &response)?;
        }
        revision = list(shared, client).await?;
    }
}

fn apply(shared: &Shared, response: &WatchResponse) -> Result<(), EtcdError> {
    let position: Option<Position> = shared.inner.lock().view.position();
    let header = response.header();
    if header.zip(position).is_some_and(|(h, p)| h.cluster_id() != p.cluster || h.revision() < p.revision) {
        return Err(EtcdError::WatchEnded("etcd has another history now".into()));
    }
    let prefix = shared.keys.instances();
    let mut changes = Vec::new();
    let mut last = 0;
    for (event, kv) in response.events().iter().filter_map(|e| Some((e.event_type(), e.kv()?))) {
        last = last.max(kv.mod_revision());
        let name = kv.key().strip_prefix(prefix.as_bytes()).unwrap_or_default();
        let member = if event == EventType::Put { history::member(&prefix, kv) } else { None };
        let gone = || InstanceId::try_new(String::from_utf8_lossy(name)).ok().map(Change::Deleted);
        // A record that cannot be used replaced a usable one: the old one is gone.
        changes.extend(member.map(Change::Put).or_else(gone));
    }
    if changes.is_empty() && response.events().is_empty() {
        return Ok(());
    }
    // There are many observers, and the routers log the same.
    for change in changes.iter().filter(|_| !shared.looks_on) {
        match change {
            Change::Put(m) => {
                tracing::info!(instance = %m.record.party, revision = m.registration.revision, "is registered")
            }
            Change::Deleted(instance) => tracing::info!(%instance, "has no usable record any more"),
        }
    }
    shared.change(|view| view.changed(last, changes, Instant::now().into_std()));
    Ok(())
}

/// Asks workers whose records are gone whether they are alive.
async fn ask_doubted(shared: &Shared) {
    let mut asked = FuturesUnordered::new();
    loop {
        let due = shared.inner.lock().view.next_due().map(Instant::from_std);
        tokio::select! {
            Some((party, verdict)) = asked.next() => {
                let alive = verdict == Verdict::Alive;
                tracing::info!(instance = %party, alive, "asked for a worker whose record is gone");
                shared.change(|view| view.answered(&party, alive));
            }
            () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if due.is_some() && asked.len() < shared.probes_max => {
                let now = Instant::now().into_std();
                shared.change(|view| view.settle(now));
                let due = shared.inner.lock().view.due(now, shared.probes_max - asked.len());
                for record in due {
                    let answer = shared.probe.ask(record.clone());
                    asked.push(async move { (record.party.clone(), answer.await) });
                }
            }
            // The view changed: another member may be due.
            () = shared.doubts.notified() => {}
        }
    }
}
