//! What one start of a router follows: the shipped view of etcd, or the shipped lease table, and that neither goes back.

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

/// Members asked at once.
const PROBES_MAX: usize = 8;
/// Life of an embedded lease without a sign of life.
const LEASE: Duration = Duration::from_millis(1200);
/// Bounds of the views.
const LIMITS: ViewLimits = ViewLimits {
    grace: Duration::from_millis(1000),
    window: Duration::from_millis(300),
    probe_every: Duration::from_millis(400),
    members_max: 16,
};

/// News of etcd.
#[derive(Clone)]
pub(super) enum News {
    /// Everybody who is registered, read at this position of this history, after so many failed connects.
    Listed { position: Position, members: Vec<Member>, history: u64, failures: u64 },
    /// What changed up to a revision.
    Changed { revision: i64, changes: Vec<Change> },
}

/// What follows a view.
struct Following {
    view: EtcdView,
    /// In the place of etcd, where membership is embedded.
    table: Option<LeaseTable>,
    /// What each start was told when it registered here.
    held: BTreeMap<Party, Registration>,
    /// Where the view last stood, in which history of etcd.
    stood: Option<(Position, u64)>,
    /// How often connects had failed when it last listed.
    listed_at: u64,
    /// Of each member, with the history in which it was first seen.
    registrations: BTreeMap<InstanceId, (Registration, u64)>,
    /// Who was asked and has not answered.
    questions: BTreeSet<Party>,
    /// When it is looked next who is to be asked.
    asks_at: Option<Time>,
}

/// One start of a router as the membership knows it.
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

    /// Who is registered, as this router sees it.
    pub fn members(&self) -> MembershipView {
        let following = self.following.lock();
        following.table.as_ref().map_or_else(|| following.view.view(), LeaseTable::view)
    }

    /// Whether a watch may go on from where it stands, and from where, in an etcd that stands at `found` after so many failed connects.
    pub(super) fn resumes(&self, found: Position, failures: u64) -> Option<i64> {
        let following = self.following.lock();
        // After a failed connect another etcd may stand at the same address: the next one lists.
        let may = following.view.continues(found) && following.listed_at == failures;
        following.view.position().filter(|_| may).map(|position| position.revision)
    }

    /// News of etcd came.
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

    /// A worker's sign of life, where membership is embedded.
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

    /// A worker gives its embedded registration up.
    pub(super) fn leaves(&self, party: &Party) {
        let mut following = self.following.lock();
        let Some(registration) = following.held.remove(party) else { return };
        let Some(table) = &mut following.table else { return };
        table.leave(&party.instance, registration);
        self.publish(&mut following, 0);
    }

    /// Embedded leases that ended go.
    pub(super) fn expire(&self) {
        let mut following = self.following.lock();
        let now = self.executor.instant(self.executor.time());
        if following.table.as_mut().is_some_and(|table| !table.expire(now).is_empty()) {
            self.publish(&mut following, 0);
        }
    }

    /// Doubted members that are to be asked now.
    pub(super) fn asks(&self) -> Vec<Arc<InstanceRecord>> {
        let mut following = self.following.lock();
        let due = following.view.due(self.executor.instant(self.executor.time()), PROBES_MAX);
        following.questions.extend(due.iter().map(|record| record.party.clone()));
        due
    }

    /// When somebody is to be asked next.
    pub(super) fn asks_at(&self) -> Option<Time> {
        self.following.lock().view.next_due().map(|due| self.executor.time_of(due))
    }

    /// Whether it is not known yet that somebody is to be asked then.
    pub(super) fn is_new(&self, at: Time) -> bool {
        self.following.lock().asks_at.replace(at) != Some(at)
    }

    /// A doubted worker answered, or its time is over.
    pub(super) fn answered(&self, party: &Party, alive: bool) {
        let mut following = self.following.lock();
        if following.questions.remove(party) {
            following.view.answered(party, alive);
            let history = following.stood.map_or(0, |(_, history)| history);
            self.publish(&mut following, history);
        }
    }

    /// Tells the router, once it is known that the view did not go back.
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
