//! A simulated etcd: records on leases, a log of changes to watch, and histories that change when etcd is wiped or restored.

use crate::executor::{Time, ms};
use baton_node::membership::etcd::view::{Change, Position};
use baton_node::membership::{Member, Registration};
use baton_types::{InstanceId, InstanceRecord, Party};
use std::collections::BTreeMap;
use std::sync::Arc;

/// TTL of a worker's lease.
pub(super) const LEASE: Time = ms(1200);
/// Changes from which a watch may resume; older ones are compacted.
const LOG_MAX: usize = 6;

#[derive(Clone, Debug)]
struct Record {
    member: Member,
    ends: Time,
}

/// The state of etcd.
#[derive(Debug)]
pub(super) struct Etcd {
    pub(super) position: Position,
    /// Number of histories so far: a view may go back only if this has grown.
    pub(super) histories: u64,
    /// Number of failed connects to it.
    pub(super) failures: u64,
    pub(super) away_until: Time,
    records: BTreeMap<InstanceId, Record>,
    log: Vec<(i64, Change)>,
    backup: (i64, BTreeMap<InstanceId, Record>),
    /// The answer of a lagging etcd member.
    pub(super) lagging: Option<(Position, Vec<Member>)>,
}

impl Default for Etcd {
    fn default() -> Self {
        Self {
            position: Position { cluster: 1, epoch: 1, revision: 1 },
            histories: 0,
            failures: 0,
            away_until: 0,
            records: BTreeMap::new(),
            log: Vec::new(),
            backup: (1, BTreeMap::new()),
            lagging: None,
        }
    }
}

impl Etcd {
    pub(super) fn members(&self) -> Vec<Member> {
        self.records.values().map(|record| record.member.clone()).collect()
    }

    pub(super) fn registered(&self) -> BTreeMap<InstanceId, Registration> {
        self.records.iter().map(|(id, record)| (id.clone(), record.member.registration)).collect()
    }

    /// Renews a worker's lease. If it has none, registers the worker, which is a change.
    pub(super) fn renewed(&mut self, record: Arc<InstanceRecord>, now: Time) -> Vec<Change> {
        let instance = record.party.instance.clone();
        if let Some(held) = self.records.get_mut(&instance).filter(|held| held.member.record.party == record.party) {
            held.ends = now + LEASE;
            return Vec::new();
        }
        if self.position.revision % 3 == 0 {
            self.lagging = Some((self.position, self.members()));
            self.backup = (self.position.revision, self.records.clone());
        }
        self.position.revision += 1;
        let revision = self.position.revision as u64;
        let registration = Registration { incarnation: record.party.incarnation, revision };
        let member = Member { record, registration };
        self.records.insert(instance, Record { member: member.clone(), ends: now + LEASE });
        self.logged(vec![Change::Put(member)])
    }

    /// Removes records whose leases have expired.
    pub(super) fn expire(&mut self, now: Time) -> Vec<Change> {
        let over = self.records.iter().filter(|(_, record)| record.ends <= now).map(|(id, _)| id.clone()).collect();
        self.delete(over)
    }

    /// A worker deregisters.
    pub(super) fn leave(&mut self, party: &Party) -> Vec<Change> {
        let is_its = self.records.get(&party.instance).is_some_and(|held| held.member.record.party == *party);
        self.delete(is_its.then(|| party.instance.clone()).into_iter().collect())
    }

    /// Removes all records but one, although no worker died.
    pub(super) fn lose_records(&mut self) -> Vec<Change> {
        let most = self.records.keys().skip(1).cloned().collect();
        self.delete(most)
    }

    fn delete(&mut self, instances: Vec<InstanceId>) -> Vec<Change> {
        let mut changes = Vec::new();
        for instance in instances {
            if self.records.remove(&instance).is_some() {
                self.position.revision += 1;
                changes.push(Change::Deleted(instance));
            }
        }
        self.logged(changes)
    }

    fn logged(&mut self, changes: Vec<Change>) -> Vec<Change> {
        let revision = self.position.revision;
        self.log.extend(changes.iter().map(|change| (revision, change.clone())));
        changes
    }

    /// The changes since a revision, if they are still known.
    pub(super) fn since(&self, revision: i64) -> Option<Vec<Change>> {
        let compacted = self.log.iter().rev().nth(LOG_MAX).map_or(0, |(revision, _)| *revision);
        let missed = self.log.iter().filter(|(at, _)| *at > revision).map(|(_, change)| change.clone());
        (revision >= compacted).then(|| missed.collect())
    }

    /// etcd is restored from its last backup, or comes back empty.
    pub(super) fn wipe(&mut self, all: bool, now: Time) {
        self.histories += 1;
        self.failures += 1;
        self.log.clear();
        self.lagging = None;
        if all {
            self.position = Position { epoch: self.position.epoch + 1, revision: 2, ..self.position };
            self.records.clear();
            self.backup = (2, BTreeMap::new());
        } else {
            (self.position.revision, self.records) = self.backup.clone();
        }
        self.records.values_mut().for_each(|record| record.ends = now + LEASE);
    }

    /// etcd answers no requests until then; afterwards all leases start again with their full TTL.
    pub(super) fn goes_away(&mut self, until: Time) {
        self.failures += 1;
        self.away_until = self.away_until.max(until);
        self.records.values_mut().for_each(|record| record.ends = until + LEASE);
    }
}
