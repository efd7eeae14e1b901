//! A cluster of simulated processes: starts, ends and troubles of each slot.

use crate::called::{Called, Watched};
use crate::calls::Calls;
use crate::counts::Counting;
use crate::executor::{Executor, Process, ms};
use crate::invariant::Breaches;
use crate::link::{Directory, Links};
use crate::membership::Membership;
use crate::network::Network;
use crate::plan::ClusterPlan;
use crate::prompts::Prompts;
use crate::schedule::Fault;
use crate::worker::{Place, SimulatedWorker};
use baton_node::membership::Members;
use baton_node::metrics::Metrics;
use baton_node::telemetry::Traces;
use baton_router::port::Connector;
use baton_router::{Core, Outside};
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A process that is started again after its device failed is back so soon.
const BACK: Duration = Duration::from_millis(50);

/// What runs in a slot.
struct Occupant {
    process: Process,
    is_alive: bool,
    core: Option<Arc<Core>>,
    worker: Option<SimulatedWorker>,
}

/// A cluster. Clones are the same one.
#[derive(Clone)]
pub struct Cluster {
    /// Time and tasks.
    pub executor: Executor,
    /// What broke.
    pub breaches: Breaches,
    /// What happened.
    pub counts: Counting,
    /// What routers made of requests.
    pub prompts: Prompts,
    /// What routers called.
    pub called: Called,
    /// Who listens where.
    pub directory: Directory,
    /// Who is registered.
    pub membership: Membership,
    plan: Arc<ClusterPlan>,
    network: Network,
    calls: Calls,
    slots: Arc<Mutex<Vec<Occupant>>>,
}

impl Cluster {
    /// Starts everybody.
    pub fn start(executor: Executor, plan: ClusterPlan, breaches: Breaches) -> Self {
        let directory = Directory::default();
        let broken = breaches.clone();
        let breach = Box::new(move |invariant, what| broken.add(invariant, what));
        let network = Network::new(executor.clone(), plan.lane, plan.one_sided_gets, plan.delays, breach);
        let calls = Calls::new(executor.clone(), network.clone(), plan.half_trip);
        let membership =
            Membership::new(executor.clone(), network.clone(), directory.clone(), breaches.clone(), plan.is_embedded);
        let (counts, slots, plan) = (Counting::default(), Arc::default(), Arc::new(plan));
        let (prompts, called) = (Prompts::default(), Called::default());
        let cluster =
            Self { executor, breaches, counts, prompts, called, directory, membership, plan, network, calls, slots };
        for slot in 0..cluster.plan.slots() {
            let started = cluster.started(slot, 1);
            cluster.slots.lock().push(started);
        }
        cluster
    }

    fn count(&self, what: &str) {
        self.counts.lock().add(what, 1);
    }

    /// Starts what belongs into a slot.
    fn started(&self, slot: usize, incarnation: u64) -> Occupant {
        let process = self.executor.start();
        let (core, worker) = match slot < self.plan.routers.len() {
            true => (Some(self.router(slot, process)), None),
            false => (None, Some(self.worker(slot, process, incarnation))),
        };
        Occupant { process, is_alive: true, core, worker }
    }

    fn router(&self, slot: usize, process: Process) -> Arc<Core> {
        let runtime = self.executor.runtime(process);
        let links = Links {
            router: process,
            calls: self.calls.clone(),
            directory: self.directory.clone(),
            counts: self.counts.clone(),
        };
        let (called, executor) = (self.called.clone(), self.executor.clone());
        let connector: Arc<dyn Connector> = match self.plan.is_checked() {
            true => Arc::new(Watched { connector: links, called, executor, router: slot, process }),
            false => Arc::new(links),
        };
        let outside = Outside {
            runtime,
            connector,
            membership: self.membership.follow(slot, process),
            traces: Traces::default(),
            name: self.plan.name(slot).to_owned(),
            // A constant, so that it takes no number from the seed's.
            index_secret: [1, 2],
            stop: CancellationToken::new(),
        };
        Core::start(&self.plan.routers[slot].config, outside, &Metrics::new("baton-router"))
    }

    fn worker(&self, slot: usize, process: Process, incarnation: u64) -> SimulatedWorker {
        let cluster = self.clone();
        let ended = move || {
            // Its keeper ends a process whose engine ended, and starts it again.
            let at = cluster.executor.time() + 1;
            let (ending, back) = (cluster.clone(), cluster.executor.time() + BACK.as_micros() as u64);
            cluster.executor.call(at, Process::WORLD, move || ending.crash(slot, false));
            cluster.clone().executor.call(back, Process::WORLD, move || cluster.restart(slot));
        };
        let worker = SimulatedWorker::start(Place {
            executor: &self.executor,
            network: &self.network,
            plan: self.plan.worker(slot),
            breaches: &self.breaches,
            counts: &self.counts,
            prompts: &self.prompts,
            slot,
            process,
            incarnation,
            members: Members::default(),
            ended: Box::new(ended),
        });
        self.directory.listens(worker.clone());
        let keeps = self.membership.clone().keeps(worker.clone(), self.executor.runtime(process));
        self.executor.spawn(process, keeps);
        worker
    }

    /// The router of a slot, if it runs, with its process.
    pub(crate) fn router_at(&self, slot: usize) -> (Option<Arc<Core>>, Process) {
        let slots = self.slots.lock();
        let slot = &slots[slot];
        (slot.core.clone().filter(|_| slot.is_alive), slot.process)
    }

    fn process(&self, slot: usize) -> Process {
        self.slots.lock()[slot].process
    }

    fn live_worker(&self, slot: usize) -> Option<SimulatedWorker> {
        let slots = self.slots.lock();
        slots[slot].worker.clone().filter(|_| slots[slot].is_alive)
    }

    /// Workers that run.
    pub fn workers(&self) -> Vec<SimulatedWorker> {
        (0..self.plan.slots()).filter_map(|slot| self.live_worker(slot)).collect()
    }

    /// Routers that run.
    pub fn routers(&self) -> Vec<Arc<Core>> {
        self.slots.lock().iter().filter(|slot| slot.is_alive).filter_map(|slot| slot.core.clone()).collect()
    }

    /// Something goes wrong.
    pub(crate) fn trouble(&self, fault: Fault) {
        match fault {
            Fault::Crash { slot, silent } => {
                self.count("fault: crash");
                self.crash(slot, silent);
            }
            Fault::Restart { slot } => self.restart(slot),
            Fault::Stall { slot } => self.stall(slot),
            Fault::Resume { slot } => self.executor.resume(self.process(slot)),
            Fault::Cut { slot, other } => {
                self.count("fault: cut");
                self.network.cut(self.process(slot), self.process(other));
            }
            Fault::Part { slot, other, silent } => {
                self.count("fault: parted");
                self.network.part(self.process(slot), self.process(other), silent);
            }
            Fault::Spoil { slot, other } => {
                self.count("fault: spoilt");
                self.network.spoil(self.process(slot), self.process(other));
            }
            Fault::Damage { slot } => {
                self.count("fault: damage");
                self.network.damage(self.process(slot));
            }
            Fault::DeviceFails { slot } => {
                self.count("fault: device");
                self.live_worker(slot).iter().for_each(|worker| worker.device.fail());
            }
            Fault::Drain { slot } => {
                self.count("fault: drain");
                if let Some(worker) = self.live_worker(slot).filter(|worker| self.executor.is_running(worker.process)) {
                    let process = worker.process;
                    self.executor.call(self.executor.time(), process, move || worker.start_drain());
                }
            }
            Fault::BreakWatch { router } => {
                self.count("fault: watch");
                self.membership.break_watch(router);
            }
            Fault::EtcdAway { ms: time } => {
                self.count("fault: etcd away");
                self.membership.goes_away(ms(time));
            }
            Fault::EtcdWiped { all } => {
                self.count("fault: etcd wiped");
                self.membership.wipe(all);
            }
            Fault::EtcdLosesRecords => {
                self.count("fault: etcd loses records");
                self.membership.loses_records();
            }
            Fault::Heal => self.heal(),
        }
    }

    fn crash(&self, slot: usize, silent: bool) {
        let process = {
            let mut slots = self.slots.lock();
            let slot = &mut slots[slot];
            if !std::mem::replace(&mut slot.is_alive, false) {
                return;
            }
            slot.process
        };
        self.tally(slot);
        self.executor.kill(process);
        self.network.died(process, silent);
        self.calls.died(process, silent);
    }

    fn restart(&self, slot: usize) {
        let incarnation = {
            let slots = self.slots.lock();
            if slots[slot].is_alive {
                return;
            }
            slots[slot].worker.as_ref().map_or(0, |worker| worker.party().incarnation.0) + 1
        };
        let started = self.started(slot, incarnation);
        let before = std::mem::replace(&mut self.slots.lock()[slot], started);
        drop(before);
    }

    fn stall(&self, slot: usize) {
        let process = self.process(slot);
        if !self.executor.is_running(process) {
            return;
        }
        self.count("fault: stall");
        self.executor.stall(process);
        let executor = self.executor.clone();
        let is_back = move || executor.is_running(process);
        self.network.silent(process, is_back.clone());
        self.calls.silent(process, is_back);
    }

    /// Everything is repaired: who stands still goes on, who is dead or drained starts again.
    fn heal(&self) {
        self.network.heal();
        for slot in 0..self.plan.slots() {
            self.executor.resume(self.process(slot));
            if let Some(worker) = self.live_worker(slot) {
                worker.device.repair();
                if worker.drain.has_begun() {
                    self.crash(slot, false);
                }
            }
            self.restart(slot);
        }
    }

    /// Counts what a worker did in this start of it.
    pub fn tally(&self, slot: usize) {
        let Some(worker) = self.slots.lock()[slot].worker.clone() else { return };
        let (load, cache) = (worker.engine.load(), worker.engine.pool().cache_counts());
        let total = worker.transfer.stats().total;
        let mut counts = self.counts.lock();
        counts.add("engine: preempted", load.preemptions);
        counts.add("engine: recomputed tokens", load.recomputed_tokens);
        counts.add("cache: found tokens", load.cached_tokens);
        counts.add("cache: evicted blocks", cache.evicted);
        for (end, times) in &total.sources {
            counts.add(format!("put: source {end}"), *times);
        }
        for (end, times) in &total.sinks {
            counts.add(format!("put: sink {end}"), *times);
            counts.add("put: adopted", if *end == "adopted" { *times } else { 0 });
        }
        for (why, times) in &total.refused {
            counts.add(format!("put: refused {why}"), *times);
        }
        for (end, times) in &total.readers {
            counts.add(if *end == "adopted" { "get: adopted" } else { "get: failed" }, *times);
        }
    }

    /// Endings everything.
    pub fn end(&self) {
        self.executor.end();
        self.directory.clear();
        let slots = std::mem::take(&mut *self.slots.lock());
        drop(slots);
    }
}
