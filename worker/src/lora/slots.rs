//! Which adapter has which slot of the device, who waits for one, and what is evicted. Pure: the caller loads, and reports the result.
//!
//! Sequences share a loaded adapter. A slot whose adapter nobody uses is kept until another adapter needs it, or its memory; then the one
//! used least recently goes. So that a stream of requests for loaded adapters starves nobody, an adapter takes no more users while a request
//! whose turn is earlier waits for another one: of the adapters that were loaded first, as many are closed as make room for it.
//!
//! Turns are fair: a tenant's first waiting request comes before the second one of any other, and slots that a tenant uses count like
//! requests before its first. Among equals, who waits longest is first. No tenant takes more than half of the places that others leave.

use baton_types::{Digest, TenantLabel};
use std::collections::{BTreeMap, BTreeSet};

/// Place of a request among those that wait, or use a slot soon.
pub(super) type Ticket = u64;

#[derive(Clone, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// Being loaded into.
    Loading(Loaded),
    Loaded(Loaded),
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Loaded {
    digest: Digest,
    bytes: u64,
    /// How many sequences of each tenant use it.
    users: BTreeMap<TenantLabel, usize>,
    /// When it was loaded, and used last: ticks of [`Slots::now`].
    since: u64,
    used: u64,
}

/// What a request may do now.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    /// Use the adapter in this slot, until [`Slots::release`].
    Use(usize),
    /// Load it into this slot, and free the memory of `evicted` first; then [`Slots::loaded`], and ask again.
    Load { slot: usize, evicted: Vec<usize> },
    /// Ask again when something has changed.
    Wait,
}

/// A request that waits.
#[derive(Clone, Copy, Debug)]
struct Waiting {
    digest: Digest,
    tenant: TenantLabel,
    /// Memory of its adapter.
    bytes: u64,
}

/// What the adapters need that wait for slots.
#[derive(Clone, Copy, Debug, Default)]
struct Need {
    slots: usize,
    bytes: u64,
}

/// All slots.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    bytes_max: u64,
    waiting_max: usize,
    tickets: Ticket,
    waiting: BTreeMap<Ticket, Waiting>,
    now: u64,
}

impl Slots {
    pub(super) fn new(slots_max: usize, bytes_max: u64, waiting_max: usize) -> Self {
        let slots = vec![Slot::Free; slots_max];
        Self { slots, bytes_max, waiting_max, tickets: 0, waiting: BTreeMap::new(), now: 0 }
    }

    /// A request of a tenant comes for an adapter, which takes `bytes`; `None` if too many wait already, and it would wait too.
    pub(super) fn enter(&mut self, digest: Digest, tenant: TenantLabel, bytes: u64) -> Option<Ticket> {
        let own = self.waiting.values().filter(|waiting| waiting.tenant == tenant).count();
        let left = self.waiting_max.saturating_sub(self.waiting.len() - own);
        if own >= left.div_ceil(2) && !self.is_open(&digest) {
            return None;
        }
        self.tickets += 1;
        self.waiting.insert(self.tickets, Waiting { digest, tenant, bytes });
        Some(self.tickets)
    }

    /// It got a slot, or waits no more.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket);
    }

    /// What the request may do.
    pub(super) fn ask(&mut self, ticket: Ticket) -> Answer {
        self.now += 1;
        let Some(Waiting { digest, tenant, bytes }) = self.waiting.get(&ticket).copied() else { return Answer::Wait };
        let before = self.before(ticket);
        if let Some(at) = self.slots.iter().position(|slot| of(slot).is_some_and(|of| of.digest == digest)) {
            let closed = self.closed(self.need(&before, None)).contains(&at);
            return match &mut self.slots[at] {
                Slot::Loaded(loaded) if !closed => {
                    *loaded.users.entry(tenant).or_default() += 1;
                    loaded.used = self.now;
                    Answer::Use(at)
                }
                _ => Answer::Wait,
            };
        }
        let mut idle = self.idle(&before);
        let free = self.slots.iter().filter(|slot| **slot == Slot::Free).count();
        // What those before it need is left to them, though they may have to wait for more.
        let others = self.need(&before, Some(&digest));
        let available = self.free_bytes() + idle.iter().map(|idle| idle.bytes).sum::<u64>();
        if idle.len() + free <= others.slots || available < others.bytes.saturating_add(bytes) {
            return Answer::Wait;
        }
        idle.sort_by_key(|idle| std::cmp::Reverse(idle.used));
        let (mut held, mut evicted) = (self.bytes(), Vec::new());
        let mut slot = self.slots.iter().position(|slot| *slot == Slot::Free);
        while slot.is_none() || held.saturating_add(bytes) > self.bytes_max {
            let Some(next) = idle.pop() else { return Answer::Wait };
            held -= next.bytes;
            match slot {
                None => slot = Some(next.slot),
                Some(_) => evicted.push(next.slot),
            }
        }
        let Some(slot) = slot else { return Answer::Wait };
        evicted.iter().for_each(|at| self.slots[*at] = Slot::Free);
        self.slots[slot] =
            Slot::Loading(Loaded { digest, bytes, users: BTreeMap::new(), since: self.now, used: self.now });
        Answer::Load { slot, evicted }
    }

    /// The adapter that was being loaded into a slot is there, or could not be loaded.
    pub(super) fn loaded(&mut self, slot: usize, is_loaded: bool) {
        if let Slot::Loading(loaded) = &self.slots[slot] {
            self.slots[slot] = if is_loaded { Slot::Loaded(loaded.clone()) } else { Slot::Free };
        }
    }

    /// A user of a slot's adapter is gone, of this tenant.
    pub(super) fn release(&mut self, slot: usize, tenant: TenantLabel) {
        if let Slot::Loaded(loaded) = &mut self.slots[slot]
            && let Some(users) = loaded.users.get_mut(&tenant)
        {
            *users -= 1;
            loaded.users.retain(|_, users| *users > 0);
        }
    }

    /// Whether an adapter is loaded.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.slots.iter().any(|slot| matches!(slot, Slot::Loaded(loaded) if loaded.digest == *digest))
    }

    /// Whether an adapter is loaded and takes users, whoever waits.
    fn is_open(&self, digest: &Digest) -> bool {
        let closed = self.closed(self.need(&self.turns(), None));
        let is_it = |slot: &Slot| matches!(slot, Slot::Loaded(loaded) if loaded.digest == *digest);
        self.slots.iter().enumerate().any(|(at, slot)| is_it(slot) && !closed.contains(&at))
    }

    /// Adapters that are loaded, and the memory that they and those being loaded take.
    pub(super) fn loaded_bytes(&self) -> (usize, u64) {
        (self.slots.iter().filter(|slot| matches!(slot, Slot::Loaded(_))).count(), self.bytes())
    }

    /// How many requests wait.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    fn bytes(&self) -> u64 {
        self.slots.iter().filter_map(of).map(|loaded| loaded.bytes).sum()
    }

    /// The requests that wait, in the order of their turns.
    fn turns(&self) -> Vec<(Ticket, Waiting)> {
        let uses = |tenant: &TenantLabel| {
            self.slots.iter().filter_map(of).filter(|loaded| loaded.users.contains_key(tenant)).count()
        };
        let mut before: BTreeMap<TenantLabel, usize> = BTreeMap::new();
        let mut turns: Vec<(usize, Ticket, Waiting)> = Vec::with_capacity(self.waiting.len());
        for (ticket, waiting) in &self.waiting {
            let rank = before.entry(waiting.tenant).or_insert_with(|| uses(&waiting.tenant));
            turns.push((*rank, *ticket, *waiting));
            *rank += 1;
        }
        turns.sort_unstable_by_key(|(rank, ticket, _)| (*rank, *ticket));
        turns.into_iter().map(|(_, ticket, waiting)| (ticket, waiting)).collect()
    }

    /// The requests whose turns are before that of `ticket`.
    fn before(&self, ticket: Ticket) -> Vec<(Ticket, Waiting)> {
        self.turns().into_iter().take_while(|(other, _)| *other != ticket).collect()
    }

    fn free_bytes(&self) -> u64 {
        self.bytes_max.saturating_sub(self.bytes())
    }

    /// What the adapters need that have no slot, and that these requests wait for, `but` for one. One that can never fit needs nothing.
    fn need(&self, turns: &[(Ticket, Waiting)], but: Option<&Digest>) -> Need {
        let mut counted: BTreeSet<Digest> = self.slots.iter().filter_map(of).map(|loaded| loaded.digest).collect();
        counted.extend(but);
        let mut need = Need::default();
        for (_, waiting) in turns {
            if waiting.bytes <= self.bytes_max && counted.insert(waiting.digest) {
                need = Need { slots: need.slots + 1, bytes: need.bytes.saturating_add(waiting.bytes) };
            }
        }
        need
    }

    /// The slots whose adapters take no more users, while others need so much.
    fn closed(&self, need: Need) -> Vec<usize> {
        let loaded = |(at, slot): (usize, &Slot)| match slot {
            Slot::Loaded(loaded) => Some((loaded.since, at, loaded.bytes)),
            Slot::Free | Slot::Loading(_) => None,
        };
        let mut loaded: Vec<(u64, usize, u64)> = self.slots.iter().enumerate().filter_map(loaded).collect();
        loaded.sort_unstable();
        let mut slots = self.slots.iter().filter(|slot| **slot == Slot::Free).count();
        let mut bytes = self.free_bytes();
        let mut closed = Vec::new();
        for (_, at, freed) in loaded {
            if slots >= need.slots && bytes >= need.bytes {
                break;
            }
            closed.push(at);
            (slots, bytes) = (slots + 1, bytes + freed);
        }
        closed
    }

    /// Loaded adapters that nobody uses, and that none of the requests before waits for.
    fn idle(&self, before: &[(Ticket, Waiting)]) -> Vec<Idle> {
        let closed = self.closed(self.need(before, None));
        let wanted = |at: usize, digest: &Digest| {
            !closed.contains(&at) && before.iter().any(|(_, waiting)| waiting.digest == *digest)
        };
        let idle = |(slot, of): (usize, &Slot)| match of {
            Slot::Loaded(loaded) if loaded.users.is_empty() && !wanted(slot, &loaded.digest) => {
                Some(Idle { slot, bytes: loaded.bytes, used: loaded.used })
            }
            _ => None,
        };
        self.slots.iter().enumerate().filter_map(idle).collect()
    }
}

/// A loaded adapter that may be evicted.
struct Idle {
    slot: usize,
    bytes: u64,
    used: u64,
}

fn of(slot: &Slot) -> Option<&Loaded> {
    match slot {
        Slot::Free => None,
        Slot::Loading(loaded) | Slot::Loaded(loaded) => Some(loaded),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(n: u8) -> Digest {
        Digest([n; 32])
    }

    fn tenant(n: u8) -> TenantLabel {
        TenantLabel(u64::from(n))
    }

    struct World(Slots);

    impl World {
        fn new(slots: usize) -> Self {
            Self(Slots::new(slots, 100, 8))
        }

        fn ask(&mut self, ticket: Ticket) -> Answer {
            self.0.ask(ticket)
        }

        fn enter(&mut self, adapter: u8) -> Ticket {
            self.enter_as(1, adapter)
        }

        fn enter_as(&mut self, of: u8, adapter: u8) -> Ticket {
            self.0.enter(digest(adapter), tenant(of), 10).expect("there is room to wait")
        }

        fn release(&mut self, slot: usize) {
            self.0.release(slot, tenant(1));
        }

        /// A request that loads its adapter if it must, and uses it.
        fn uses(&mut self, adapter: u8) -> Option<usize> {
            let ticket = self.enter(adapter);
            let mut answer = self.ask(ticket);
            if let Answer::Load { slot, .. } = answer {
                self.0.loaded(slot, true);
                answer = self.ask(ticket);
            }
            let Answer::Use(slot) = answer else { return None };
            self.0.leave(ticket);
            Some(slot)
        }
    }

    #[test]
    fn the_least_recently_used_adapter_goes() {
        let mut world = World::new(2);
        assert_eq!((world.uses(1), world.uses(2), world.uses(1)), (Some(0), Some(1), Some(0)));
        assert_eq!(world.uses(3), None, "both are used");
        let mut world = World::new(2);
        for adapter in [1, 2, 1] {
            let slot = world.uses(adapter).unwrap();
            world.release(slot);
        }
        assert_eq!(world.uses(3), Some(1));
        assert!(world.0.has(&digest(1)) && !world.0.has(&digest(2)));
    }

    #[test]
    fn memory_is_bounded() {
        let mut slots = Slots::new(4, 100, 4);
        for (adapter, bytes) in [(1, 40), (2, 30), (3, 20)] {
            let ticket = slots.enter(digest(adapter), tenant(1), bytes).unwrap();
            let Answer::Load { slot, evicted } = slots.ask(ticket) else { panic!() };
            assert!(evicted.is_empty());
            slots.loaded(slot, true);
            assert_eq!(slots.ask(ticket), Answer::Use(slot));
            slots.leave(ticket);
            slots.release(slot, tenant(1));
        }
        assert_eq!(slots.loaded_bytes(), (3, 90));
        let ticket = slots.enter(digest(4), tenant(1), 70).unwrap();
        // The free slot takes it, and two others give their memory.
        assert_eq!(slots.ask(ticket), Answer::Load { slot: 3, evicted: vec![0, 1] });
        assert_eq!(slots.loaded_bytes(), (1, 90));
        slots.loaded(3, false);
        assert_eq!(slots.loaded_bytes(), (1, 20));
        slots.leave(ticket);
        let never = slots.enter(digest(5), tenant(1), 200).unwrap();
        assert_eq!(slots.ask(never), Answer::Wait, "it can never fit");
        let behind = slots.enter(digest(3), tenant(1), 20).unwrap();
        assert_eq!(slots.ask(behind), Answer::Use(2), "and keeps nobody out");
    }

    #[test]
    fn an_adapter_that_needs_the_memory_of_two_gets_it() {
        let mut slots = Slots::new(4, 100, 16);
        let load = |slots: &mut Slots, adapter: u8, bytes: u64| {
            let ticket = slots.enter(digest(adapter), tenant(1), bytes).unwrap();
            let Answer::Load { slot, .. } = slots.ask(ticket) else { panic!() };
            slots.loaded(slot, true);
            assert_eq!(slots.ask(ticket), Answer::Use(slot));
            slots.leave(ticket);
        };
        for adapter in [1, 2, 3] {
            load(&mut slots, adapter, 30);
        }
        let large = slots.enter(digest(4), tenant(1), 60).unwrap();
        assert_eq!(slots.ask(large), Answer::Wait);
        // The first two are closed, the third is not: 10 bytes are free.
        let behind = [1, 2, 3].map(|adapter| slots.enter(digest(adapter), tenant(1), 30).unwrap());
        assert_eq!(behind.map(|ticket| slots.ask(ticket)), [Answer::Wait, Answer::Wait, Answer::Use(2)]);
        slots.release(0, tenant(1));
        assert_eq!(slots.ask(large), Answer::Wait, "one is not enough");
        assert_eq!(slots.ask(behind[0]), Answer::Wait);
        // What is free is kept for it, too.
        let small = slots.enter(digest(5), tenant(1), 10).unwrap();
        assert_eq!(slots.ask(small), Answer::Wait);
        slots.release(1, tenant(1));
        assert_eq!(slots.ask(large), Answer::Load { slot: 3, evicted: vec![0, 1] });
        assert_eq!(slots.loaded_bytes(), (1, 90));
    }

    #[test]
    fn an_adapter_is_loaded_once_for_all_who_wait_for_it() {
        let mut world = World::new(1);
        let (first, second) = (world.enter(1), world.enter(1));
        assert_eq!(world.ask(first), Answer::Load { slot: 0, evicted: vec![] });
        assert_eq!(world.ask(second), Answer::Wait);
        // A third one wants another: it does not take the slot away from those that came before it.
        let third = world.enter(2);
        world.0.loaded(0, true);
        assert_eq!(world.ask(third), Answer::Wait);
        assert_eq!((world.ask(second), world.ask(first)), (Answer::Use(0), Answer::Use(0)));
        world.0.leave(first);
        world.0.leave(second);
        world.release(0);
        assert_eq!(world.ask(third), Answer::Wait);
        world.release(0);
        assert_eq!(world.ask(third), Answer::Load { slot: 0, evicted: vec![] });
        world.0.loaded(0, false);
        assert_eq!(world.ask(third), Answer::Load { slot: 0, evicted: vec![] }, "another try");
    }

    #[test]
    fn no_more_wait_than_there_is_room_for() {
        let mut world = World::new(1);
        let tickets = [1, 2, 3, 4].map(|adapter| world.enter(adapter));
        assert_eq!(world.0.enter(digest(1), tenant(1), 10), None, "half of the places are left for others");
        let others = [1, 2].map(|adapter| world.enter_as(2, adapter));
        assert_eq!(world.0.enter(digest(1), tenant(2), 10), None);
        world.enter_as(3, 1);
        world.0.leave(tickets[2]);
        world.0.leave(others[0]);
        assert!(world.0.enter(digest(1), tenant(1), 10).is_none(), "others have taken places besides");
        assert!(world.0.enter(digest(1), tenant(2), 10).is_some());
    }

    #[test]
    fn the_odd_place_is_for_who_comes_first() {
        for (places, own) in [(1, 1), (3, 2), (5, 3)] {
            let mut slots = Slots::new(1, 100, places);
            let entered = (1..=8).map_while(|adapter| slots.enter(digest(adapter), tenant(1), 10)).count();
            assert_eq!(entered, own, "of {places}");
        }
    }

    #[test]
    fn a_tenant_that_wants_many_adapters_comes_after_one_that_wants_its_first() {
        let mut world = World::new(2);
        assert_eq!((world.uses(1), world.uses(2)), (Some(0), Some(1)));
        let greedy = [3, 4, 5].map(|adapter| world.enter(adapter));
        let other = world.enter_as(2, 6);
        world.release(0);
        assert!(greedy.iter().all(|ticket| world.ask(*ticket) == Answer::Wait), "its tenant has the other slot");
        assert_eq!(world.ask(other), Answer::Load { slot: 0, evicted: vec![] });
        world.0.loaded(0, true);
        assert_eq!(world.ask(other), Answer::Use(0));
        world.0.leave(other);
        // Both tenants have a slot; of the greedy one's requests the first is next.
        let second = world.enter_as(2, 7);
        world.release(1);
        assert_eq!((world.ask(second), world.ask(greedy[1])), (Answer::Wait, Answer::Wait));
        assert_eq!(world.ask(greedy[0]), Answer::Load { slot: 1, evicted: vec![] });
    }

    #[test]
    fn a_stream_of_requests_for_loaded_adapters_starves_nobody() {
        let mut world = World::new(2);
        assert_eq!((world.uses(1), world.uses(2)), (Some(0), Some(1)));
        let waits = world.enter(3);
        assert_eq!(world.ask(waits), Answer::Wait);
        // The adapter that was loaded first takes no more; the other one does.
        let behind = world.enter(1);
        assert_eq!(world.ask(behind), Answer::Wait);
        assert_eq!(world.uses(2), Some(1));
        world.release(0);
        assert_eq!(world.ask(behind), Answer::Wait);
        assert_eq!(world.ask(waits), Answer::Load { slot: 0, evicted: vec![] });
        world.0.loaded(0, true);
        assert_eq!(world.ask(waits), Answer::Use(0));
        world.0.leave(waits);
        // Now the one behind it waits for a slot, first of all.
        assert_eq!(world.ask(behind), Answer::Wait);
        let last = world.enter(4);
        world.release(1);
        world.release(1);
        assert_eq!(world.ask(last), Answer::Wait);
        assert_eq!(world.ask(behind), Answer::Load { slot: 1, evicted: vec![] });
        // A request that gives up makes way.
        world.0.leave(behind);
        world.0.loaded(1, true);
        assert_eq!(world.ask(last), Answer::Load { slot: 1, evicted: vec![] });
    }
}
