//! What etcd may do to a cluster: stop, die, lose everything, forget its history. Workers and routers run through all of it.

use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker, Probe, Verdict};
use crate::membership::{
    MembershipView, RegistrationHandle, RouterMembership as _, WorkerMembership as _, WorkerState,
};
use crate::testing::etcd::EtcdServer;
use crate::testing::relay::Relay;
use baton_types::{InstanceRecord, Party};
use etcd_client::{Client, CompactionOptions, DeleteOptions, Permission};
use futures::future::BoxFuture;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// Far beyond every lease, backoff and grace of these tests.
const MAX: Duration = Duration::from_secs(60);
/// Longer than a lease, and than a probe of a silent connection.
const LONG: Duration = Duration::from_secs(7);

/// Workers answer probes as the test says.
#[derive(Clone, Default)]
struct Answers(Arc<parking_lot::Mutex<BTreeSet<Party>>>);

impl Probe for Answers {
    fn ask(&self, record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict> {
        let alive = self.0.lock().contains(&record.party);
        Box::pin(async move { if alive { Verdict::Alive } else { Verdict::Gone } })
    }
}

/// Three workers, admitted by a router, over one etcd.
struct Cluster {
    server: EtcdServer,
    router: EtcdRouter,
    alive: Answers,
    workers: Vec<RegistrationHandle>,
    records: Vec<InstanceRecord>,
}

impl Cluster {
    async fn start() -> Self {
        let server = EtcdServer::start().unwrap();
        let alive = Answers::default();
        let router = EtcdRouter::start_with(&server.config(), 16, Box::new(alive.clone()));
        let records = vec![record("d-0", 1), record("d-1", 2), record("p-0", 3)];
        alive.0.lock().extend(records.iter().map(|r| r.party.clone()));
        let workers = records.iter().map(|r| EtcdWorker::new(&server.config()).register(r.clone())).collect();
        let cluster = Self { server, router, alive, workers, records };
        cluster.sees("all register", |view| view.members.len() == 3).await;
        for (worker, record) in cluster.workers.iter().zip(&cluster.records) {
            assert!(cluster.router.admit(&record.party));
            becomes(worker, &WorkerState::Admitted).await;
        }
        cluster
    }

    async fn sees(&self, what: &str, done: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
        let mut view = self.router.view();
        match timeout(MAX, view.wait_for(|v| done(v))).await {
            Ok(seen) => seen.unwrap().clone(),
            Err(_) => panic!("{what}: never; now {:?}", self.router.view().borrow()),
        }
    }

    fn whole(&self) -> bool {
        let view = self.router.view();
        let whole = self.records.iter().all(|r| view.borrow().get(&r.party).is_some());
        whole && self.workers.iter().all(RegistrationHandle::is_ready)
    }

    /// Nothing is missed for so long.
    async fn stays_whole(&self, what: &str, time: Duration) {
        let end = tokio::time::Instant::now() + time;
        while tokio::time::Instant::now() < end {
            assert!(self.whole(), "{what}: {:?}", self.router.view().borrow());
            sleep(Duration::from_millis(10)).await;
        }
    }

    /// A change of either side still reaches the other.
    async fn is_live(&mut self) {
        assert!(self.router.evict(&self.records[0].party, "a test"));
        becomes(&self.workers[0], &WorkerState::Evicted("a test".into())).await;
        assert!(self.router.admit(&self.records[0].party));
        becomes(&self.workers[0], &WorkerState::Admitted).await;
        let more = record("d-9", 9);
        let worker = EtcdWorker::new(&self.server.config()).register(more.clone());
        self.sees("a new one", |view| view.get(&more.party).is_some()).await;
        assert!(worker.leave(MAX).await);
        self.sees("it leaves", |view| view.get(&more.party).is_none()).await;
        assert!(self.whole());
    }

    async fn client(&self) -> Client {
        Client::connect([self.server.url()], None).await.unwrap()
    }
}

async fn becomes(worker: &RegistrationHandle, expected: &WorkerState) {
    let mut state = worker.state();
    let reached = timeout(MAX, state.wait_for(|s| s == expected)).await;
    assert!(reached.is_ok_and(|r| r.is_ok()), "{:?} never became {expected:?}", worker.state().borrow());
}

#[tokio::test]
async fn a_stopped_etcd_ends_nothing() {
    let mut cluster = Cluster::start().await;
    cluster.server.signal("STOP").unwrap();
    cluster.stays_whole("stopped", LONG).await;
    cluster.server.signal("CONT").unwrap();
    // Leases may have ended in its eyes; everybody answers, so nobody is missed.
    cluster.sees("nobody is doubted", |_| cluster.router.doubted() == 0).await;
    cluster.is_live().await;
}

#[tokio::test]
async fn an_etcd_that_dies_and_returns_with_its_data_ends_nothing() {
    let mut cluster = Cluster::start().await;
    let before = cluster.router.view().borrow().clone();
    cluster.server.kill();
    cluster.stays_whole("dead", LONG).await;
    cluster.server.run().unwrap();
    cluster.stays_whole("back", LONG).await;
    let after = cluster.router.view().borrow().clone();
    assert_eq!(before.members, after.members, "the leases live on, so nobody registered again");
    cluster.is_live().await;
}

#[tokio::test]
async fn everyone_registers_again_in_a_wiped_etcd() {
    let mut cluster = Cluster::start().await;
    let before = cluster.router.view().borrow().clone();
    // No worker answers the router: the grace alone must carry the view.
    cluster.alive.0.lock().clear();
    cluster.server.kill();
    cluster.server.wipe().unwrap();
    cluster.stays_whole("dead", Duration::from_secs(1)).await;
    cluster.server.run().unwrap();
    cluster.stays_whole("empty", LONG).await;
    assert_eq!(cluster.router.doubted(), 0);
    let after = cluster.router.view().borrow().clone();
    for record in &cluster.records {
        let (old, new) = (before.get(&record.party).unwrap(), after.get(&record.party).unwrap());
        assert_ne!(old.registration.revision, new.registration.revision, "another registration");
        assert_eq!(old.registration.incarnation, new.registration.incarnation);
    }
    cluster.is_live().await;
}

#[tokio::test]
async fn a_restored_etcd_is_brought_up_to_date() {
    let mut cluster = Cluster::start().await;
    cluster.server.kill();
    cluster.server.back_up().unwrap();
    cluster.server.run().unwrap();
    // What the backup does not know: one worker left, another start of d-0 replaced the first.
    let gone = cluster.workers.pop().unwrap();
    let gone_party = cluster.records.pop().unwrap().party;
    cluster.alive.0.lock().remove(&gone_party);
    assert!(gone.leave(MAX).await);
    cluster.sees("it left", |view| view.get(&gone_party).is_none()).await;
    let new = record("d-0", 11);
    cluster.alive.0.lock().insert(new.party.clone());
    cluster.workers[0] = EtcdWorker::new(&cluster.server.config()).register(new.clone());
    cluster.sees("it is replaced", |view| view.get(&new.party).is_some()).await;
    assert!(cluster.router.admit(&new.party));
    becomes(&cluster.workers[0], &WorkerState::Admitted).await;
    cluster.records[0] = new;

    cluster.server.kill();
    cluster.server.restore().unwrap();
    cluster.server.run().unwrap();
    // Those that live are never missed. The record of the one that left comes back, until its lease ends.
    let end = tokio::time::Instant::now() + LONG * 2;
    while tokio::time::Instant::now() < end {
        let view = cluster.router.view();
        assert!(cluster.records.iter().all(|r| view.borrow().get(&r.party).is_some()), "{:?}", view.borrow());
        sleep(Duration::from_millis(10)).await;
    }
    assert!(cluster.router.view().borrow().get(&gone_party).is_none());
    assert!(cluster.router.admit(&cluster.records[0].party));
    becomes(&cluster.workers[0], &WorkerState::Admitted).await;
    cluster.is_live().await;
}

#[tokio::test]
async fn a_watch_that_fell_behind_a_compaction_lists_again() {
    let server = EtcdServer::start().unwrap();
    let relay = Relay::start(server.address()).await.unwrap();
    let behind = EtcdConfig { endpoints: vec![format!("http://{}", relay.address())], ..server.config() };
    let router = EtcdRouter::start(&behind, 16);
    let (kept, leaver) = (record("d-0", 1), record("d-1", 2));
    let _kept = EtcdWorker::new(&server.config()).register(kept.clone());
    let leaving = EtcdWorker::new(&server.config()).register(leaver.clone());
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 2)).await.unwrap().unwrap();

    relay.set_silent(true);
    assert!(leaving.leave(MAX).await);
    let comer = record("p-0", 3);
    let _comer = EtcdWorker::new(&server.config()).register(comer.clone());
    let mut client = Client::connect([server.url()], None).await.unwrap();
    let revision = loop {
        let answer = client.get("/baton/default/instances/p-0", None).await.unwrap();
        if !answer.kvs().is_empty() {
            break answer.header().unwrap().revision();
        }
        sleep(Duration::from_millis(10)).await;
    };
    let physical = CompactionOptions::new().with_physical();
    client.compact(revision, Some(physical)).await.unwrap();
    // Long enough for the router to give the silent connection up.
    sleep(LONG).await;
    assert!(router.view().borrow().get(&leaver.party).is_some(), "it cannot know");
    relay.set_silent(false);
    let right = |v: &Arc<MembershipView>| v.get(&leaver.party).is_none() && v.get(&comer.party).is_some();
    timeout(MAX, view.wait_for(right)).await.unwrap().unwrap();
    assert!(router.view().borrow().get(&kept.party).is_some());
}

#[tokio::test]
async fn a_lease_that_ended_under_a_stopped_worker_is_believed_and_it_returns() {
    let cluster = Cluster::start().await;
    let relay = Relay::start(cluster.server.address()).await.unwrap();
    let config = EtcdConfig { endpoints: vec![format!("http://{}", relay.address())], ..cluster.server.config() };
    let stopped = record("d-5", 5);
    let worker = EtcdWorker::new(&config).register(stopped.clone());
    let first = cluster.sees("joins", |view| view.get(&stopped.party).is_some()).await;
    assert!(cluster.router.admit(&stopped.party));
    becomes(&worker, &WorkerState::Admitted).await;
    relay.set_silent(true);
    cluster.sees("its lease ends", |view| view.get(&stopped.party).is_none()).await;
    assert!(worker.is_ready() && cluster.whole());
    relay.set_silent(false);
    let again = cluster.sees("it returns", |view| view.get(&stopped.party).is_some()).await;
    let revision = |view: &MembershipView| view.get(&stopped.party).unwrap().registration.revision;
    assert!(revision(&again) > revision(&first));
}

#[tokio::test]
async fn records_that_vanish_together_are_doubted_until_the_workers_are_asked() {
    let cluster = Cluster::start().await;
    let before = cluster.router.view().borrow().clone();
    // One of the three does not answer: it alone is gone, until it registers again.
    cluster.alive.0.lock().remove(&cluster.records[2].party);
    let options = DeleteOptions::new().with_prefix();
    cluster.client().await.delete("/baton/default/instances/", Some(options)).await.unwrap();
    let answered = |v: &MembershipView| cluster.records[..2].iter().all(|r| v.get(&r.party).is_some());
    let all_again = |v: &MembershipView| {
        let newer = |r: &InstanceRecord| {
            let revision = |v: &MembershipView| v.get(&r.party).map(|m| m.registration.revision);
            revision(v) > revision(&before)
        };
        cluster.records.iter().all(newer)
    };
    let mut view = cluster.router.view();
    let end = tokio::time::Instant::now() + MAX;
    while !all_again(&view.borrow_and_update()) {
        assert!(answered(&view.borrow()), "{:?}", view.borrow());
        assert!(tokio::time::timeout_at(end, view.changed()).await.is_ok(), "they do not register again");
    }
}

#[tokio::test]
async fn clusters_share_an_etcd_under_prefixes_and_a_password() {
    let server = EtcdServer::start().unwrap();
    let mut root = Client::connect([server.url()], None).await.unwrap();
    for (user, password) in [("root", "secret"), ("baton", "quiet")] {
        root.user_add(user, password, None).await.unwrap();
        root.role_add(user).await.unwrap();
        root.user_grant_role(user, user).await.unwrap();
    }
    let ours = Permission::read_write("/ours/").with_range_end("/ours0");
    root.role_grant_permission("baton", ours).await.unwrap();
    root.auth_enable().await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "wrong\n").unwrap();
    let config = EtcdConfig {
        prefix: "/ours/".into(),
        user: Some("baton".into()),
        password_file: Some(password.clone()),
        ..server.config()
    };
    let router = EtcdRouter::start(&config, 16);
    let worker = EtcdWorker::new(&config).register(record("d-0", 1));
    sleep(Duration::from_millis(500)).await;
    assert!(router.view().borrow().members.is_empty(), "the password is wrong");
    // Put right in place, nobody restarted.
    std::fs::write(&password, "quiet\n").unwrap();
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 1)).await.unwrap().unwrap();
    assert!(router.admit(&record("d-0", 1).party));
    becomes(&worker, &WorkerState::Admitted).await;

    // Another cluster, where this user may not read.
    let elsewhere = EtcdRouter::start(&EtcdConfig { prefix: "/theirs/".into(), ..config }, 16);
    sleep(Duration::from_millis(500)).await;
    assert!(elsewhere.view().borrow().members.is_empty());
}
