//! Leases of registered instances. Pure: time comes in, decisions go out.

use super::view::{Member, MembershipView, Registration};
use baton_types::{Incarnation, InstanceId, InstanceRecord};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Replaced starts that are remembered for each instance.
const REPLACED_MAX: usize = 8;

/// Why a registration was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// A newer start of the same instance is registered.
    #[error(
        "instance {instance} is registered by a newer start ({current}, at {endpoint}) that replaced this one; \
         two running processes need two instance ids"
    )]
    Replaced {
        /// The instance.
        instance: InstanceId,
        /// The start that holds the name.
        current: Incarnation,
        /// Where that one listens.
        endpoint: String,
    },
    /// The same incarnation is alive at another address: a cloned process, or a copied incarnation.
    #[error(
        "instance {instance} with incarnation {incarnation} is alive at {endpoint}; an incarnation belongs to one process start"
    )]
    Duplicate {
        /// The instance.
        instance: InstanceId,
        /// The incarnation that two processes claim.
        incarnation: Incarnation,
        /// Where the first one listens.
        endpoint: String,
    },
    /// No room.
    #[error("{members_max} instances are registered already, which is the limit (membership.members_max)")]
    Full {
        /// The bound.
        members_max: usize,
    },
}

#[derive(Debug)]
struct Entry {
    record: Arc<InstanceRecord>,
    registration: Registration,
    expires: Instant,
    /// Starts that this one and its predecessors replaced: they may still run, and must not take the name back.
    replaced: VecDeque<Incarnation>,
}

/// The leases that one router keeps.
#[derive(Debug)]
pub struct LeaseTable {
    lease: Duration,
    members_max: usize,
    revision: u64,
    entries: BTreeMap<InstanceId, Entry>,
}

impl LeaseTable {
    /// An empty table. Revisions start after `revision`, so that a restarted router can stay ahead of its past.
    pub fn new(lease: Duration, members_max: usize, revision: u64) -> Self {
        Self { lease, members_max, revision, entries: BTreeMap::new() }
    }

    /// Registers. A new incarnation replaces the instance's earlier one; the same incarnation registers again and takes over.
    pub fn join(&mut self, record: InstanceRecord, now: Instant) -> Result<Registration, JoinError> {
        self.expire(now);
        let (instance, incarnation) = (record.party.instance.clone(), record.party.incarnation);
        let mut replaced = VecDeque::new();
        match self.entries.get(&instance) {
            Some(held) if held.registration.incarnation == incarnation => {
                if held.record.endpoint != record.endpoint {
                    return Err(JoinError::Duplicate { instance, incarnation, endpoint: held.record.endpoint.clone() });
                }
                replaced = held.replaced.clone();
            }
            Some(held) => {
                let current = held.registration.incarnation;
                if held.replaced.contains(&incarnation) {
                    return Err(JoinError::Replaced { instance, current, endpoint: held.record.endpoint.clone() });
                }
                replaced = held.replaced.clone();
                replaced.push_back(current);
                if replaced.len() > REPLACED_MAX {
                    replaced.pop_front();
                }
            }
            None if self.entries.len() >= self.members_max => {
                return Err(JoinError::Full { members_max: self.members_max });
            }
            None => {}
        }
        self.revision += 1;
        let registration = Registration { incarnation, revision: self.revision };
        self.entries
            .insert(instance, Entry { record: Arc::new(record), registration, expires: now + self.lease, replaced });
        Ok(registration)
    }

    /// Renews the lease; `false` where this registration is no longer the current one.
    pub fn heartbeat(&mut self, instance: &InstanceId, registration: Registration, now: Instant) -> bool {
        self.expire(now);
        match self.entries.get_mut(instance).filter(|e| e.registration == registration) {
            Some(entry) => {
                entry.expires = now + self.lease;
                true
            }
            None => false,
        }
    }

    /// Ends this registration, if it is the current one.
    pub fn leave(&mut self, instance: &InstanceId, registration: Registration) -> bool {
        let current = self.entries.get(instance).is_some_and(|e| e.registration == registration);
        if current {
            self.entries.remove(instance);
            self.revision += 1;
        }
        current
    }

    /// Ends all registrations whose lease is over, and returns them.
    pub fn expire(&mut self, now: Instant) -> Vec<InstanceId> {
        let over: Vec<_> = self.entries.iter().filter(|(_, e)| e.expires <= now).map(|(id, _)| id.clone()).collect();
        for id in &over {
            self.entries.remove(id);
            self.revision += 1;
        }
        over
    }

    /// When this registration ends if nothing is heard; `None` where it is not current.
    pub fn expires(&self, instance: &InstanceId, registration: Registration) -> Option<Instant> {
        self.entries.get(instance).filter(|e| e.registration == registration).map(|e| e.expires)
    }

    /// Grows with every change of the view.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Who is registered.
    pub fn view(&self) -> MembershipView {
        let member = |e: &Entry| Member { record: e.record.clone(), registration: e.registration };
        MembershipView {
            members: self.entries.iter().map(|(id, e)| (id.clone(), member(e))).collect(),
            revision: self.revision,
        }
    }
}
