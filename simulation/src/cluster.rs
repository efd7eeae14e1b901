//! A cluster of simulated processes: starts, ends and troubles of each slot.

use crate::calls::Calls;
use crate::client::{Client, Ending, Endings};
use crate::counts::Counting;
use crate::executor::{Executor, Process, ms};
use crate::invariant::{Breaches, Invariant};
use crate::link::{Directory, Links};
use crate::membership::Membership;
use crate::network::{Delays, Network};
use crate::prompts::Prompts;
use crate::schedule::{Fault, HEALED, Schedule, Shape};
use crate::worker::{Place, SimulatedWorker};
use baton_node::membership::Members;
use baton_node::metrics::Metrics;
use baton_node::telemetry::Traces;
use baton_router::{Core, Outside, RouterConfig};
use baton_types::TenantId;
use parking_lot::Mutex;
use std::sync::Arc;
use std::time::Duration;
use tokio_util::sync::CancellationToken;

/// A process that is started again after its device failed is back so soon.
const BACK: Duration = Duration::from_millis(50);
/// A woken task is polled at most so late.
const LATE_MAX: Duration = Duration::from_micros(300);

/// Prompts of the first tenant are pinned for so long.
const PIN_MS: u64 = 1_000;

/// What runs in a slot.
struct Occupant {
    process: Process,
    is_alive: bool,
    core: Option<Arc<Core>>,
    worker: Option<SimulatedWorker>,
}

/// The cluster of one schedule. Clones are the same one.
#[derive(Clone)]
pub struct Cluster {
    /// Time and tasks.
    pub executor: Executor,
    /// What broke.
    pub breaches: Breaches,
    /// How requests ended.
    pub ends: Endings,
    /// What happened.
    pub counts: Counting,
    /// What routers made of requests.
    pub prompts: Prompts,
    /// Who listens where.
    pub directory: Directory,
    /// Who is registered.
    pub membership: Membership,
    schedule: Arc<Schedule>,
    network: Network,
    calls: Calls,
    slots: Arc<Mutex<Vec<Occupant>>>,
}

impl Cluster {
    /// Starts everybody.
    pub fn start(seed: u64, draw: impl FnOnce(&mut crate::random::Random) -> Schedule) -> Self {
        let executor = Executor::new(seed, LATE_MAX);
        let schedule = Arc::new(executor.draw(draw));
        let shape = &schedule.shape;
        let (breaches, directory) = (Breaches::default(), Directory::default());
        let broken = breaches.clone();
        let breach = Box::new(move |what| broken.add(Invariant::GrantedMemory, what));
        let delays = Delays { slow_once_in: shape.slow_once_in, slow_until: HEALED };
        let network = Network::new(executor.clone(), shape.lane, shape.gets_by_itself, delays, breach);
        let calls = Calls::new(executor.clone(), network.clone());
        let membership =
            Membership::new(executor.clone(), network.clone(), directory.clone(), breaches.clone(), shape.is_embedded);
        let ends = Endings::new(schedule.requests.len());
        let (counts, slots, prompts) = Default::default();
        let cluster =
            Self { executor, breaches, ends, counts, prompts, directory, membership, schedule, network, calls, slots };
        for slot in 0..cluster.schedule.shape.slots() {
            let started = cluster.started(slot, 1);
            cluster.slots.lock().push(started);
        }
        cluster.plan();
        cluster
    }

    /// Requests and faults happen when their times come.
    fn plan(&self) {
        for request in 0..self.schedule.requests.len() {
            let (cluster, at) = (self.clone(), self.schedule.requests[request].at);
            self.executor.call(at, Process::WORLD, move || cluster.ask(request));
        }
        for &(at, fault) in self.schedule.faults.iter().filter(|(at, fault)| *at < HEALED || *fault == Fault::Heal) {
            let cluster = self.clone();
            self.executor.call(at, Process::WORLD, move || cluster.trouble(fault));
        }
    }

    /// What the seed decided.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Whether a worker may fail for a reason inside: its device does, or its bytes are damaged.
    pub fn may_break(&self) -> bool {
        let breaks = |fault: &Fault| matches!(fault, Fault::DeviceFails { .. } | Fault::Damage { .. });
        self.schedule.faults.iter().any(|(_, fault)| breaks(fault))
    }

    fn shape(&self) -> &Shape {
        &self.schedule.shape
    }

    fn count(&self, what: &str) {
        self.counts.lock().add(what, 1);
    }

    /// Starts what belongs into a slot.
    fn started(&self, slot: usize, incarnation: u64) -> Occupant {
        let process = self.executor.start();
        let (core, worker) = match slot < self.shape().routers {
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
        let outside = Outside {
            runtime,
            connector: Arc::new(links),
            membership: self.membership.follow(slot, process),
            traces: Traces::default(),
            name: self.shape().name(slot),
            stop: CancellationToken::new(),
        };
        Core::start(&router_config(self.shape()), outside, &Metrics::new("baton-router"))
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
            shape: self.shape(),
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

    /// A client asks the router that it knows.
    fn ask(&self, request: usize) {
        let spec = self.schedule.requests[request].clone();
        let (core, process) = {
            let slots = self.slots.lock();
            let slot = &slots[spec.to];
            (slot.core.clone().filter(|_| slot.is_alive), slot.process)
        };
        let Some(core) = core else { return self.ends.add(request, self.executor.time(), Ending::NoRouter) };
        let client = Client {
            executor: self.executor.clone(),
            runtime: self.executor.runtime(process),
            breaches: self.breaches.clone(),
            ends: self.ends.clone(),
            prompts: self.prompts.clone(),
            request,
            spec,
        };
        self.executor.spawn(process, client.ask(core));
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
        (0..self.shape().slots()).filter_map(|slot| self.live_worker(slot)).collect()
    }

    /// Routers that run.
    pub fn routers(&self) -> Vec<Arc<Core>> {
        self.slots.lock().iter().filter(|slot| slot.is_alive).filter_map(|slot| slot.core.clone()).collect()
    }

    /// Something goes wrong.
    fn trouble(&self, fault: Fault) {
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
        for slot in 0..self.shape().slots() {
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

fn router_config(shape: &Shape) -> RouterConfig {
    let mut config = RouterConfig::default();
    (config.limits.running_max, config.limits.queued_max) = shape.admits;
    config.limits.claim_ms_max = 400;
    config.limits.client_stall_ms_max = 600;
    config.retry.attempts_max = shape.attempts_max;
    config.retry.ready_ms_max = shape.ready_max.as_millis() as u64;
    config.retry.adopted_ms_max = 1_000;
    config.retry.probation_ms_max = 1_000;
    config.placement.local_prefill_tokens_max = 24;
    config.placement.gets = shape.gets;
    let pinned = TenantId::try_new("t0").expect("a short name");
    config.cache.pins.insert(pinned, PIN_MS);
    config
}
