//! The conformance suite of membership backends, as functions over a [`Fixture`]. They wait on tokio's clock, so a
//! backend without real I/O runs them under paused time.

use super::{MembershipView, RegistrationHandle, RouterMembership, WorkerMembership, WorkerState};
use baton_types::*;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// A backend under test: one router that can be restarted, and a network that can drop all messages.
pub trait Fixture: Send {
    /// How long a silent worker stays registered.
    fn lease(&self) -> Duration;
    /// The router that runs now.
    fn router(&self) -> Arc<dyn RouterMembership>;
    /// The side of a new worker process.
    fn worker(&self) -> Box<dyn WorkerMembership>;
    /// Silences the network: no message from or to workers arrives, and no side is notified; `false` repairs it.
    fn set_silent(&self, silent: bool);
    /// Kills the router, and starts another one without any state.
    fn restart_router(&mut self);
}

/// A record of the given incarnation of an instance.
pub fn record(instance: &str, incarnation: u64) -> InstanceRecord {
    let card = ModelCard {
        id: "m".into(),
        served_names: vec!["m".into()],
        revision: String::new(),
        fingerprint: Digest([1; 32]),
        context_max: 64,
        vocab: 32,
        end_tokens: vec![2],
        defaults: SamplingDefaults::default(),
        bundle: None,
    };
    InstanceRecord {
        party: Party {
            instance: InstanceId::try_new(instance).expect("a good name"),
            incarnation: Incarnation(incarnation),
        },
        role: Role::Decode,
        labels: Default::default(),
        pool: "default".into(),
        endpoint: format!("127.0.0.1:{}", 1 + incarnation % 60_000),
        card,
        protocol: ProtocolRange::CURRENT,
        layout: KvLayout::llama(16, 1, 1, 64, Dtype::Bf16).expect("a good layout"),
        class: NumericsClass { order: "cpu".into(), weights: Dtype::Bf16.into(), kv: Dtype::Bf16, kernel_revision: 1 },
        capacity_tokens: 64,
        running_max: 1,
        waiting_max: 1,
        shards: vec![Shard { transfer_address: vec![1], layers: 0..1, kv_heads: 0..1 }],
        capabilities: vec![],
    }
}

/// Waits for a value. The time limit is far beyond every lease and backoff; reaching it is a failure.
async fn until<T: Clone + std::fmt::Debug>(
    what: &str,
    lease: Duration,
    mut seen: watch::Receiver<T>,
    done: impl FnMut(&T) -> bool,
) -> T {
    let result = tokio::time::timeout(lease * 100, seen.wait_for(done)).await.map(|r| r.map(|v| v.clone()));
    match result {
        Ok(Ok(value)) => value,
        Ok(Err(_)) => panic!("{what}: the sender is gone"),
        Err(_) => panic!("{what}: never; now {:?}", *seen.borrow()),
    }
}

struct Cluster<'a, F: Fixture>(&'a mut F);

impl<F: Fixture> Cluster<'_, F> {
    async fn view(&self, what: &str, done: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
        until(what, self.0.lease(), self.0.router().view(), |view| done(view)).await
    }

    async fn state(&self, what: &str, worker: &RegistrationHandle, done: impl Fn(&WorkerState) -> bool) -> WorkerState {
        until(what, self.0.lease(), worker.state(), |state| done(state)).await
    }

    /// Registers and is admitted.
    async fn admitted(&self, record: &InstanceRecord) -> RegistrationHandle {
        let worker = self.0.worker().register(record.clone());
        self.view("joins", |view| view.get(&record.party).is_some()).await;
        assert!(self.0.router().admit(&record.party));
        self.state("is admitted", &worker, WorkerState::is_ready).await;
        worker
    }
}

fn revision(view: &MembershipView, party: &Party) -> u64 {
    view.get(party).expect("a member").registration.revision
}

/// A worker that registers appears with its record, and is ready only once admitted.
pub async fn joins_and_is_admitted(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    assert!(cluster.0.router().view().borrow().members.is_empty());
    let record = record("d-0", 1);
    let worker = cluster.0.worker().register(record.clone());
    assert_eq!(*worker.state().borrow(), WorkerState::Unregistered);
    let view = cluster.view("joins", |view| !view.members.is_empty()).await;
    assert_eq!(*view.get(&record.party).expect("the member").record, record);
    cluster.state("registers", &worker, |s| *s == WorkerState::Registered).await;
    assert!(!worker.is_ready());
    assert!(cluster.0.router().admit(&record.party));
    cluster.state("is admitted", &worker, WorkerState::is_ready).await;
    // A quiet hour: heartbeats keep the lease, and the view does not change.
    let revision = view.revision;
    tokio::time::sleep(cluster.0.lease() * 20).await;
    assert_eq!(cluster.0.router().view().borrow().revision, revision);
    assert!(worker.is_ready());
}

/// Silence for a lease ends the registration; the worker stays ready and returns under the same incarnation.
pub async fn silence_ends_the_lease_and_the_worker_returns(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let record = record("d-0", 1);
    let worker = cluster.admitted(&record).await;
    let before = cluster.view("is there", |view| view.get(&record.party).is_some()).await;
    cluster.0.set_silent(true);
    cluster.view("is gone", |view| view.members.is_empty()).await;
    tokio::time::sleep(cluster.0.lease() * 5).await;
    assert!(worker.is_ready(), "readiness survives the loss of a router");
    assert!(!cluster.0.router().admit(&record.party), "nobody is there to be admitted");
    cluster.0.set_silent(false);
    let after = cluster.view("returns", |view| view.get(&record.party).is_some()).await;
    assert!(revision(&after, &record.party) > revision(&before, &record.party));
    assert!(after.revision > before.revision);
}

/// A restarted worker replaces its earlier incarnation, which cannot take the name back while the new one is alive.
pub async fn a_new_incarnation_replaces_the_old(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let (old, new) = (record("d-0", 1), record("d-0", 2));
    let old_worker = cluster.admitted(&old).await;
    let new_worker = cluster.admitted(&new).await;
    assert!(cluster.0.router().view().borrow().get(&old.party).is_none());
    assert!(!cluster.0.router().admit(&old.party) && !cluster.0.router().evict(&old.party, "old"));
    let state = cluster.state("is told", &old_worker, |s| matches!(s, WorkerState::Evicted(_))).await;
    let WorkerState::Evicted(reason) = state else { unreachable!() };
    assert!(reason.contains("two instance ids"), "{reason}");
    tokio::time::sleep(cluster.0.lease() * 20).await;
    let view = cluster.0.router().view().borrow().clone();
    assert!(view.get(&new.party).is_some() && new_worker.is_ready());
    // Once the new one left, the name is free.
    assert!(new_worker.leave(cluster.0.lease()).await);
    cluster.view("takes the free name", |view| view.get(&old.party).is_some()).await;
}

/// A restarted router sees all workers again, and no worker has lost its readiness.
pub async fn workers_return_to_a_restarted_router(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let records = [record("d-0", 1), record("d-1", 2), record("p-0", 3)];
    let mut workers = Vec::new();
    for record in &records {
        workers.push(cluster.admitted(record).await);
    }
    let before = cluster.0.router().view().borrow().revision;
    cluster.0.restart_router();
    assert!(cluster.0.router().view().borrow().members.is_empty());
    let view = cluster.view("all return", |view| view.members.len() == records.len()).await;
    assert!(records.iter().all(|r| view.get(&r.party).is_some()));
    assert!(view.revision > before, "revisions grow over restarts");
    assert!(workers.iter().all(RegistrationHandle::is_ready));
    // The new router makes its own decision.
    assert!(cluster.0.router().evict(&records[0].party, "unreachable"));
    cluster.state("is evicted", &workers[0], |s| *s == WorkerState::Evicted("unreachable".into())).await;
    assert!(workers[1].is_ready());
}

/// An evicted worker is registered and not ready, until it is admitted again.
pub async fn eviction_and_readmission(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let record = record("d-0", 1);
    let worker = cluster.admitted(&record).await;
    for round in 0..3 {
        let reason = format!("probe {round} failed");
        assert!(cluster.0.router().evict(&record.party, &reason));
        cluster.state("is evicted", &worker, |s| *s == WorkerState::Evicted(reason.clone())).await;
        assert!(!worker.is_ready());
        assert!(
            cluster.0.router().view().borrow().get(&record.party).is_some(),
            "eviction does not end the registration"
        );
        assert!(cluster.0.router().admit(&record.party));
        cluster.state("is readmitted", &worker, WorkerState::is_ready).await;
    }
    let stranger = Party { incarnation: Incarnation(99), ..record.party.clone() };
    assert!(!cluster.0.router().evict(&stranger, "another start"));
    assert!(worker.is_ready());
}

/// A worker that leaves, or is dropped, is gone long before its lease ends.
pub async fn leaving_is_prompt(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let (first, second) = (record("d-0", 1), record("d-1", 2));
    let (leaver, dropped) = (cluster.admitted(&first).await, cluster.admitted(&second).await);
    let state = leaver.state();
    assert!(leaver.leave(cluster.0.lease() / 2).await);
    assert_eq!(*state.borrow(), WorkerState::Unregistered);
    cluster.view("left", |view| view.get(&first.party).is_none()).await;
    assert!(cluster.0.router().view().borrow().get(&second.party).is_some());
    drop(dropped);
    cluster.view("dropped", |view| view.members.is_empty()).await;
}

/// Workers know which other incarnations are registered, and keep the last view while no source can be reached.
pub async fn workers_know_each_other(fixture: &mut impl Fixture) {
    let cluster = Cluster(fixture);
    let (own, old, new) = (record("d-0", 1), record("p-0", 2), record("p-0", 3));
    let side = cluster.0.worker();
    let (members, lease) = (side.members(), cluster.0.lease());
    let knows = async |what: &str, party: &Party, stands: bool| {
        let settles = async {
            while members.contains(party) != stands {
                tokio::time::sleep(lease / 50).await;
            }
        };
        let settled = tokio::time::timeout(lease * 100, settles).await;
        assert!(settled.is_ok(), "{what}: {party} never comes to stand: {stands}");
    };
    let old_worker = cluster.admitted(&old).await;
    assert!(!members.contains(&old.party), "it is not registered itself");
    let _own_worker = side.register(own.clone());
    knows("who was there", &old.party, true).await;
    knows("itself", &own.party, true).await;
    assert!(!members.contains(&new.party), "another start");
    assert!(old_worker.leave(cluster.0.lease() / 2).await);
    knows("it left", &old.party, false).await;
    let _new_worker = cluster.admitted(&new).await;
    knows("another start came", &new.party, true).await;
    assert!(!members.contains(&old.party));

    cluster.0.set_silent(true);
    tokio::time::sleep(cluster.0.lease() * 3).await;
    assert!(members.contains(&new.party), "the last view stands");
    cluster.0.set_silent(false);
    cluster.view("both return", |view| view.members.len() == 2).await;
    knows("heard again", &new.party, true).await;
    cluster.0.restart_router();
    cluster.view("both are back", |view| view.members.len() == 2).await;
    knows("of the new router", &new.party, true).await;
    let late = record("p-1", 4);
    let late_worker = cluster.admitted(&late).await;
    knows("who came later", &late.party, true).await;
    drop(late_worker);
    knows("who is gone", &late.party, false).await;
}

/// Runs every function above, each on its own fixture.
pub async fn all<F: Fixture>(new: impl AsyncFn() -> F) {
    joins_and_is_admitted(&mut new().await).await;
    silence_ends_the_lease_and_the_worker_returns(&mut new().await).await;
    a_new_incarnation_replaces_the_old(&mut new().await).await;
    workers_return_to_a_restarted_router(&mut new().await).await;
    eviction_and_readmission(&mut new().await).await;
    leaving_is_prompt(&mut new().await).await;
    workers_know_each_other(&mut new().await).await;
}
