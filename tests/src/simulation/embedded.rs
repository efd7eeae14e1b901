//! The embedded membership: each router itself keeps the leases of the workers that it hears.

use super::clock::{Addr, Time, ms};
use super::event::Event;
use super::world::World;
use baton_node::membership::JoinError;
use baton_types::InstanceRecord;
use std::sync::Arc;
use std::time::Duration;

/// Life of a lease without a sign of life.
pub(super) const LEASE: Duration = Duration::from_millis(1200);
/// How often a router looks for leases that ended.
const LOOK: Time = ms(200);

impl World {
    /// A worker gives its signs of life to every router.
    pub(super) fn send_beats(&mut self, w: usize) {
        let now = self.clock.now();
        let Some(record) = self.worker(w).map(|worker| worker.record.clone()) else { return };
        for router in 0..self.shape.routers {
            let at = now + self.delay();
            self.clock.post(at, Addr::whoever(router), Event::Beat { record: record.clone() });
        }
    }

    /// One reaches a router, which renews the lease or registers the worker (again).
    pub(super) fn beat(&mut self, r: usize, record: Arc<InstanceRecord>) {
        let now = self.clock.instant(self.clock.now());
        let Some(router) = self.router_mut(r) else { return };
        let before = router.members();
        let Some(table) = &mut router.table else { return };
        let party = &record.party;
        let held = router.held.get(party).copied();
        let what = match held.filter(|held| table.heartbeat(&party.instance, *held, now)) {
            Some(_) => "renewed",
            None => match table.join(InstanceRecord::clone(&record), now) {
                Ok(registration) => {
                    router.held.insert(party.clone(), registration);
                    "joined"
                }
                Err(JoinError::Replaced { .. }) => "replaced",
                Err(JoinError::Duplicate { .. }) => "duplicate",
                Err(JoinError::Full { .. }) => "full",
            },
        };
        self.counts.add("leases", what);
        self.view_changed(r, &before, (0, ""), 0);
    }

    /// A router looks for leases that ended.
    pub(super) fn look_for_ends(&mut self, r: usize) {
        let (time, here) = (self.clock.now(), self.addr(r));
        let now = self.clock.instant(time);
        if !self.is_over() {
            self.clock.post(time + LOOK, here, Event::LookForEnds);
        }
        let Some(router) = self.router_mut(r) else { return };
        let before = router.members();
        let Some(table) = &mut router.table else { return };
        let over = table.expire(now).len();
        if over > 0 {
            self.counts.add("leases", "ended");
            self.view_changed(r, &before, (0, ""), 0);
        }
    }
}
