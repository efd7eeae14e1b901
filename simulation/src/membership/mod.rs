//! Simulated membership: workers send heartbeats, routers follow the members. The product's views and leases run at both ends; etcd
//! itself and the connection to it are simulated.

mod etcd;
mod follower;

pub use follower::Follower;

use crate::executor::{Executor, Process, Time, ms};
use crate::invariant::{Breaches, Invariant};
use crate::link::Directory;
use crate::network::Network;
use crate::worker::SimulatedWorker;
use baton_node::membership::etcd::view::Change;
use baton_types::{InstanceRecord, Party, Runtime, seeded};
use etcd::Etcd;
use follower::News;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Interval of workers' heartbeats.
const RENEWS: Duration = Duration::from_millis(350);
/// Interval of the checks for expired leases.
const LOOKS: Time = ms(250);
/// How long a suspected worker has to answer.
const PROBE_MAX: Time = ms(150);

/// One router's watch.
#[derive(Default)]
struct Watch {
    /// Grows with each watch: messages of earlier watches are ignored.
    number: u64,
    /// Whether etcd sends it messages.
    is_open: bool,
    /// When the last message arrives: later ones must arrive after it.
    last: Time,
}

/// The membership of one schedule. Clones share it.
#[derive(Clone)]
pub struct Membership {
    executor: Executor,
    network: Network,
    directory: Directory,
    breaches: Breaches,
    is_embedded: bool,
    etcd: Arc<Mutex<Etcd>>,
    /// By slot.
    followers: Arc<Mutex<BTreeMap<usize, Arc<Follower>>>>,
    watches: Arc<Mutex<BTreeMap<usize, Watch>>>,
}

impl Membership {
    /// Without members.
    pub fn new(
        executor: Executor,
        network: Network,
        directory: Directory,
        breaches: Breaches,
        is_embedded: bool,
    ) -> Self {
        let (etcd, followers, watches) = Default::default();
        let membership = Self { executor, network, directory, breaches, is_embedded, etcd, followers, watches };
        membership.look();
        membership
    }

    /// Checks for expired leases from now on.
    fn look(&self) {
        let at = self.executor.time() + LOOKS;
        let membership = self.clone();
        self.executor.call(at, Process::WORLD, move || {
            let now = membership.executor.time();
            if membership.is_embedded {
                for follower in membership.followers() {
                    let told = membership.clone();
                    membership.executor.call(now, follower.process, move || {
                        follower.expire();
                        told.tell_workers();
                    });
                }
            } else {
                let changes = {
                    let mut etcd = membership.etcd.lock();
                    if now < etcd.away_until { Vec::new() } else { etcd.expire(now) }
                };
                membership.changed(changes);
            }
            membership.look();
        });
    }

    fn followers(&self) -> Vec<Arc<Follower>> {
        self.followers.lock().values().cloned().collect()
    }

    fn follower(&self, slot: usize) -> Option<Arc<Follower>> {
        self.followers.lock().get(&slot).cloned()
    }

    /// A router starts to follow the members.
    pub fn follow(&self, slot: usize, process: Process) -> Arc<Follower> {
        let (executor, breaches) = (self.executor.clone(), self.breaches.clone());
        let follower = Arc::new(Follower::new(slot, process, self.is_embedded, executor, breaches));
        self.followers.lock().insert(slot, follower.clone());
        if !self.is_embedded {
            self.watch(&follower);
        }
        follower
    }

    /// Sends a worker's heartbeats until it has drained or dies.
    pub async fn keeps(self, worker: SimulatedWorker, runtime: Arc<dyn Runtime>) {
        while !worker.drain.has_begun() || worker.drain.drained_for().is_none() {
            let (membership, record) = (self.clone(), worker.record.clone());
            if self.is_embedded {
                for follower in self.followers() {
                    let (record, told) = (record.clone(), membership.clone());
                    self.sends(follower.process, move || {
                        follower.beat(&record);
                        told.tell_workers();
                    });
                }
            } else {
                self.sends(Process::WORLD, move || membership.renewed(record));
            }
            let next = runtime.now() + RENEWS;
            runtime.until(next, worker.drain.drained()).await;
        }
        let (membership, party) = (self.clone(), worker.party().clone());
        if self.is_embedded {
            for follower in self.followers() {
                let party = party.clone();
                self.sends(follower.process, move || follower.leaves(&party));
            }
        } else {
            self.sends(Process::WORLD, move || membership.left(&party));
        }
    }

    /// Sends a message.
    fn sends(&self, to: Process, arrives: impl FnOnce() + Send + 'static) {
        self.executor.call(self.executor.time() + self.network.delay(), to, arrives);
    }

    fn renewed(&self, record: Arc<InstanceRecord>) {
        let now = self.executor.time();
        let changes = {
            let mut etcd = self.etcd.lock();
            if now < etcd.away_until { Vec::new() } else { etcd.renewed(record, now) }
        };
        self.changed(changes);
    }

    fn left(&self, party: &Party) {
        let changes = self.etcd.lock().leave(party);
        self.changed(changes);
    }

    fn changed(&self, changes: Vec<Change>) {
        if changes.is_empty() {
            return;
        }
        let revision = self.etcd.lock().position.revision;
        for follower in self.followers() {
            self.tell(&follower, News::Changed { revision, changes: changes.clone() });
        }
        self.tell_workers();
    }

    /// Sends the workers the current members, with a delay.
    fn tell_workers(&self) {
        for worker in self.directory.all() {
            let (membership, members) = (self.clone(), worker.members.clone());
            self.sends(worker.process, move || {
                if membership.is_embedded {
                    for follower in membership.followers() {
                        let parties = follower.members().members.into_values().map(|m| m.record.party.clone());
                        members.replace(follower.slot, parties);
                    }
                } else {
                    let all = membership.etcd.lock().members();
                    members.replace(0, all.into_iter().map(|member| member.record.party.clone()));
                }
            });
        }
    }

    /// Sends a message to a router; messages of one watch stay in order.
    fn tell(&self, follower: &Arc<Follower>, news: News) {
        let delay = self.network.delay();
        let mut watches = self.watches.lock();
        let Some(watch) = watches.get_mut(&follower.slot).filter(|watch| watch.is_open) else { return };
        watch.last = watch.last.max(self.executor.time() + delay) + 1;
        let (at, number) = (watch.last, watch.number);
        drop(watches);
        let (membership, follower) = (self.clone(), follower.clone());
        self.executor.call(at, follower.process, move || {
            let is_heard = membership.watches.lock().get(&follower.slot).is_some_and(|watch| watch.number == number);
            if is_heard {
                follower.hears(news);
                membership.ask_later(&follower);
            }
        });
    }

    /// A router asks etcd for a watch: from its position if possible, else with a list of all members.
    fn watch(&self, follower: &Arc<Follower>) {
        let away_until = self.etcd.lock().away_until;
        if self.executor.time() < away_until {
            let at = away_until + self.executor.draw(|random| random.below(ms(100)));
            let (membership, follower) = (self.clone(), follower.clone());
            let process = follower.process;
            return self.executor.call(at, process, move || membership.watch(&follower));
        }
        {
            let mut watches = self.watches.lock();
            let watch = watches.entry(follower.slot).or_default();
            (watch.number, watch.is_open) = (watch.number + 1, true);
        }
        let news = {
            let etcd = self.etcd.lock();
            let position = etcd.position;
            let resumes = follower.resumes(position, etcd.failures).filter(|_| !seeded!(ViewGoesBack));
            match resumes.and_then(|revision| etcd.since(revision)) {
                Some(changes) => News::Changed { revision: position.revision, changes },
                None => {
                    let lagging = etcd.lagging.clone().filter(|_| seeded!(ViewGoesBack));
                    let (position, members) = lagging.unwrap_or_else(|| (position, etcd.members()));
                    News::Listed { position, members, history: etcd.histories, failures: etcd.failures }
                }
            }
        };
        self.tell(follower, news);
    }

    /// Schedules the probes of suspected members.
    fn ask_later(&self, follower: &Arc<Follower>) {
        let Some(at) = follower.asks_at().filter(|at| follower.is_new(*at)) else { return };
        let (membership, follower) = (self.clone(), follower.clone());
        self.executor.call(at, follower.process, move || {
            for record in follower.asks() {
                membership.probe(&follower, &record);
            }
            membership.ask_later(&follower);
        });
    }

    /// Asks a worker itself whether it is this start.
    fn probe(&self, follower: &Arc<Follower>, record: &InstanceRecord) {
        let late = self.executor.time() + PROBE_MAX;
        let (party, told) = (record.party.clone(), follower.clone());
        self.executor.call(late, follower.process, move || told.answered(&party, false));
        let Some(worker) = self.directory.at(&record.endpoint) else { return };
        let (membership, follower, party) = (self.clone(), follower.clone(), record.party.clone());
        self.sends(worker.process, move || {
            let alive = *worker.party() == party;
            membership.sends(follower.process, move || follower.answered(&party, alive));
        });
    }

    /// A watch breaks; its router opens a new one after a while.
    pub fn break_watch(&self, slot: usize) {
        let Some(follower) = self.follower(slot).filter(|_| !self.is_embedded) else { return };
        {
            let mut watches = self.watches.lock();
            let watch = watches.entry(slot).or_default();
            (watch.number, watch.is_open) = (watch.number + 1, false);
        }
        let at = self.executor.time() + ms(5) + self.executor.draw(|random| random.below(ms(300)));
        let membership = self.clone();
        self.executor.call(at, follower.process, move || membership.watch(&follower));
    }

    fn break_watches(&self) {
        let slots: Vec<usize> = self.followers.lock().keys().copied().collect();
        slots.into_iter().for_each(|slot| self.break_watch(slot));
    }

    /// etcd is restored from its last backup, or comes back empty.
    pub fn wipe(&self, all: bool) {
        self.etcd.lock().wipe(all, self.executor.time());
        self.break_watches();
    }

    /// etcd answers no requests for a while.
    pub fn goes_away(&self, time: Time) {
        self.etcd.lock().goes_away(self.executor.time() + time);
        self.break_watches();
    }

    /// etcd loses all records but one.
    pub fn loses_records(&self) {
        let changes = self.etcd.lock().lose_records();
        self.changed(changes);
    }

    /// Checks that each router sees the registered members, and that all running workers are registered.
    pub fn check(&self, running: &[SimulatedWorker]) {
        let registered = self.etcd.lock().registered();
        for follower in self.followers() {
            let view = follower.members();
            let seen: BTreeMap<_, _> =
                view.members.iter().map(|(id, member)| (id.clone(), member.registration)).collect();
            if !self.is_embedded && seen != registered {
                let what = format!("router{} sees {seen:?}, registered are {registered:?}", follower.slot);
                self.breaches.add(Invariant::ForwardViews, what);
            }
            for worker in running.iter().filter(|worker| view.get(worker.party()).is_none()) {
                let what = format!("{} runs and router{} does not see it", worker.party(), follower.slot);
                self.breaches.add(Invariant::ForwardViews, what);
            }
        }
    }
}
