//! What must hold after every event, and when all is quiet.

use super::clock::{Time, ms};
use super::invariant::Invariant;
use super::shape::{END, ENDS_WITHIN, HEALED};
use super::world::{Request, World};
use baton_kv_cache::Lease;
use baton_types::GroupBlocks;
use std::collections::BTreeMap;

/// Twice the longest time until a worker looks again at what waits.
const STUCK_MAX: Time = ms(100);

impl World {
    /// Every block of a worker has one owner, and the pool's books say the same.
    pub(super) fn check_blocks(&mut self, w: usize) {
        let Some(worker) = self.worker_mut(w) else { return };
        let counts = worker.pool.counts();
        let pouches = worker.live_pouches();
        let pouches: Vec<_> = pouches.iter().map(|pouch| pouch.borrow()).collect();
        let held = worker.engine.leases().chain(pouches.iter().filter_map(|pouch| pouch.as_ref()));
        let held = held.chain(worker.granting.values()).map(Lease::blocks);
        let parts = worker.waiting.iter().filter_map(|waiting| waiting.part.as_ref()).map(Lease::blocks);
        let incoming = worker.incoming.values().filter(|i| i.hold.is_some()).filter_map(|i| i.owned());
        let mut seen = Seen::default();
        held.chain(incoming).for_each(|blocks| seen.add(blocks));
        let used = seen.count;
        parts.for_each(|blocks| seen.add(blocks));
        let referenced = seen.count;
        let quarantined = worker.incoming.values().filter(|i| i.quarantined.is_some()).filter_map(|i| i.owned());
        quarantined.for_each(|blocks| seen.add(blocks));
        let found = (referenced, seen.count - referenced);
        let wrong = if let Some(block) = seen.twice {
            Some((Invariant::OneOwner, format!("block {block} has two owners")))
        } else if found != (counts.referenced, counts.quarantined) {
            Some((
                Invariant::OneOwner,
                format!("{found:?} blocks are referenced and quarantined, the pool's books say {counts:?}"),
            ))
        } else {
            None
        };
        drop(pouches);
        wrong.into_iter().for_each(|(invariant, wrong)| self.fail(invariant, wrong));
        self.check_waiting(w, used);
        self.check_quarantine(w);
    }

    /// No offer waits long that would fit, while nobody uses a block whose end would give it room.
    fn check_waiting(&mut self, w: usize, used: usize) {
        let (now, stands_still) = (self.clock.now(), self.procs[w].stalled.is_some());
        let Some(worker) = self.worker_mut(w) else { return };
        let counts = worker.pool.counts();
        let usable = (counts.total - counts.quarantined) * worker.memory.map.layout().block_tokens() as usize;
        let may_wait = used > 0 || stands_still;
        let stuck = worker.waiting.front().filter(|front| !may_wait && front.tokens <= usable);
        let since = worker.stuck.filter(|(key, _)| stuck.is_some_and(|front| front.key == *key));
        worker.stuck = since.or(stuck.map(|front| (front.key, now)));
        let Some(front) = stuck.filter(|_| since.is_some_and(|(_, since)| now - since > STUCK_MAX)) else { return };
        let (tokens, others) = (front.tokens, worker.waiting.len() - 1);
        self.fail(
            Invariant::NoDeadlock,
            format!("an offer of {tokens} tokens and {others} others wait for each other, nobody else has a block: {counts:?}"),
        );
    }

    /// No source leaves more in quarantine than the bound, where nothing but its death gives it back.
    fn check_quarantine(&mut self, w: usize) {
        let max = self.shape.quarantined_max();
        let Some(worker) = self.worker(w).filter(|_| !self.shape.lane.closing_fences()) else { return };
        let mut by_source = BTreeMap::new();
        for incoming in worker.incoming.values() {
            *by_source.entry(incoming.source().process).or_insert(0) += incoming.quarantined_blocks();
        }
        if let Some((source, blocks)) = by_source.into_iter().find(|(_, blocks)| *blocks > max) {
            let source = self.shape.name(source);
            self.fail(
                Invariant::QuarantineBound,
                format!("{source} left {blocks} blocks in quarantine, and {max} are its bound"),
            );
        }
    }

    /// All requests ended in time, and nothing of them is left.
    pub(super) fn check_quiet(&mut self) {
        for request in 0..self.requests.len() {
            let spec = &self.requests[request];
            // A router that stood still, or an etcd that was away, ends nothing before they go on.
            let by = spec.deadline.max(HEALED) + ms(20);
            // No deadline of a client is to be what ends a request once nothing disturbs it.
            // One that came where it does not fit, beside what is quarantined, waits for that.
            let fits = self.fits(spec);
            let soon = spec.at.max(HEALED) + ENDS_WITHIN;
            match &spec.outcome {
                None => self.fail(Invariant::EveryEnd, format!("request {request} never ended")),
                Some((at, _)) if *at > by => {
                    self.fail(Invariant::EveryEnd, format!("request {request} ended at {at} us, after its deadline"))
                }
                Some((at, _)) if *at > soon && !fits.contains(&false) => self
                    .fail(Invariant::EveryEnd, format!("request {request} ended at {at} us, {soon} was time enough")),
                Some((_, Some(error))) if spec.must_succeed && fits.contains(&true) => self.fail(
                    Invariant::EveryEnd,
                    format!("request {request} came when all was well, and failed: {error:?}"),
                ),
                Some(_) => {}
            }
        }
        for w in self.shape.routers..self.procs.len() {
            self.check_idle(w);
        }
        for r in 0..self.shape.routers {
            self.check_view(r);
        }
    }

    /// Of each decode worker, whether the request fits beside what is quarantined: what an unfenced peer may still write is lost to the pool
    /// while that peer lives.
    fn fits(&self, request: &Request) -> Vec<bool> {
        let tokens = request.prompt.len() + request.max_tokens;
        let workers = (self.shape.routers + self.shape.prefills..self.procs.len()).filter_map(|w| self.worker(w));
        let fits = workers.map(|worker| {
            let counts = worker.pool.counts();
            worker.memory.map.layout().blocks_for(tokens) <= counts.total - counts.quarantined
        });
        fits.collect()
    }

    fn check_idle(&mut self, w: usize) {
        let name = self.shape.name(w);
        let Some(worker) = self.worker(w) else {
            return self.fail(Invariant::Quiet, format!("{name} is not up at {END}"));
        };
        let counts = worker.pool.counts();
        let (sequences, calls) = (worker.engine.sequences.len(), worker.calls.len());
        let (sending, waiting, claimed) = (worker.sending.len(), worker.waiting.len(), worker.claims.tokens());
        let left = worker.incoming.values().filter(|i| {
            let is_unfenced = !self.net.connections[i.conn].lane.closing_fences() && self.is_alive(i.source());
            !(i.quarantined.is_some() && is_unfenced)
        });
        let left = left.count();
        if counts.referenced + sequences + calls + sending + waiting + left > 0 || claimed > 0 {
            self.fail(Invariant::Quiet, format!(
                "{name} is not quiet: {counts:?}, {sequences} sequences, {calls} calls, {sending} handoffs out, {left} in, \
                 {waiting} offers, {claimed} tokens claimed"
            ));
        }
    }

    /// Each router sees who is registered, and all who run are.
    fn check_view(&mut self, r: usize) {
        let registered = self.etcd.registered();
        let Some(router) = self.router(r) else {
            return self.fail(Invariant::ForwardViews, format!("router{r} is not up"));
        };
        let view = router.members();
        let seen: std::collections::BTreeMap<_, _> =
            view.members.iter().map(|(id, member)| (id.clone(), member.registration)).collect();
        let registered = if self.shape.is_embedded { seen.clone() } else { registered };
        if seen != registered {
            return self
                .fail(Invariant::ForwardViews, format!("router{r} sees {seen:?}, registered are {registered:?}"));
        }
        for (instance, process) in self.instances.clone() {
            let incarnation = self.procs[process].incarnation;
            if registered.get(&instance).is_none_or(|r| r.incarnation.0 != incarnation) {
                self.fail(Invariant::ForwardViews, format!("{instance} runs and is not registered"));
            }
        }
    }
}

/// Blocks with an owner.
#[derive(Default)]
struct Seen {
    bits: u64,
    count: usize,
    twice: Option<u32>,
}

impl Seen {
    fn add(&mut self, blocks: &GroupBlocks) {
        for block in blocks.0.iter().flatten() {
            if self.bits >> block.0 & 1 == 1 {
                self.twice = Some(block.0);
            }
            self.bits |= 1 << block.0;
            self.count += 1;
        }
    }
}
