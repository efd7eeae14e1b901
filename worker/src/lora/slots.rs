//! Which adapter has which slot of the device, who waits for one, and what is evicted. Pure: the caller loads, and reports the result.
//!
//! Sequences share a loaded adapter. A slot whose adapter nobody uses is kept until another adapter needs it, or its memory; then the one
//! used least recently goes. Who waits longest is served first. So that a stream of requests for loaded adapters starves nobody, an adapter
//! takes no more users while an earlier request waits for another one: the adapters that were loaded first are closed, one for each that waits.

use baton_types::Digest;
use std::collections::{BTreeMap, BTreeSet};

/// Place of a request among those that wait, or use a slot soon.
pub(super) type Ticket = u64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Slot {
    Free,
    /// Being loaded into.
    Loading(Loaded),
    Loaded(Loaded),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Loaded {
    digest: Digest,
    bytes: u64,
    users: usize,
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

/// All slots.
#[derive(Debug)]
pub(super) struct Slots {
    slots: Vec<Slot>,
    bytes_max: u64,
    waiting_max: usize,
    tickets: Ticket,
    waiting: BTreeMap<Ticket, Digest>,
    now: u64,
}

impl Slots {
    pub(super) fn new(slots_max: usize, bytes_max: u64, waiting_max: usize) -> Self {
        let slots = vec![Slot::Free; slots_max];
        Self { slots, bytes_max, waiting_max, tickets: 0, waiting: BTreeMap::new(), now: 0 }
    }

    /// A request comes for an adapter; `None` if too many wait already, and it would wait too.
    pub(super) fn enter(&mut self, digest: Digest) -> Option<Ticket> {
        if self.waiting.len() >= self.waiting_max && !self.is_open(&digest) {
            return None;
        }
        self.tickets += 1;
        self.waiting.insert(self.tickets, digest);
        Some(self.tickets)
    }

    /// It got a slot, or waits no more.
    pub(super) fn leave(&mut self, ticket: Ticket) {
        self.waiting.remove(&ticket);
    }

    /// What the request may do, whose adapter takes `bytes`.
    pub(super) fn ask(&mut self, ticket: Ticket, digest: Digest, bytes: u64) -> Answer {
        self.now += 1;
        let starving = self.starving_before(ticket);
        if let Some(at) = self.slots.iter().position(|slot| of(slot).is_some_and(|of| of.digest == digest)) {
            let closed = self.closed(starving.len()).contains(&at);
            return match &mut self.slots[at] {
                Slot::Loaded(loaded) if !closed => {
                    (loaded.users, loaded.used) = (loaded.users + 1, self.now);
                    Answer::Use(at)
                }
                _ => Answer::Wait,
            };
        }
        let mut idle = self.idle(ticket);
        let free = self.slots.iter().filter(|slot| **slot == Slot::Free).count();
        let others = starving.iter().filter(|other| **other != digest).count();
        if idle.len() + free <= others {
            return Answer::Wait;
        }
        idle.sort_by_key(|(_, loaded)| std::cmp::Reverse(loaded.used));
        let (mut held, mut evicted) = (self.bytes(), Vec::new());
        let mut slot = self.slots.iter().position(|slot| *slot == Slot::Free);
        while slot.is_none() || held.saturating_add(bytes) > self.bytes_max {
            let Some((at, loaded)) = idle.pop() else { return Answer::Wait };
            held -= loaded.bytes;
            match slot {
                None => slot = Some(at),
                Some(_) => evicted.push(at),
            }
        }
        let Some(slot) = slot else { return Answer::Wait };
        evicted.iter().for_each(|at| self.slots[*at] = Slot::Free);
        self.slots[slot] = Slot::Loading(Loaded { digest, bytes, users: 0, since: self.now, used: self.now });
        Answer::Load { slot, evicted }
    }

    /// The adapter that was being loaded into a slot is there, or could not be loaded.
    pub(super) fn loaded(&mut self, slot: usize, is_loaded: bool) {
        if let Slot::Loading(loaded) = self.slots[slot] {
            self.slots[slot] = if is_loaded { Slot::Loaded(loaded) } else { Slot::Free };
        }
    }

    /// A user of a slot's adapter is gone.
    pub(super) fn release(&mut self, slot: usize) {
        if let Slot::Loaded(loaded) = &mut self.slots[slot] {
            loaded.users -= 1;
        }
    }

    /// Whether an adapter is loaded.
    pub(super) fn has(&self, digest: &Digest) -> bool {
        self.slots.iter().any(|slot| matches!(slot, Slot::Loaded(loaded) if loaded.digest == *digest))
    }

    /// Whether an adapter is loaded and takes users, whoever waits.
    fn is_open(&self, digest: &Digest) -> bool {
        let closed = self.closed(self.starving_before(Ticket::MAX).len());
        let is_it = |slot: &Slot| matches!(slot, Slot::Loaded(loaded) if loaded.digest == *digest);
        self.slots.iter().enumerate().any(|(at, slot)| is_it(slot) && !closed.contains(&at))
    }

    /// Adapters that are loaded, and the memory that they and those being loaded take.
    pub(super) fn counts(&self) -> (usize, u64) {
        (self.slots.iter().filter(|slot| matches!(slot, Slot::Loaded(_))).count(), self.bytes())
    }

    fn bytes(&self) -> u64 {
        self.slots.iter().filter_map(of).map(|loaded| loaded.bytes).sum()
    }

    /// Adapters without a slot for which earlier requests wait.
    fn starving_before(&self, ticket: Ticket) -> BTreeSet<Digest> {
        let have_slots: BTreeSet<Digest> = self.slots.iter().filter_map(of).map(|loaded| loaded.digest).collect();
        self.waiting.range(..ticket).map(|(_, digest)| *digest).filter(|digest| !have_slots.contains(digest)).collect()
    }

    /// The slots whose adapters take no more users, while so many adapters wait.
    fn closed(&self, starving: usize) -> Vec<usize> {
        let mut loaded: Vec<(u64, usize)> = self
            .slots
            .iter()
            .enumerate()
            .filter_map(|(at, slot)| if let Slot::Loaded(loaded) = slot { Some((loaded.since, at)) } else { None })
            .collect();
        loaded.sort_unstable();
        loaded.into_iter().take(starving).map(|(_, at)| at).collect()
    }

    /// Loaded adapters that nobody uses, and no earlier request waits for.
    fn idle(&self, ticket: Ticket) -> Vec<(usize, Loaded)> {
        let starving = self.starving_before(ticket).len();
        let closed = self.closed(starving);
        let wanted = |at: usize, digest: &Digest| {
            !closed.contains(&at) && self.waiting.range(..ticket).any(|(_, waits)| waits == digest)
        };
        let idle = |(at, slot): (usize, &Slot)| match slot {
            Slot::Loaded(loaded) if loaded.users == 0 && !wanted(at, &loaded.digest) => Some((at, *loaded)),
            _ => None,
        };
        self.slots.iter().enumerate().filter_map(idle).collect()
    }
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

    struct World(Slots);

    impl World {
        fn new(slots: usize) -> Self {
            Self(Slots::new(slots, 100, 4))
        }

        fn ask(&mut self, ticket: Ticket, adapter: u8) -> Answer {
            self.0.ask(ticket, digest(adapter), 10)
        }

        fn enter(&mut self, adapter: u8) -> Ticket {
            self.0.enter(digest(adapter)).expect("there is room to wait")
        }

        /// A request that loads its adapter if it must, and uses it.
        fn uses(&mut self, adapter: u8) -> Option<usize> {
            let ticket = self.enter(adapter);
            let mut answer = self.ask(ticket, adapter);
            if let Answer::Load { slot, .. } = answer {
                self.0.loaded(slot, true);
                answer = self.ask(ticket, adapter);
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
            world.0.release(slot);
        }
        assert_eq!(world.uses(3), Some(1));
        assert!(world.0.has(&digest(1)) && !world.0.has(&digest(2)));
    }

    #[test]
    fn memory_is_bounded() {
        let mut slots = Slots::new(4, 100, 4);
        for (adapter, bytes) in [(1, 40), (2, 30), (3, 20)] {
            let ticket = slots.enter(digest(adapter)).unwrap();
            let Answer::Load { slot, evicted } = slots.ask(ticket, digest(adapter), bytes) else { panic!() };
            assert!(evicted.is_empty());
            slots.loaded(slot, true);
            assert_eq!(slots.ask(ticket, digest(adapter), bytes), Answer::Use(slot));
            slots.leave(ticket);
            slots.release(slot);
        }
        assert_eq!(slots.counts(), (3, 90));
        let ticket = slots.enter(digest(4)).unwrap();
        // The free slot takes it, and two others give their memory.
        assert_eq!(slots.ask(ticket, digest(4), 70), Answer::Load { slot: 3, evicted: vec![0, 1] });
        assert_eq!(slots.counts(), (1, 90));
        slots.loaded(3, false);
        assert_eq!(slots.counts(), (1, 20));
        assert_eq!(slots.ask(ticket, digest(4), 200), Answer::Wait, "it can never fit");
    }

    #[test]
    fn an_adapter_is_loaded_once_for_all_who_wait_for_it() {
        let mut world = World::new(1);
        let (first, second) = (world.enter(1), world.enter(1));
        assert_eq!(world.ask(first, 1), Answer::Load { slot: 0, evicted: vec![] });
        assert_eq!(world.ask(second, 1), Answer::Wait);
        // A third one wants another: it does not take the slot away from those that came before it.
        let third = world.enter(2);
        world.0.loaded(0, true);
        assert_eq!(world.ask(third, 2), Answer::Wait);
        assert_eq!((world.ask(second, 1), world.ask(first, 1)), (Answer::Use(0), Answer::Use(0)));
        world.0.leave(first);
        world.0.leave(second);
        world.0.release(0);
        assert_eq!(world.ask(third, 2), Answer::Wait);
        world.0.release(0);
        assert_eq!(world.ask(third, 2), Answer::Load { slot: 0, evicted: vec![] });
        world.0.loaded(0, false);
        assert_eq!(world.ask(third, 2), Answer::Load { slot: 0, evicted: vec![] }, "another try");
    }

    #[test]
    fn no_more_wait_than_there_is_room_for() {
        let mut world = World::new(1);
        let tickets = [1, 2, 3, 4].map(|adapter| world.enter(adapter));
        assert_eq!(world.0.enter(digest(1)), None);
        world.0.leave(tickets[2]);
        assert!(world.0.enter(digest(1)).is_some());
    }

    #[test]
    fn a_stream_of_requests_for_loaded_adapters_starves_nobody() {
        let mut world = World::new(2);
        assert_eq!((world.uses(1), world.uses(2)), (Some(0), Some(1)));
        let waits = world.enter(3);
        assert_eq!(world.ask(waits, 3), Answer::Wait);
        // The adapter that was loaded first takes no more; the other one does.
        let behind = world.enter(1);
        assert_eq!(world.ask(behind, 1), Answer::Wait);
        assert_eq!(world.uses(2), Some(1));
        world.0.release(0);
        assert_eq!(world.ask(behind, 1), Answer::Wait);
        assert_eq!(world.ask(waits, 3), Answer::Load { slot: 0, evicted: vec![] });
        world.0.loaded(0, true);
        assert_eq!(world.ask(waits, 3), Answer::Use(0));
        world.0.leave(waits);
        // Now the one behind it waits for a slot, first of all.
        assert_eq!(world.ask(behind, 1), Answer::Wait);
        let last = world.enter(4);
        world.0.release(1);
        world.0.release(1);
        assert_eq!(world.ask(last, 4), Answer::Wait);
        assert_eq!(world.ask(behind, 1), Answer::Load { slot: 1, evicted: vec![] });
        // A request that gives up makes way.
        world.0.leave(behind);
        world.0.loaded(1, true);
        assert_eq!(world.ask(last, 4), Answer::Load { slot: 1, evicted: vec![] });
    }
}
