//! Leases of registered instances. Pure: time is an input, decisions are the output.

use super::view::{Member, MembershipView, Registration};
use baton_types::{Incarnation, InstanceId, InstanceRecord};
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Replaced incarnations that are remembered per instance.
const REPLACED_MAX: usize = 8;

/// Why a registration was refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum JoinError {
    /// A newer incarnation of the same instance is registered.
    #[error(
        "instance {instance} is registered by a newer start ({current}, at {endpoint}) that replaced this one; \
         two running processes need two instance ids"
    )]
    Replaced {
        instance: InstanceId,
        /// The incarnation that holds the name.
        current: Incarnation,
        /// Where that incarnation listens.
        endpoint: String,
    },
    /// The same incarnation is alive at another address: a cloned process, or a copied incarnation.
    #[error(
        "instance {instance} with incarnation {incarnation} is alive at {endpoint}; an incarnation belongs to one process start"
    )]
    Duplicate {
        instance: InstanceId,
        /// The incarnation that two processes claim.
        incarnation: Incarnation,
        /// The address of the first one.
        endpoint: String,
    },
    /// The table is full.
    #[error("{members_max} instances are registered already, which is the limit (membership.members_max)")]
    Full { members_max: usize },
}

#[derive(Debug)]
struct Entry {
    record: Arc<InstanceRecord>,
    registration: Registration,
    expires: Instant,
    /// Incarnations that this one and its predecessors replaced: they may still run, and must not take the name back.
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
    /// An empty table. Its revisions start after `revision`, so that they still grow after the router restarts.
    pub fn new(lease: Duration, members_max: usize, revision: u64) -> Self {
        Self { lease, members_max, revision, entries: BTreeMap::new() }
    }

    /// Registers a record. A new incarnation replaces the instance's earlier one; the same incarnation registers again
    /// and takes over.
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

    /// Renews the lease; `false` if this registration is no longer the current one.
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

    /// Ends all registrations whose lease has ended, and returns them.
    pub fn expire(&mut self, now: Instant) -> Vec<InstanceId> {
        let over: Vec<_> = self.entries.iter().filter(|(_, e)| e.expires <= now).map(|(id, _)| id.clone()).collect();
        for id in &over {
            self.entries.remove(id);
            self.revision += 1;
        }
        over
    }

    /// When this registration ends without a heartbeat; `None` if it is not current.
    pub fn expires(&self, instance: &InstanceId, registration: Registration) -> Option<Instant> {
        self.entries.get(instance).filter(|e| e.registration == registration).map(|e| e.expires)
    }

    /// Grows with every change of the view.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    pub fn view(&self) -> MembershipView {
        let member = |e: &Entry| Member { record: e.record.clone(), registration: e.registration };
        MembershipView {
            members: self.entries.iter().map(|(id, e)| (id.clone(), member(e))).collect(),
            revision: self.revision,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::conformance::record;
    use super::*;

    const LEASE: Duration = Duration::from_secs(10);

    /// One step at a second: `+a1` registers instance a with incarnation 1, `~a1` sends its heartbeat, `-a1` leaves,
    /// `?` only reads.
    fn run(script: &str) -> String {
        let start = Instant::now();
        let mut table = LeaseTable::new(LEASE, 2, 0);
        let mut held = BTreeMap::new();
        let mut out = Vec::new();
        for step in script.split_whitespace() {
            let (second, op) = step.split_once(':').unwrap();
            let now = start + Duration::from_secs(second.parse().unwrap());
            let (op, who) = op.split_at(1);
            let result = if op == "?" {
                table.expire(now);
                "ok".to_owned()
            } else {
                let (instance, incarnation) = who.split_at(1);
                let record = record(instance, incarnation.parse().unwrap());
                let id = record.party.instance.clone();
                let registration =
                    held.get(who).copied().unwrap_or(Registration { incarnation: Incarnation(0), revision: 0 });
                match op {
                    "+" => match table.join(record, now) {
                        Ok(registration) => {
                            held.insert(who.to_owned(), registration);
                            "ok".into()
                        }
                        Err(JoinError::Replaced { .. }) => "replaced".into(),
                        Err(JoinError::Duplicate { .. }) => "duplicate".into(),
                        Err(JoinError::Full { .. }) => "full".into(),
                    },
                    "~" => table.heartbeat(&id, registration, now).to_string(),
                    _ => table.leave(&id, registration).to_string(),
                }
            };
            let view = table.view();
            let members: Vec<_> =
                view.members.iter().map(|(id, m)| format!("{id}{}", m.registration.incarnation.0)).collect();
            out.push(format!("{result}[{}]r{}", members.join(" "), view.revision));
        }
        out.join(" ")
    }

    #[test]
    fn scripts() {
        let check = |script: &str, expected: &str| assert_eq!(run(script), expected, "{script}");
        check("0:+a1 9:? 10:?", "ok[a1]r1 ok[a1]r1 ok[]r2");
        check("0:+a1 9:~a1 18:? 19:?", "ok[a1]r1 true[a1]r1 ok[a1]r1 ok[]r2");
        check("0:+a1 1:-a1 2:-a1 3:~a1", "ok[a1]r1 true[]r2 false[]r2 false[]r2");
        // The same incarnation registers again, before or after its lease ended.
        check("0:+a1 1:+a1 12:+a1", "ok[a1]r1 ok[a1]r2 ok[a1]r4");
        // A new incarnation replaces the old, which is refused while the new one is registered, and only then.
        check(
            "0:+a1 1:+a2 2:~a1 3:+a1 4:-a1 5:-a2 6:+a1",
            "ok[a1]r1 ok[a2]r2 false[a2]r2 replaced[a2]r2 false[a2]r2 true[]r3 ok[a1]r4",
        );
        check("0:+a1 1:+a2 2:+a3 3:+a1 4:+a2", "ok[a1]r1 ok[a2]r2 ok[a3]r3 replaced[a3]r3 replaced[a3]r3");
        // Also once the new one has registered again.
        check("0:+a1 1:+a2 2:+a2 3:+a1", "ok[a1]r1 ok[a2]r2 ok[a2]r3 replaced[a2]r3");
        // Bounded; a full table still accepts restarts of its members, and leases that end make room.
        check("0:+a1 0:+b1 1:+c1 2:+a2 10:+c1", "ok[a1]r1 ok[a1 b1]r2 full[a1 b1]r2 ok[a2 b1]r3 ok[a2 c1]r5");
    }

    #[test]
    fn remembered_starts_are_bounded() {
        let mut table = LeaseTable::new(LEASE, 1, 0);
        let now = Instant::now();
        for incarnation in 0..100 {
            table.join(record("a", incarnation), now).unwrap();
        }
        assert!(matches!(table.join(record("a", 98), now), Err(JoinError::Replaced { .. })));
        assert_eq!(table.entries.values().map(|e| e.replaced.len()).max(), Some(REPLACED_MAX));
    }

    #[test]
    fn one_incarnation_at_two_addresses_is_refused() {
        let mut table = LeaseTable::new(LEASE, 1, 0);
        let now = Instant::now();
        table.join(record("a", 1), now).unwrap();
        let clone = InstanceRecord { endpoint: "127.0.0.1:9".into(), ..record("a", 1) };
        assert!(matches!(table.join(clone.clone(), now), Err(JoinError::Duplicate { .. })));
        assert!(table.join(clone, now + LEASE).is_ok());
    }
}
