//! The membership as one start of a router follows it: the product's view of etcd, or its lease table. Checks that neither goes back.

use crate::executor::{Executor, Process, Time};
use crate::invariant::{Breaches, Invariant};
use baton_node::membership::etcd::view::{Change, EtcdView, Position, ViewLimits};
use baton_node::membership::{LeaseTable, Member, MembershipView, Registration, RouterMembership};
use baton_types::{InstanceId, InstanceRecord, Party};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;

/// Members probed at once.
const PROBES_MAX: usize = 8;
/// TTL of an embedded lease.
const LEASE: Duration = Duration::from_millis(1200);
/// Bounds of the views.
const LIMITS: ViewLimits = ViewLimits {
    grace: Duration::from_millis(1000),
    settle: Duration::from_millis(100),
    window: Duration::from_millis(300),
    probe_every: Duration::from_millis(400),
    members_max: 4096,
};

/// A message from etcd.
#[derive(Clone)]
pub(super) enum News {
    /// All registered members, read at this position of this history, after this many failed connects.
    Listed { position: Position, members: Vec<Member>, history: u64, failures: u64 },
    /// What changed up to a revision.
    Changed { revision: i64, changes: Vec<Change> },
}

/// The state that a router follows.
struct Following {
    view: EtcdView,
    /// Replaces etcd if membership is embedded.
    table: Option<LeaseTable>,
    /// The answer that each start received when it registered here.
    held: BTreeMap<Party, Registration>,
    /// The last position of the view, with its history of etcd.
    stood: Option<(Position, u64)>,
    /// The number of failed connects when it last listed.
    listed_at: u64,
    /// For each member, its registration and the history in which it was first seen.
    registrations: BTreeMap<InstanceId, (Registration, u64)>,
    /// Members that were probed and have not answered.
    questions: BTreeSet<Party>,
    /// When to check next which members to probe.
    asks_at: Option<Time>,
}

/// The membership of one start of a router.
pub struct Follower {
    pub(super) slot: usize,
    pub(super) process: Process,
    executor: Executor,
    breaches: Breaches,
    following: Mutex<Following>,
    published: watch::Sender<Arc<MembershipView>>,
}

impl RouterMembership for Follower {
    fn view(&self) -> watch::Receiver<Arc<MembershipView>> {
        self.published.subscribe()
    }

    fn admit(&self, party: &Party) -> bool {
        self.members().get(party).is_some()
    }

    fn evict(&self, party: &Party, _: &str) -> bool {
        self.members().get(party).is_some()
    }
}

impl Follower {
    pub(super) fn new(
        slot: usize,
        process: Process,
        is_embedded: bool,
        executor: Executor,
        breaches: Breaches,
    ) -> Self {
        let following = Following {
            view: EtcdView::new(LIMITS, 0),
            table: is_embedded.then(|| LeaseTable::new(LEASE, LIMITS.members_max, 0)),
            held: BTreeMap::new(),
            stood: None,
            listed_at: 0,
            registrations: BTreeMap::new(),
            questions: BTreeSet::new(),
            asks_at: None,
        };
        let (following, published) = (Mutex::new(following), watch::Sender::new(Arc::default()));
        Self { slot, process, executor, breaches, following, published }
    }

    /// The registered members, as this router sees them.
    pub fn members(&self) -> MembershipView {
        let following = self.following.lock();
        following.table.as_ref().map_or_else(|| following.view.view(), LeaseTable::view)
    }

    /// Whether a watch may resume from its position, and from which one. etcd is at `found`, after this many failed connects.
    pub(super) fn resumes(&self, found: Position, failures: u64) -> Option<i64> {
        let following = self.following.lock();
        // After a failed connect another etcd may be at the same address: the next connect lists.
        let may = following.view.continues(found) && following.listed_at == failures;
        following.view.position().filter(|_| may).map(|position| position.revision)
    }

    /// Receives a message of etcd.
    pub(super) fn hears(&self, news: News) {
        let mut following = self.following.lock();
        let now = self.executor.instant(self.executor.time());
        let mut history = following.stood.map_or(0, |(_, history)| history);
        match news {
            News::Listed { position, members, history: found, failures } => {
                (history, following.listed_at) = (found, failures);
                following.view.listed(position, members, now);
            }
            News::Changed { revision, changes } => following.view.changed(revision, changes, now),
        }
        self.publish(&mut following, history);
    }

    /// Receives a worker's heartbeat, if membership is embedded.
    pub(super) fn beat(&self, record: &Arc<InstanceRecord>) {
        let mut following = self.following.lock();
        let now = self.executor.instant(self.executor.time());
        let party = &record.party;
        let held = following.held.get(party).copied();
        let Some(table) = &mut following.table else { return };
        if held.is_some_and(|held| table.heartbeat(&party.instance, held, now)) {
            return;
        }
        if let Ok(registration) = table.join(InstanceRecord::clone(record), now) {
            following.held.insert(party.clone(), registration);
            self.publish(&mut following, 0);
        }
    }

    /// A worker removes its embedded registration.
    pub(super) fn leaves(&self, party: &Party) {
        let mut following = self.following.lock();
        let Some(registration) = following.held.remove(party) else { return };
        let Some(table) = &mut following.table else { return };
        table.leave(&party.instance, registration);
        self.publish(&mut following, 0);
    }

    /// Removes embedded leases that have expired.
    pub(super) fn expire(&self) {
        let mut following = self.following.lock();
        let now = self.executor.instant(self.executor.time());
        if following.table.as_mut().is_some_and(|table| !table.expire(now).is_empty()) {
            self.publish(&mut following, 0);
        }
    }

    /// Suspected members to probe now. Members whose records were removed long enough ago leave.
    pub(super) fn asks(&self) -> Vec<Arc<InstanceRecord>> {
        let mut following = self.following.lock();
        let now = self.executor.instant(self.executor.time());
        following.view.settle(now);
        let history = following.stood.map_or(0, |(_, history)| history);
        self.publish(&mut following, history);
        let due = following.view.due(now, PROBES_MAX);
        following.questions.extend(due.iter().map(|record| record.party.clone()));
        due
    }

    /// When to probe next.
    pub(super) fn asks_at(&self) -> Option<Time> {
        self.following.lock().view.next_due().map(|due| self.executor.time_of(due))
    }

    /// Whether that probe is not scheduled yet.
    pub(super) fn is_new(&self, at: Time) -> bool {
        self.following.lock().asks_at.replace(at) != Some(at)
    }

    /// A suspected worker answered, or its time is over.
    pub(super) fn answered(&self, party: &Party, alive: bool) {
        let mut following = self.following.lock();
        if following.questions.remove(party) {
            following.view.answered(party, alive);
            let history = following.stood.map_or(0, |(_, history)| history);
            self.publish(&mut following, history);
        }
    }

    /// Publishes the view to the router, after checking that it did not go back.
    fn publish(&self, following: &mut Following, history: u64) {
        let view = following.table.as_ref().map_or_else(|| following.view.view(), LeaseTable::view);
        let before = self.published.borrow().clone();
        let mut wrong = Vec::new();
        if view.revision < before.revision {
            wrong.push(format!("from revision {} of its own to {}", before.revision, view.revision));
        }
        let position = following.view.position();
        if let (Some((stood, when)), Some(position)) = (following.stood, position)
            && when == history
            && position.revision < stood.revision
        {
            wrong.push(format!("from revision {} to {}", stood.revision, position.revision));
        }
        let mut registrations = BTreeMap::new();
        for (id, member) in &view.members {
            let was = following.registrations.get(id);
            if was.is_some_and(|(was, when)| *when == history && was.revision > member.registration.revision) {
                wrong.push(format!("to an older registration of {id}"));
            }
            let when = was.filter(|(was, _)| *was == member.registration).map_or(history, |(_, when)| *when);
            registrations.insert(id.clone(), (member.registration, when));
        }
        following.registrations = registrations;
        following.stood = position.map(|position| (position, history));
        for how in wrong {
            self.breaches.add(Invariant::ForwardViews, format!("the view of router{} went back {how}", self.slot));
        }
        if *before != view {
            self.published.send_replace(Arc::new(view));
        }
    }
}
