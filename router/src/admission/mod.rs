//! Bounded admission: a limited number of requests runs, a limited number waits. Any further request is refused at once
//! with a retry time. When all slots are taken, the youngest waiting request of the lowest priority loses its slot, but
//! only to a request of the same key.
//!
//! Tenants share the slots by weight. A request of a tenant that has less than its share of all slots enters even if
//! others have taken them: so up to twice as many are taken. Of the requests with the highest priority that wait, the
//! next is of the tenant that runs the fewest for its weight, and if several run as few, of the one whose last turn is
//! longest ago.

#[cfg(test)]
mod tests;

use crate::auth::KeyId;
use crate::placement::Standing;
use baton_types::{ErrorKind, RequestError, Share, TenantLabel, Weight};
use parking_lot::Mutex;
use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::iter::successors;
use std::ops::Bound::{Excluded, Included, Unbounded};
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

/// Higher priorities first, then by tenant, then first come, first served.
type Order = (Reverse<i32>, TenantLabel, u64);
/// The key of a request; `None` if the router does not ask for keys.
type Who = Option<KeyId>;

#[derive(Debug, Default)]
struct State {
    inside: usize,
    running: usize,
    arrivals: u64,
    turns: u64,
    /// Those with slots.
    tenants: BTreeMap<TenantLabel, Tenant>,
    /// The sum of their weights.
    weights: usize,
    /// Notified when it is the request's turn; dropped if another request of the same key took its slot.
    waiting: BTreeMap<Order, (Who, oneshot::Sender<()>)>,
}

#[derive(Debug)]
struct Tenant {
    weight: Weight,
    inside: usize,
    running: usize,
    /// Number of its last turn. A new tenant has that of the last turn but one when it came: it comes before the tenant served last,
    /// and not before those that waited while it left and came back.
    last_turn: u64,
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
    /// A slot, or `None` if `room` slots are taken and none is displaced.
    fn enter(&mut self, gate: &Arc<Gate>, priority: i32, who: Who, share: Share, room: usize) -> Option<Slot> {
        if self.inside >= room && !self.displace(priority, who) {
            return None;
        }
        self.inside += 1;
        self.arrivals += 1;
        (_, self.weights) = self.account(share);
        let new = Tenant { weight: share.weight, inside: 0, running: 0, last_turn: self.turns.saturating_sub(1) };
        let tenant = self.tenants.entry(share.tenant).or_insert(new);
        (tenant.weight, tenant.inside) = (share.weight, tenant.inside + 1);
        let order = (Reverse(priority), share.tenant, self.arrivals);
        Some(Slot { gate: gate.clone(), order, who, turn: Turn::Inside })
    }

    /// A slot is free again.
    fn leave(&mut self, tenant: TenantLabel) {
        self.inside -= 1;
        if let Some(own) = self.tenants.get_mut(&tenant) {
            own.inside -= 1;
            if own.inside == 0 {
                self.weights -= own.weight.get() as usize;
                self.tenants.remove(&tenant);
            }
        }
    }

    /// Slots that a tenant has, and the sum of the weights of all that have some or ask for some.
    fn account(&self, share: Share) -> (usize, usize) {
        let own = self.tenants.get(&share.tenant);
        let before = own.map_or(0, |own| own.weight.get() as usize);
        (own.map_or(0, |own| own.inside), self.weights - before + share.weight.get() as usize)
    }

    /// Slots that may be taken once a tenant has taken `more`.
    fn room(&self, gate: &Gate, more: usize, share: Share) -> usize {
        let ((own, weights), weight) = (self.account(share), share.weight.get() as usize);
        let is_within = own == 0 || (own + more) * weights <= gate.inside_max * weight;
        if weights > weight && is_within { 2 * gate.inside_max } else { gate.inside_max }
    }

    /// Gives a turn to one that waits, if any: of those with the highest priority, to the tenant that runs the fewest for
    /// its weight, or the one whose last turn is longest ago, and there to the first that came.
    fn pass_on(&mut self) {
        let Some((first, _)) = self.waiting.first_key_value() else { return };
        let after = |&(priority, tenant, _): &Order| {
            let later = (Excluded((priority, tenant, u64::MAX)), Included((priority, TenantLabel(u64::MAX), u64::MAX)));
            self.waiting.range(later).next().map(|(order, _)| *order)
        };
        let of = |(_, tenant, _): &Order| {
            let known = self.tenants.get(tenant);
            known.map_or((0, 0, 1), |own| (own.running, own.last_turn, own.weight.get() as usize))
        };
        let least = |a: &Order, b: &Order| {
            let ((runs, last, weight), (other_runs, other_last, other_weight)) = (of(a), of(b));
            (runs * other_weight).cmp(&(other_runs * weight)).then((last, a.2).cmp(&(other_last, b.2)))
        };
        let Some(next) = successors(Some(*first), after).min_by(least) else { return };
        if let Some((_, told)) = self.waiting.remove(&next) {
            // It learns of this when it leaves, at the latest.
            let _ = told.send(());
        }
        self.runs(next.1);
    }

    fn runs(&mut self, tenant: TenantLabel) {
        self.running += 1;
        self.turns += 1;
        if let Some(own) = self.tenants.get_mut(&tenant) {
            (own.running, own.last_turn) = (own.running + 1, self.turns);
        }
    }

    fn ran(&mut self, tenant: TenantLabel) {
        self.running -= 1;
        if let Some(own) = self.tenants.get_mut(&tenant) {
            own.running -= 1;
        }
    }

    /// Waiting requests of this key with a lower priority than `priority`: lowest priority first, then youngest.
    fn displaceable(&self, priority: i32, who: Who) -> impl Iterator<Item = Order> {
        let last = (Reverse(priority), TenantLabel(u64::MAX), u64::MAX);
        let lower = self.waiting.range((Excluded(last), Unbounded));
        lower.rev().filter(move |(_, (whose, _))| *whose == who).map(|(order, _)| *order)
    }

    /// Whether a waiting request of the same key made room. A key never displaces requests of another key.
    fn displace(&mut self, priority: i32, who: Who) -> bool {
        let Some(last) = self.displaceable(priority, who).next() else { return false };
        self.waiting.remove(&last);
        self.leave(last.1);
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
    /// At most `running_max` requests run and `queued_max` more wait; with those that enter within their tenant's share, twice as many are
    /// there.
    pub(crate) fn new(running_max: usize, queued_max: usize) -> Self {
        let state = Mutex::default();
        Self(Arc::new(Gate { running_max, inside_max: running_max + queued_max, state }))
    }

    /// Slots for all samples of one request of this key, or none. It decides at once. Requests with higher priorities
    /// run first. If all slots are taken, the request takes the slot of a waiting request with a lower priority and the
    /// same key.
    pub(crate) fn enter_all(
        &self,
        samples: u32,
        priority: i32,
        who: Option<KeyId>,
        share: Share,
    ) -> Result<Vec<Slot>, RequestError> {
        if samples as usize > self.0.inside_max {
            let message = format!(
                "the number of prompts times n must be at most {}: so many may run or wait here; got {samples}",
                self.0.inside_max
            );
            return Err(RequestError::invalid("n", message));
        }
        let mut state = self.0.state.lock();
        // Those that are inside stay, so each displaced slot is one for this request, however many others took beyond the limit.
        let room = state.room(&self.0, samples as usize, share).max(state.inside);
        let missing = (state.inside + samples as usize).saturating_sub(room);
        if state.displaceable(priority, who).take(missing).count() < missing {
            return Err(self.0.full());
        }
        Ok((0..samples).filter_map(|_| state.enter(&self.0, priority, who, share, room)).collect())
    }

    /// How a tenant with slots stands among those that have some.
    pub(crate) fn standing(&self, share: Share) -> Standing {
        let state = self.0.state.lock();
        let ((own, weights), weight) = (state.account(share), share.weight.get() as usize);
        if weights == weight {
            return Standing::ALONE;
        }
        let is_below = own <= 1 || own * weights <= state.inside * weight;
        Standing { share: weight as f64 / weights as f64, is_below }
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
                state.runs(self.order.1);
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
        if had_turn {
            state.ran(self.order.1);
            state.pass_on();
        }
        state.leave(self.order.1);
    }
}
