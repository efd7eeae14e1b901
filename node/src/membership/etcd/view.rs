//! A router's view of the cluster, built from lists and watch events. Pure: time is an input, decisions are the output.
//!
//! A member whose record is removed leaves the view after [`ViewLimits::settle`], with two exceptions. In these it is
//! *doubted* (suspected): it stays in the view, and is asked directly. First, after etcd was wiped or restored, every
//! member has a grace to register again. Second, if most records of a cluster vanish within a window, etcd is presumed
//! to be at fault until the workers' own answers show otherwise. Members that had already left within the window are
//! then suspected, too.

use crate::membership::{Member, MembershipView};
use baton_types::{InstanceId, InstanceRecord, Party};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Limits of a view.
#[derive(Clone, Copy, Debug)]
pub struct ViewLimits {
    /// After a wipe or restore, members that did not register again are asked only after this.
    pub grace: Duration,
    /// A member whose record was removed leaves only after this, so that none leaves when etcd ends all leases within
    /// it. etcd ends leases one at a time.
    pub settle: Duration,
    /// Records that vanish within this time of each other are evaluated together.
    pub window: Duration,
    /// Interval of questions to a suspected member; longer than one question takes.
    pub probe_every: Duration,
    /// Most members; further ones are left out until there is room and a new list is read.
    pub members_max: usize,
}

/// The position of a view in etcd's history.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Position {
    /// Id of the etcd cluster.
    pub cluster: u64,
    /// Drawn once per history; a wiped cluster may have its old cluster id.
    pub epoch: u64,
    /// Revision of the last change seen.
    pub revision: i64,
}

#[derive(Clone, Debug)]
pub enum Change {
    /// Registered, or registered again.
    Put(Member),
    /// The record was removed.
    Deleted(InstanceId),
}

#[derive(Clone, Debug)]
struct ViewEntry {
    member: Member,
    /// Set once its record was removed, unless suspected: when it leaves.
    leaves: Option<Instant>,
    /// Set while suspected: when to ask.
    ask: Option<Instant>,
    /// The member with this name in a restored etcd; it takes over if the known one is gone.
    rival: Option<Member>,
}

impl ViewEntry {
    /// Suspected: it does not leave, and is asked from `at` on.
    fn suspect_from(&mut self, at: Instant) {
        self.leaves = None;
        self.ask.get_or_insert(at);
    }
}

/// All members that a router counts as registered.
#[derive(Debug)]
pub struct EtcdView {
    limits: ViewLimits,
    position: Option<Position>,
    /// Whether etcd has ever answered; earlier members come from the cache.
    listed: bool,
    members: BTreeMap<InstanceId, ViewEntry>,
    /// Members that left the view within the window, and when.
    departed: VecDeque<(Instant, Member)>,
    /// Records without room in the view, at the last list or since.
    left_out: usize,
    revision: u64,
}

impl EtcdView {
    /// An empty view. Its revisions start after `revision`, so that they still grow after the router restarts.
    pub fn new(limits: ViewLimits, revision: u64) -> Self {
        let (members, departed, left_out) = (BTreeMap::new(), VecDeque::new(), 0);
        Self { limits, position: None, listed: false, members, departed, left_out, revision }
    }

    /// The last change seen; before the first list, the position of the cache, if any.
    pub fn position(&self) -> Option<Position> {
        self.position
    }

    /// Whether a watch may continue from [`EtcdView::position`] in an etcd at `found`: same history, and not an earlier
    /// revision.
    pub fn continues(&self, found: Position) -> bool {
        self.position
            .is_some_and(|p| p.cluster == found.cluster && p.epoch == found.epoch && p.revision <= found.revision)
    }

    /// Records without room in the view, at the last list or since.
    pub fn left_out(&self) -> usize {
        self.left_out
    }

    /// Whether a new list is needed: there is room again for a record that was left out.
    pub fn wants_list(&self) -> bool {
        self.left_out > 0 && self.members.len() < self.limits.members_max
    }

    /// Members that etcd has not confirmed; `None` once it has answered.
    pub fn unconfirmed(&self) -> Option<usize> {
        (!self.listed).then_some(self.members.len())
    }

    /// Adds a worker that answers directly, before etcd has ever answered. `position` is where its record was read, if
    /// known: the first list is compared with it to detect a wipe.
    pub fn add_offline(&mut self, member: Member, position: Option<Position>) {
        if !self.listed {
            self.position = self.position.or(position);
            self.put(member);
        }
    }

    /// Applies a complete list, read at `found`.
    pub fn listed(&mut self, found: Position, list: Vec<Member>, now: Instant) {
        let other_history = self.position.is_some() && !self.continues(found);
        (self.position, self.listed) = (Some(found), true);
        self.left_out = 0;
        let listed: BTreeSet<_> = list.iter().map(|m| m.record.party.instance.clone()).collect();
        for member in list {
            match self.members.get_mut(&member.record.party.instance) {
                Some(held) if other_history && held.member.record.party != member.record.party => {
                    held.rival = Some(member);
                    held.suspect_from(now + self.limits.grace);
                }
                _ => self.put(member),
            }
        }
        let grace = now + self.limits.grace;
        let mut missing = Vec::new();
        for (instance, held) in self.members.iter_mut().filter(|(id, _)| !listed.contains(*id)) {
            held.rival = None;
            if other_history {
                held.suspect_from(grace);
            }
            missing.push(instance.clone());
        }
        if other_history {
            // Departures in the other history do not count in this one.
            self.departed.clear();
        }
        self.go(missing, now);
    }

    /// Applies the events of one watch response, the last of which has `revision`.
    pub fn changed(&mut self, revision: i64, changes: Vec<Change>, now: Instant) {
        if let Some(position) = &mut self.position {
            position.revision = position.revision.max(revision);
        }
        let mut deleted = BTreeSet::new();
        for change in changes {
            match change {
                Change::Put(member) => {
                    deleted.remove(&member.record.party.instance);
                    self.put(member);
                }
                Change::Deleted(instance) => {
                    deleted.insert(instance);
                }
            }
        }
        for (_, held) in self.members.iter_mut().filter(|(id, _)| deleted.contains(*id)) {
            held.rival = None;
        }
        self.go(deleted.into_iter().collect(), now);
    }

    fn put(&mut self, member: Member) {
        let instance = member.record.party.instance.clone();
        let held = self.members.get(&instance);
        if held.is_none() && self.members.len() >= self.limits.members_max {
            self.left_out += 1;
            return;
        }
        let same = held.is_some_and(|h| h.member == member);
        self.departed.retain(|(_, m)| m.record.party.instance != instance);
        self.members.insert(instance, ViewEntry { member, leaves: None, ask: None, rival: None });
        self.revision += u64::from(!same);
    }

    /// These records were removed in a live etcd: their members leave, unless most of the recent members vanished.
    fn go(&mut self, instances: Vec<InstanceId>, now: Instant) {
        while self.departed.front().is_some_and(|(at, _)| *at + self.limits.window < now) {
            self.departed.pop_front();
        }
        let is_fresh = |id: &InstanceId| self.members.get(id).is_some_and(|h| h.leaves.is_none() && h.ask.is_none());
        let going: Vec<_> = instances.into_iter().filter(is_fresh).collect();
        if going.is_empty() {
            return;
        }
        for held in self.members.iter_mut().filter(|(id, _)| going.contains(id)).map(|(_, held)| held) {
            held.leaves = Some(now + self.limits.settle);
        }
        let vanished = self.members.values().filter(|h| h.leaves.is_some() || h.ask.is_some()).count();
        let gone = self.departed.len() + vanished;
        let before = self.departed.len() + self.members.len();
        if gone < 2 || gone * 2 <= before {
            return;
        }
        self.members.values_mut().filter(|h| h.leaves.is_some()).for_each(|held| held.suspect_from(now));
        for (_, member) in std::mem::take(&mut self.departed) {
            self.put(member.clone());
            if let Some(held) = self.members.get_mut(&member.record.party.instance) {
                held.suspect_from(now);
            }
        }
    }

    /// Members whose records were removed long enough ago leave.
    pub fn settle(&mut self, now: Instant) {
        let due = self.members.iter().filter_map(|(id, held)| Some((held.leaves.filter(|at| *at <= now)?, id.clone())));
        let mut due: Vec<_> = due.collect();
        due.sort();
        for (at, instance) in due {
            self.depart(&instance, at);
        }
    }

    fn depart(&mut self, instance: &InstanceId, at: Instant) {
        if let Some(held) = self.members.remove(instance) {
            self.revision += 1;
            if self.departed.len() == self.limits.members_max {
                self.departed.pop_front();
            }
            self.departed.push_back((at, held.member));
        }
    }

    fn remove(&mut self, instance: &InstanceId) {
        self.revision += u64::from(self.members.remove(instance).is_some());
    }

    /// At most `most` suspected members to ask now; each is due again after [`ViewLimits::probe_every`].
    pub fn due(&mut self, now: Instant, most: usize) -> Vec<Arc<InstanceRecord>> {
        let again = now + self.limits.probe_every;
        let due = self.members.values_mut().filter(|h| h.ask.is_some_and(|at| at <= now)).take(most);
        due.map(|held| {
            held.ask = Some(again);
            held.member.record.clone()
        })
        .collect()
    }

    /// When the next member is due to be asked, or to leave.
    pub fn next_due(&self) -> Option<Instant> {
        self.members.values().filter_map(|h| h.ask.or(h.leaves)).min()
    }

    /// Applies the result of asking a suspected worker. Ignored if it is no longer suspected.
    pub fn answered(&mut self, party: &Party, alive: bool) {
        let Some(held) = self.members.get_mut(&party.instance) else { return };
        if held.ask.is_none() || held.member.record.party != *party || alive {
            return;
        }
        match held.rival.take() {
            Some(rival) => self.put(rival),
            None => self.remove(&party.instance),
        }
    }

    /// Number of suspected members.
    pub fn doubted(&self) -> usize {
        self.members.values().filter(|h| h.ask.is_some()).count()
    }

    /// Registered members, including suspected ones.
    pub fn view(&self) -> MembershipView {
        let members = self.members.iter().map(|(id, held)| (id.clone(), held.member.clone())).collect();
        MembershipView { members, revision: self.revision }
    }

    /// Grows with every change of [`EtcdView::view`].
    pub fn revision(&self) -> u64 {
        self.revision
    }
}
