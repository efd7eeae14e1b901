//! The cluster of the fault tests: workers and a router over an etcd that the test breaks.

use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker, OfflineSources, Probe, Verdict};
use crate::membership::{
    MembershipView, RegistrationHandle, RouterMembership as _, WorkerMembership as _, WorkerState,
};
use baton_types::{InstanceRecord, Party};
use futures::future::BoxFuture;
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Far beyond every lease, backoff and grace of these tests.
pub(super) const MAX: Duration = Duration::from_secs(60);
/// Most members of every view.
pub(super) const MEMBERS_MAX: usize = 16;
/// Longer than a lease, and than a probe of a silent connection.
pub(super) const LONG: Duration = Duration::from_secs(7);

/// Probes that answer as the test sets.
#[derive(Clone, Default)]
pub(super) struct Answers(
    pub(super) Arc<parking_lot::Mutex<BTreeSet<Party>>>,
    /// Processes that return their record, by port.
    pub(super) Arc<parking_lot::Mutex<BTreeMap<u16, InstanceRecord>>>,
);

impl Probe for Answers {
    fn ask(&self, record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict> {
        let alive = self.0.lock().contains(&record.party);
        Box::pin(async move { if alive { Verdict::Alive } else { Verdict::Gone } })
    }

    fn record(&self, address: SocketAddr) -> BoxFuture<'static, Option<InstanceRecord>> {
        let found = self.1.lock().get(&address.port()).cloned();
        Box::pin(async move { found })
    }
}

/// Three workers, admitted by a router, over one etcd.
pub(super) struct Cluster {
    config: EtcdConfig,
    pub(super) router: EtcdRouter,
    pub(super) alive: Answers,
    pub(super) workers: Vec<RegistrationHandle>,
    pub(super) records: Vec<InstanceRecord>,
}

impl Cluster {
    /// Over the etcd of these settings.
    pub(super) async fn start(config: EtcdConfig) -> Self {
        Self::start_offline(config, OfflineSources::default()).await
    }

    /// The same, with a router that caches its view.
    pub(super) async fn start_offline(config: EtcdConfig, offline: OfflineSources) -> Self {
        let alive = Answers::default();
        let router = EtcdRouter::start_with(&config, MEMBERS_MAX, Box::new(alive.clone()), offline);
        let records = vec![record("d-0", 1), record("d-1", 2), record("p-0", 3)];
        alive.0.lock().extend(records.iter().map(|r| r.party.clone()));
        let workers = records.iter().map(|r| EtcdWorker::new(&config, MEMBERS_MAX).register(r.clone())).collect();
        let cluster = Self { config, router, alive, workers, records };
        cluster.sees("all register", |view| view.members.len() == 3).await;
        for (worker, record) in cluster.workers.iter().zip(&cluster.records) {
            assert!(cluster.router.admit(&record.party));
            becomes(worker, &WorkerState::Admitted).await;
        }
        cluster
    }

    pub(super) async fn sees(&self, what: &str, done: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
        let mut view = self.router.view();
        match timeout(MAX, view.wait_for(|v| done(v))).await {
            Ok(seen) => seen.unwrap().clone(),
            Err(_) => panic!("{what}: never; now {:?}", self.router.view().borrow()),
        }
    }

    pub(super) fn whole(&self) -> bool {
        let view = self.router.view();
        let whole = self.records.iter().all(|r| view.borrow().get(&r.party).is_some());
        whole && self.workers.iter().all(RegistrationHandle::is_ready)
    }

    /// No member leaves the view for this long.
    pub(super) async fn stays_whole(&self, what: &str, time: Duration) {
        let end = tokio::time::Instant::now() + time;
        while tokio::time::Instant::now() < end {
            assert!(self.whole(), "{what}: {:?}", self.router.view().borrow());
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// A change on either side still reaches the other.
    pub(super) async fn is_live(&mut self) {
        assert!(self.router.evict(&self.records[0].party, "a test"));
        becomes(&self.workers[0], &WorkerState::Evicted("a test".into())).await;
        assert!(self.router.admit(&self.records[0].party));
        becomes(&self.workers[0], &WorkerState::Admitted).await;
        let more = record("d-9", 9);
        let worker = EtcdWorker::new(&self.config, MEMBERS_MAX).register(more.clone());
        self.sees("a new one", |view| view.get(&more.party).is_some()).await;
        assert!(worker.leave(MAX).await);
        self.sees("it leaves", |view| view.get(&more.party).is_none()).await;
        assert!(self.whole());
    }
}

pub(super) async fn becomes(worker: &RegistrationHandle, expected: &WorkerState) {
    let mut state = worker.state();
    let reached = timeout(MAX, state.wait_for(|s| s == expected)).await;
    assert!(reached.is_ok_and(|r| r.is_ok()), "{:?} never became {expected:?}", worker.state().borrow());
}
