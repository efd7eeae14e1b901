//! A stand-in for etcd: records on leases, a log of changes to watch, and histories that change when it is wiped or restored.

use super::clock::{Addr, Fifo, Time, ms};
use super::event::{Event, Watched};
use super::world::World;
use baton_node::membership::etcd::view::{Change, Position};
use baton_node::membership::{Member, Registration};
use baton_types::InstanceId;
use std::collections::BTreeMap;

/// Life of a worker's lease.
const LEASE: Time = ms(1200);
/// How often etcd looks for leases that ended.
const LOOK: Time = ms(300);
/// Changes that a watch may go on from; older ones are compacted.
const LOG_MAX: usize = 6;

#[derive(Clone, Debug)]
struct Record {
    member: Member,
    owner: Addr,
    ends: Time,
}

/// One router's watch.
#[derive(Debug, Default)]
struct Watch {
    router: Option<Addr>,
    number: u64,
    order: Fifo,
}

/// What stands in etcd.
#[derive(Debug)]
pub(super) struct Etcd {
    position: Position,
    /// Histories so far: a view may only go back where this grew.
    pub(super) stands: u64,
    /// Times that connects to it failed.
    failures: u64,
    records: BTreeMap<InstanceId, Record>,
    log: Vec<(i64, Change)>,
    backup: (i64, BTreeMap<InstanceId, Record>),
    pub(super) away_until: Time,
    watches: BTreeMap<usize, Watch>,
    numbers: u64,
    /// What a lagging member of the cluster would answer.
    lagging: Option<(Position, Vec<Member>)>,
}

impl Default for Etcd {
    fn default() -> Self {
        Self {
            position: Position { cluster: 1, epoch: 1, revision: 1 },
            stands: 0,
            failures: 0,
            records: BTreeMap::new(),
            log: Vec::new(),
            backup: (1, BTreeMap::new()),
            away_until: 0,
            watches: BTreeMap::new(),
            numbers: 0,
            lagging: None,
        }
    }
}

impl Etcd {
    fn members(&self) -> Vec<Member> {
        self.records.values().map(|r| r.member.clone()).collect()
    }

    /// Who is registered, by instance.
    pub(super) fn registered(&self) -> BTreeMap<InstanceId, Registration> {
        self.records.iter().map(|(id, r)| (id.clone(), r.member.registration)).collect()
    }

    fn log(&mut self, changes: &[Change]) {
        let revision = self.position.revision;
        self.log.extend(changes.iter().map(|change| (revision, change.clone())));
    }
}

impl World {
    /// A worker's sign of life reaches etcd, or registers it (again).
    pub(super) fn renewed(&mut self, owner: Addr) {
        if self.clock.now() < self.etcd.away_until || !self.is_alive(owner) {
            return;
        }
        let ends = self.clock.now() + LEASE;
        let Some(worker) = self.worker(owner.process) else { return };
        let record = worker.record.clone();
        let instance = record.party.instance.clone();
        match self.etcd.records.get_mut(&instance) {
            Some(held) if held.owner == owner => held.ends = ends,
            _ => {
                if self.etcd.position.revision % 3 == 0 {
                    self.etcd.lagging = Some((self.etcd.position, self.etcd.members()));
                    self.etcd.backup = (self.etcd.position.revision, self.etcd.records.clone());
                }
                self.etcd.position.revision += 1;
                let revision = self.etcd.position.revision as u64;
                let registration = Registration { incarnation: record.party.incarnation, revision };
                let member = Member { record, registration };
                self.etcd.records.insert(instance, Record { member: member.clone(), owner, ends });
                self.changed(vec![Change::Put(member)]);
            }
        }
    }

    /// etcd looks for leases that ended.
    pub(super) fn leases_end(&mut self) {
        let now = self.clock.now();
        if !self.is_over() {
            self.clock.post(now + LOOK, Addr::WORLD, Event::LeasesEnd);
        }
        if now < self.etcd.away_until {
            return;
        }
        let over = self.etcd.records.iter().filter(|(_, r)| r.ends <= now).map(|(id, _)| id.clone());
        let over: Vec<_> = over.collect();
        self.delete(&over);
    }

    fn delete(&mut self, instances: &[InstanceId]) {
        let mut changes = Vec::new();
        for instance in instances {
            if self.etcd.records.remove(instance).is_some() {
                self.etcd.position.revision += 1;
                changes.push(Change::Deleted(instance.clone()));
            }
        }
        if !changes.is_empty() {
            self.changed(changes);
        }
    }

    /// Records of all but one go, though nobody died.
    pub(super) fn lose_records(&mut self) {
        let most: Vec<_> = self.etcd.records.keys().skip(1).cloned().collect();
        self.delete(&most);
    }

    fn changed(&mut self, changes: Vec<Change>) {
        self.etcd.log(&changes);
        let revision = self.etcd.position.revision;
        let routers: Vec<usize> = self.etcd.watches.keys().copied().collect();
        for router in routers {
            self.tell(router, Watched::Changed { revision, changes: changes.clone() });
        }
    }

    fn tell(&mut self, router: usize, what: Watched) {
        let at = self.clock.now() + self.delay();
        let Some(watch) = self.etcd.watches.get_mut(&router) else { return };
        let Some(to) = watch.router else { return };
        let (at, watch) = (watch.order.arrive(at), watch.number);
        self.clock.post(at, to, Event::Watched { watch, what });
    }

    /// A router asks to follow: from where it stands, else with a list of everything.
    pub(super) fn watch_again(&mut self, router: usize) {
        let here = self.addr(router);
        if self.clock.now() < self.etcd.away_until {
            let at = self.etcd.away_until + self.draw(ms(100) as usize) as Time;
            return self.clock.post(at, here, Event::WatchAgain);
        }
        self.etcd.numbers += 1;
        let number = self.etcd.numbers;
        let (stands_at, failures) = (self.etcd.position, self.etcd.failures);
        let Some(router_state) = self.router_mut(router) else { return };
        router_state.watch = number;
        let known = router_state.view.position();
        let (continues, listed) = (router_state.view.continues(stands_at), router_state.listed_at);
        // After a failed connect another etcd may stand at the same address: the next one lists.
        let may_resume = continues && listed == failures && !self.mutant.lists_from_the_past();
        let order = self.etcd.watches.get(&router).map(|w| w.order).unwrap_or_default();
        self.etcd.watches.insert(router, Watch { router: Some(here), number, order });
        let compacted = self.etcd.log.iter().rev().nth(LOG_MAX).map_or(0, |(revision, _)| *revision);
        match known {
            Some(known) if may_resume && known.revision >= compacted => {
                self.counts.add("view", "resumes");
                let missed = self.etcd.log.iter().filter(|(r, _)| *r > known.revision);
                let missed: Vec<_> = missed.map(|(_, change)| change.clone()).collect();
                if !missed.is_empty() {
                    let revision = self.etcd.position.revision;
                    self.tell(router, Watched::Changed { revision, changes: missed });
                }
            }
            _ => self.list(router),
        }
    }

    fn list(&mut self, router: usize) {
        let mut answer = (self.etcd.position, self.etcd.members());
        if let Some(lagging) = self.etcd.lagging.clone().filter(|_| self.mutant.lists_from_the_past()) {
            answer = lagging;
        }
        let (stands, failures) = (self.etcd.stands, self.etcd.failures);
        self.tell(router, Watched::Listed { position: answer.0, members: answer.1, stands, failures });
    }

    /// A watch breaks off; its router asks again after a while.
    pub(super) fn break_watch(&mut self, router: usize) {
        if let Some(watch) = self.etcd.watches.get_mut(&router) {
            watch.router = None;
        }
        let here = self.addr(router);
        let at = self.clock.now() + ms(5) + self.draw(ms(300) as usize) as Time;
        self.clock.post(at, here, Event::WatchAgain);
    }

    /// etcd is restored from its last backup, or comes back empty.
    pub(super) fn wipe(&mut self, all: bool) {
        self.etcd.stands += 1;
        self.etcd.failures += 1;
        self.etcd.log.clear();
        self.etcd.lagging = None;
        if all {
            self.etcd.position = Position { epoch: self.etcd.position.epoch + 1, revision: 2, ..self.etcd.position };
            self.etcd.records.clear();
            self.etcd.backup = (2, BTreeMap::new());
        } else {
            let (revision, records) = self.etcd.backup.clone();
            self.etcd.position.revision = revision;
            self.etcd.records = records;
        }
        let ends = self.clock.now() + LEASE;
        self.etcd.records.values_mut().for_each(|r| r.ends = ends);
        for router in 0..self.shape.routers {
            self.break_watch(router);
        }
    }

    /// etcd answers nobody for a while; leases are counted anew afterwards.
    pub(super) fn etcd_goes_away(&mut self, wait: u64) {
        let until = self.clock.now() + ms(wait);
        self.etcd.failures += 1;
        self.etcd.away_until = until;
        self.etcd.records.values_mut().for_each(|r| r.ends = until + LEASE);
        for router in 0..self.shape.routers {
            self.break_watch(router);
        }
    }
}
