//! One start of a router: the real membership view, with what it knows of each worker in it.

use super::clock::{Addr, Time, ms};
use super::embedded::LEASE;
use super::event::{Event, Watched};
use super::flow::Flow;
use super::invariant::Invariant;
use super::shape::Shape;
use super::world::World;
use baton_node::membership::etcd::view::{EtcdView, Position, ViewLimits};
use baton_node::membership::{LeaseTable, MembershipView, Registration};
use baton_router::pure::{Admission, Load, Probation, RetryBucket};
use baton_types::{InstanceId, InstanceRecord, Party};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Members asked at once.
const PROBES_MAX: usize = 8;
/// How long a doubted worker has to answer.
const PROBE_MAX: Time = ms(150);

/// Bounds of the views.
const LIMITS: ViewLimits = ViewLimits {
    grace: Duration::from_millis(1000),
    window: Duration::from_millis(300),
    probe_every: Duration::from_millis(400),
    members_max: 16,
};

/// A worker as a router knows it.
#[derive(Debug)]
pub(super) struct Known {
    pub(super) record: Arc<InstanceRecord>,
    pub(super) load: Load,
    pub(super) probation: Probation,
}

/// One start of a router.
#[derive(Debug)]
pub(super) struct Router {
    pub(super) view: EtcdView,
    /// In the place of etcd, where membership is embedded.
    pub(super) table: Option<LeaseTable>,
    /// What each start was told when it registered there.
    pub(super) held: BTreeMap<Party, Registration>,
    /// The watch that counts.
    pub(super) watch: u64,
    /// How often connects had failed when it last listed.
    pub(super) listed_at: u64,
    /// Where the view last stood, in which history of etcd.
    stood: Option<(Position, u64)>,
    /// Of each member, with the history in which it was first seen.
    registrations: BTreeMap<InstanceId, (Registration, u64)>,
    /// Who was asked and has not answered.
    questions: BTreeSet<Party>,
    pub(super) workers: BTreeMap<Party, Known>,
    pub(super) bucket: RetryBucket,
    pub(super) flows: BTreeMap<usize, Flow>,
    pub(super) admission: Admission,
    /// Requests that wait for their turn, in order.
    pub(super) queued: VecDeque<usize>,
    asked: Option<Time>,
}

impl Router {
    pub(super) fn new(shape: &Shape) -> Self {
        let (running_max, queued_max) = shape.admits;
        Self {
            table: shape.is_embedded.then(|| LeaseTable::new(LEASE, LIMITS.members_max, 0)),
            held: BTreeMap::new(),
            view: EtcdView::new(LIMITS, 0),
            watch: 0,
            listed_at: 0,
            stood: None,
            registrations: BTreeMap::new(),
            questions: BTreeSet::new(),
            workers: BTreeMap::new(),
            bucket: RetryBucket::new(6, 4.0),
            flows: BTreeMap::new(),
            admission: Admission::new(running_max, queued_max),
            queued: VecDeque::new(),
            asked: None,
        }
    }

    /// Who is registered.
    pub(super) fn members(&self) -> MembershipView {
        self.table.as_ref().map_or_else(|| self.view.view(), LeaseTable::view)
    }
}

impl World {
    /// News of etcd.
    pub(super) fn watched(&mut self, r: usize, watch: u64, what: Watched) {
        let now = self.clock.instant(self.clock.now());
        let Some(router) = self.router_mut(r) else { return };
        if router.watch != watch {
            return;
        }
        let (before, doubted) = (router.view.view(), router.view.doubted());
        let mut stands = router.stood.map_or(0, |(_, stands)| stands);
        let other = match what {
            Watched::Listed { position, members, stands: found, failures } => {
                stands = found;
                router.listed_at = failures;
                let other = router.view.position().is_some() && !router.view.continues(position);
                router.view.listed(position, members, now);
                other
            }
            Watched::Changed { revision, changes } => {
                router.view.changed(revision, changes, now);
                false
            }
        };
        self.counts.add("view", if other { "other history" } else { "same history" });
        self.view_changed(r, &before, (doubted, "doubt ends with a record"), stands);
    }

    /// Whom the view names now, and that it did not go back. `ends` says how a doubt ended, if one did.
    pub(super) fn view_changed(
        &mut self,
        r: usize,
        before: &MembershipView,
        (doubted, ends): (usize, &'static str),
        stands: u64,
    ) {
        let Some(router) = self.router_mut(r) else { return };
        let view = router.members();
        let mut seen = Vec::new();
        for (id, member) in &view.members {
            seen.push(match before.members.get(id) {
                None => "joins",
                Some(b) if b.registration == member.registration => continue,
                Some(b) if b.registration.incarnation == member.registration.incarnation => "registers again",
                Some(_) => "is replaced",
            });
        }
        seen.extend(before.members.keys().filter(|id| !view.members.contains_key(*id)).map(|_| "leaves"));
        let doubts = router.view.doubted();
        seen.extend((doubts > doubted).then_some("is doubted"));
        seen.extend((doubts < doubted).then_some(ends));
        router.workers.retain(|party, _| view.get(party).is_some());
        let is_new = |party: &Party| !router.workers.contains_key(party);
        let fresh: Vec<Party> =
            view.members.values().map(|m| m.record.party.clone()).filter(|party| is_new(party)).collect();
        for member in view.members.values() {
            router.workers.entry(member.record.party.clone()).or_insert_with(|| Known {
                record: member.record.clone(),
                load: Load::default(),
                probation: Probation::default(),
            });
        }
        let mut wrong = None;
        if view.revision < before.revision {
            wrong = Some(format!("a view went back from revision {} of its own to {}", before.revision, view.revision));
        }
        let position = router.view.position();
        if let (Some((stood, when)), Some(position)) = (router.stood, position)
            && when == stands
            && position.revision < stood.revision
        {
            wrong = Some(format!("a view went back from revision {} to {}", stood.revision, position.revision));
        }
        let mut registrations = BTreeMap::new();
        for (id, member) in &view.members {
            let was = router.registrations.get(id);
            if was.is_some_and(|(was, when)| *when == stands && was.revision > member.registration.revision) {
                wrong = Some(format!("{id} went back to an older registration"));
            }
            let when = was.filter(|(was, _)| *was == member.registration).map_or(stands, |(_, when)| *when);
            registrations.insert(id.clone(), (member.registration, when));
        }
        router.registrations = registrations;
        router.stood = position.map(|position| (position, stands));
        seen.into_iter().for_each(|what| self.counts.add("view", what));
        wrong.into_iter().for_each(|wrong| self.fail(Invariant::ForwardViews, wrong));
        // The stream of a worker's reports begins with one.
        let here = self.addr(r);
        for party in fresh {
            let (at, to) = (self.clock.now() + self.delay(), Addr::whoever(self.instances[&party.instance]));
            self.clock.post(at, to, Event::ReportTo { router: here });
        }
        self.ask_later(r);
    }

    fn ask_later(&mut self, r: usize) {
        let here = self.addr(r);
        let Some(due) = self.router(r).and_then(|router| router.view.next_due()) else { return };
        let at = self.clock.time(due).max(self.clock.now());
        let Some(router) = self.router_mut(r) else { return };
        if router.asked != Some(at) {
            router.asked = Some(at);
            self.clock.post(at, here, Event::AskDoubted);
        }
    }

    /// Doubted members are asked themselves.
    pub(super) fn ask_doubted(&mut self, r: usize) {
        let (time, here) = (self.clock.now(), self.addr(r));
        let now = self.clock.instant(time);
        let Some(router) = self.router_mut(r) else { return };
        for record in router.view.due(now, PROBES_MAX) {
            let party = record.party.clone();
            if let Some(router) = self.router_mut(r) {
                router.questions.insert(party.clone());
            }
            let at = time + self.delay();
            let to = Addr::whoever(self.instances[&party.instance]);
            self.clock.post(at, to, Event::Probe { router: here, party: party.clone() });
            self.clock.post(time + PROBE_MAX, here, Event::Answered { party, alive: false });
        }
        self.ask_later(r);
    }

    /// A worker is asked whether it is this start.
    pub(super) fn probed(&mut self, w: usize, router: Addr, party: Party) {
        let alive = self.worker(w).is_some_and(|worker| worker.record.party == party);
        self.post(router, Event::Answered { party, alive });
    }

    /// A doubted worker answered, or its time is over.
    pub(super) fn answered(&mut self, r: usize, party: &Party, alive: bool) {
        let Some(router) = self.router_mut(r) else { return };
        let (before, doubted) = (router.view.view(), router.view.doubted());
        let stands = router.stood.map_or(0, |(_, stands)| stands);
        if !router.questions.remove(party) {
            return; // The time-out of a question that was answered.
        }
        router.view.answered(party, alive);
        let stays = router.view.view().members.contains_key(&party.instance);
        let ends = if stays { "doubt ends with a rival" } else { "doubt ends without an answer" };
        self.counts.add("view", if alive { "answers" } else { "does not answer" });
        self.view_changed(r, &before, (doubted, ends), stands);
    }

    /// A load report.
    pub(super) fn reported(&mut self, r: usize, party: &Party, report: &baton_types::LoadReport) {
        let now = self.clock.instant(self.clock.now());
        if let Some(known) = self.router_mut(r).and_then(|router| router.workers.get_mut(party)) {
            known.load.report(report, &known.record, now);
        }
    }

    /// Workers tell routers of their load, and etcd that they live.
    pub(super) fn send_reports(&mut self, w: usize) {
        let (now, here) = (self.clock.now(), self.addr(w));
        if !self.is_over() {
            let at = now + ms(150) + self.draw(ms(100) as usize) as Time;
            self.clock.post(at, here, Event::SendReports);
        }
        (0..self.shape.routers).for_each(|router| self.report_to(w, Addr::whoever(router)));
    }

    /// One report to one router.
    pub(super) fn report_to(&mut self, w: usize, router: Addr) {
        let at = self.clock.now() + self.delay();
        if let Some((party, report)) = self.load(w) {
            self.clock.post(at, router, Event::Report { party, report: Box::new(report) });
        }
    }

    pub(super) fn send_renewal(&mut self, w: usize) {
        let (now, here) = (self.clock.now(), self.addr(w));
        if !self.is_over() {
            self.clock.post(now + ms(350), here, Event::SendRenewal);
        }
        if self.shape.is_embedded {
            return self.send_beats(w);
        }
        let at = now + self.delay();
        self.clock.post(at, Addr::WORLD, Event::Renew(here));
    }
}
