//! Bounded admission: a limited number of requests runs, a limited number waits. Any further request is refused at once
//! with a retry time. When all slots are taken, the youngest waiting request of the lowest priority loses its slot, but
//! only to a request of the same key.

use crate::auth::KeyId;
use baton_types::{ErrorKind, RequestError};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound::{Excluded, Unbounded};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::oneshot::{self, error::TryRecvError};

/// The retry hint while no completion rate is known: long enough to limit load, short enough to use slots that became
/// free.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The gate that every request passes. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Admission(Arc<Gate>);

#[derive(Debug)]
struct Gate {
    running_max: usize,
    inside_max: usize,
    state: Mutex<State>,
}

/// The order in which requests get their turn: higher priorities first, then first come, first served.
type Order = (Reverse<i32>, u64);
/// The key of a request; `None` if the router does not ask for keys.
type Who = Option<KeyId>;

#[derive(Debug, Default)]
struct State {
    inside: usize,
    running: usize,
    arrivals: u64,
    /// Notified when it is the request's turn; dropped if another request of the same key took its slot.
    waiting: BTreeMap<Order, (Who, oneshot::Sender<()>)>,
}

/// A slot in admission; dropping it frees the slot.
#[derive(Debug)]
pub(crate) struct Slot {
    gate: Arc<Gate>,
    order: Order,
    who: Who,
    turn: Turn,
}

#[derive(Debug)]
enum Turn {
    /// Has not asked for its turn yet.
    Inside,
    Waiting(oneshot::Receiver<()>),
    Running,
    /// Another request took its slot.
    Displaced,
}

impl State {
    fn enter(&mut self, gate: &Arc<Gate>, priority: i32, who: Who) -> Result<Slot, RequestError> {
        if self.inside >= gate.inside_max && !self.displace(priority, who) {
            return Err(gate.full());
        }
        self.inside += 1;
        self.arrivals += 1;
        Ok(Slot { gate: gate.clone(), order: (Reverse(priority), self.arrivals), who, turn: Turn::Inside })
    }

    /// Waiting requests of this key with a lower priority than `priority`: lowest priority first, then youngest.
    fn displaceable(&self, priority: i32, who: Who) -> impl Iterator<Item = Order> {
        let lower = self.waiting.range((Excluded((Reverse(priority), u64::MAX)), Unbounded));
        lower.rev().filter(move |(_, (whose, _))| *whose == who).map(|(order, _)| *order)
    }

    /// Whether a waiting request of the same key made room. A key never displaces requests of another key.
    fn displace(&mut self, priority: i32, who: Who) -> bool {
        let Some(last) = self.displaceable(priority, who).next() else { return false };
        self.waiting.remove(&last);
        self.inside -= 1;
        true
    }
}

impl Gate {
    fn full(&self) -> RequestError {
        let message =
            format!("{} requests are running or waiting, which is the limit; try again later", self.inside_max);
        RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
    }
}

impl Admission {
    /// At most `running_max` requests run and `queued_max` more wait.
    pub(crate) fn new(running_max: usize, queued_max: usize) -> Self {
        let state = Mutex::default();
        Self(Arc::new(Gate { running_max, inside_max: running_max + queued_max, state }))
    }

    /// Slots for all samples of one request of this key, or none. It decides at once. Requests with higher priorities
    /// run first. If all slots are taken, the request takes the slot of a waiting request with a lower priority and the
    /// same key.
    pub(crate) fn enter_all(&self, samples: u32, priority: i32, who: Option<KeyId>) -> Result<Vec<Slot>, RequestError> {
        if samples as usize > self.0.inside_max {
            let message =
                format!("n must be at most {}: so many may run or wait here; got {samples}", self.0.inside_max);
            return Err(RequestError::invalid("n", message));
        }
        let mut state = self.0.state.lock();
        let displaceable = state.displaceable(priority, who).take(samples as usize).count();
        if state.inside + samples as usize > self.0.inside_max + displaceable {
            return Err(self.0.full());
        }
        (0..samples).map(|_| state.enter(&self.0, priority, who)).collect()
    }

    /// Running requests, and requests that have a slot but do not run yet.
    pub(crate) fn counts(&self) -> (usize, usize) {
        let state = self.0.state.lock();
        (state.running, state.inside.saturating_sub(state.running))
    }

    /// Most requests that run at once.
    pub(crate) fn running_max(&self) -> usize {
        self.0.running_max
    }

    pub(crate) fn inside(&self) -> usize {
        self.0.state.lock().inside
    }
}

impl Slot {
    /// Waits for its turn, or until another request takes its slot. The caller bounds the wait by the deadline.
    pub(crate) async fn turn(&mut self) -> Result<(), RequestError> {
        if let Turn::Inside = self.turn {
            let mut state = self.gate.state.lock();
            // No request waits while there is room: a request that leaves passes its room on.
            if state.running < self.gate.running_max {
                state.running += 1;
                self.turn = Turn::Running;
            } else {
                let (told, turn) = oneshot::channel();
                state.waiting.insert(self.order, (self.who, told));
                self.turn = Turn::Waiting(turn);
            }
        }
        if let Turn::Waiting(turn) = &mut self.turn {
            self.turn = if turn.await.is_ok() { Turn::Running } else { Turn::Displaced };
        }
        if let Turn::Displaced = self.turn { Err(self.gate.full()) } else { Ok(()) }
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut state = self.gate.state.lock();
        let had_turn = match &mut self.turn {
            Turn::Inside => false,
            // The notification may have been sent but not received yet.
            Turn::Waiting(turn) => match turn.try_recv() {
                Ok(()) => true,
                Err(TryRecvError::Empty) => state.waiting.remove(&self.order).is_none(),
                Err(TryRecvError::Closed) => return,
            },
            Turn::Running => true,
            Turn::Displaced => return,
        };
        state.inside -= 1;
        if had_turn {
            match state.waiting.pop_first() {
                // It learns of this when it leaves, at the latest.
                Some((_, (_, next))) => drop(next.send(())),
                None => state.running -= 1,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt as _;

    impl Admission {
        fn enter(&self, priority: i32) -> Result<Slot, RequestError> {
            self.0.state.lock().enter(&self.0, priority, None)
        }
    }

    #[test]
    fn over_the_limit_is_refused_and_places_come_back() {
        let admission = Admission::new(1, 1);
        let mut first = admission.enter(0).unwrap();
        first.turn().now_or_never().unwrap().unwrap();
        let mut second = admission.enter(0).unwrap();
        assert!(second.turn().now_or_never().is_none(), "the second waits");
        let error = admission.enter(0).unwrap_err();
        assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
        drop(first);
        second.turn().now_or_never().unwrap().unwrap();
        assert_eq!(admission.inside(), 1);
        drop(second);
        assert_eq!(admission.inside(), 0);
    }

    #[test]
    fn samples_enter_together_or_not_at_all() {
        let admission = Admission::new(1, 3);
        let one = admission.enter(0).unwrap();
        assert_eq!(admission.enter_all(4, 0, None).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!(admission.inside(), 1);
        let three = admission.enter_all(3, 0, None).unwrap();
        assert_eq!((three.len(), admission.inside()), (3, 4));
        assert_eq!(admission.enter_all(5, 0, None).unwrap_err().param.as_deref(), Some("n"), "it could never enter");
        drop((one, three));
        assert_eq!(admission.inside(), 0);
    }

    #[test]
    fn samples_that_find_too_few_places_send_nobody_away() {
        let admission = Admission::new(1, 2);
        let mut running = admission.enter(0).unwrap();
        running.turn().now_or_never().unwrap().unwrap();
        let mut waiting: Vec<Slot> = [0, 0].map(|priority| admission.enter(priority).unwrap()).into();
        waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none()));
        assert_eq!(admission.enter_all(3, 5, None).unwrap_err().kind, ErrorKind::Overloaded);
        waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none(), "it waits as before"));
        let urgent = admission.enter_all(2, 5, None).unwrap();
        waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().unwrap().is_err()));
        drop((running, urgent, waiting));
        assert_eq!(admission.inside(), 0);
    }

    #[test]
    fn a_full_queue_sends_the_youngest_of_the_lowest_priority_away() {
        let admission = Admission::new(1, 3);
        let mut running = admission.enter(-9).unwrap();
        running.turn().now_or_never().unwrap().unwrap();
        let mut waiting: Vec<Slot> = [0, -1, -1].map(|priority| admission.enter(priority).unwrap()).into();
        for slot in &mut waiting {
            assert!(slot.turn().now_or_never().is_none());
        }
        assert!(admission.enter(-1).is_err(), "nobody waits with a lower one");
        let mut urgent = admission.enter(5).unwrap();
        assert!(urgent.turn().now_or_never().is_none());
        let error = waiting[2].turn().now_or_never().unwrap().unwrap_err();
        assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
        // One that leaves before it learns that it lost its slot.
        let another = admission.enter(5).unwrap();
        waiting.truncate(1);
        assert_eq!(admission.inside(), 4);
        drop((running, another));
        urgent.turn().now_or_never().unwrap().unwrap();
        assert!(waiting[0].turn().now_or_never().is_none());
        drop((urgent, waiting));
        assert_eq!((admission.inside(), admission.0.state.lock().running), (0, 0));
    }

    #[test]
    fn no_key_takes_the_place_of_what_another_has_queued() {
        let admission = Admission::new(1, 3);
        let enter = |key: u8, priority: i32| admission.enter_all(1, priority, Some([key; 32]));
        let mut running = enter(1, 0).unwrap().remove(0);
        running.turn().now_or_never().unwrap().unwrap();
        let mut waiting: Vec<Slot> = [(1, -5), (2, -9), (2, 0)].map(|(key, p)| enter(key, p).unwrap().remove(0)).into();
        waiting.iter_mut().for_each(|slot| assert!(slot.turn().now_or_never().is_none()));
        assert_eq!(enter(3, 100).unwrap_err().kind, ErrorKind::Overloaded);
        assert_eq!(admission.enter_all(2, 100, Some([1; 32])).unwrap_err().kind, ErrorKind::Overloaded);
        let _own = enter(1, 100).unwrap();
        let waits: Vec<bool> = waiting.iter_mut().map(|slot| slot.turn().now_or_never().is_none()).collect();
        assert_eq!(waits, [false, true, true], "its own, though another's is lower");
    }

    #[test]
    fn turns_go_by_priority_then_by_arrival_and_are_not_lost_with_who_leaves() {
        let admission = Admission::new(1, 10);
        let mut running = admission.enter(0).unwrap();
        running.turn().now_or_never().unwrap().unwrap();
        let mut waiting: Vec<Slot> = [0, 5, 0, 5, -1].map(|priority| admission.enter(priority).unwrap()).into();
        for slot in &mut waiting {
            assert!(slot.turn().now_or_never().is_none());
        }
        drop(running);
        // Notified, but dropped before it received that; then one that was never notified.
        drop(waiting.remove(1));
        drop(waiting.remove(1));
        // The other 5, the 0, the -1.
        for expected in [1, 0, 0] {
            let running: Vec<bool> = waiting.iter_mut().map(|slot| slot.turn().now_or_never().is_some()).collect();
            assert_eq!(running.iter().position(|r| *r), Some(expected), "{running:?}");
            assert_eq!(running.iter().filter(|r| **r).count(), 1);
            waiting.remove(expected);
        }
        assert_eq!(admission.inside(), 0);
        assert_eq!(admission.0.state.lock().running, 0);
    }
}
