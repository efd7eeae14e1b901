//! The order in which grammars start. Some take half a second of a core to compile, so tenants take turns.

use super::threads::Job;
use crate::fair::FairOrder;
use crate::scheduler::SequenceKey;
use baton_types::Share;
use std::collections::BTreeMap;

/// Grammars that are to be started.
#[derive(Default)]
pub(super) struct Starts {
    order: FairOrder,
    arrivals: u64,
    waiting: BTreeMap<SequenceKey, (Share, Job)>,
}

impl Starts {
    /// Returns its place. Each start is charged alike: how long it takes is known once it is done.
    pub(super) fn add(&mut self, priority: i32, share: Share, job: Job) -> SequenceKey {
        let start = self.order.enter(priority, share, 1, None).start;
        self.arrivals += 1;
        let place = SequenceKey::new(priority, start, self.arrivals);
        self.waiting.insert(place, (share, job));
        place
    }

    /// Its sequence has ended. Nothing, if it was started.
    pub(super) fn remove(&mut self, place: SequenceKey) {
        if let Some((share, _)) = self.waiting.remove(&place) {
            self.order.give_back(place.priority(), share, 1);
        }
    }

    pub(super) fn next(&mut self) -> Option<Job> {
        let (place, (_, job)) = self.waiting.pop_first()?;
        self.order.served(place.priority(), place.start());
        Some(job)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_types::TenantLabel;
    use std::sync::{Arc, Mutex};

    #[test]
    fn a_tenant_waits_for_one_start_of_another() {
        for priority in [0, 3] {
            check_turns(priority);
        }
    }

    /// Among starts of this priority.
    fn check_turns(usual: i32) {
        let (mut starts, done) = (Starts::default(), Arc::new(Mutex::new(Vec::new())));
        let add = |starts: &mut Starts, priority, tenant, name: &'static str| {
            let (share, done) = (Share { tenant: TenantLabel(tenant), ..Share::default() }, done.clone());
            starts.add(priority, share, Box::new(move || done.lock().unwrap().push(name)))
        };
        for name in ["a1", "a2", "a3", "a4"] {
            add(&mut starts, usual, 1, name);
        }
        starts.next().unwrap()();
        let [_, ended] = ["b1", "ended"].map(|name| add(&mut starts, usual, 2, name));
        starts.remove(ended);
        add(&mut starts, usual, 2, "b2");
        add(&mut starts, usual + 1, 1, "urgent");
        while let Some(job) = starts.next() {
            job();
        }
        assert_eq!(*done.lock().unwrap(), ["a1", "urgent", "b1", "a2", "b2", "a3", "a4"]);
    }
}
