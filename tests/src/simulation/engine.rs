//! One worker's engine: the real scheduler decides, the stand-in model computes.

use super::call::Call;
use super::clock::{Addr, Time, ms};
use super::event::{Event, Said, Trouble};
use super::handoff::Pouch;
use super::invariant::Invariant;
use super::model::{self, Oracle};
use super::world::World;
use baton_engine::SequencePhase;
use baton_engine::scheduler::{Arrival, Awaited, Conditions, End, Scheduler, Segment, SequenceKey};
use baton_kv_cache::Lease;
use baton_types::{ErrorKind, TokenId};
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Instant;

/// A sequence as the engine's loop sees it.
#[derive(Debug)]
pub(super) struct Sequence {
    pub(super) call: usize,
    tokens: Vec<TokenId>,
    prompt_len: usize,
    max_tokens: usize,
    /// Of all its tokens; what it generates must agree.
    oracle: Oracle,
    /// Only of a prefill for another worker.
    pouch: Option<Pouch>,
    pub(super) cancelled: bool,
    /// Its reader takes nothing until then.
    pub(super) paused_until: Time,
    /// Never left the queue, and has no KV yet.
    queued: bool,
}

/// Scheduler, sequences, and what waits for the next turn.
#[derive(Debug)]
pub(super) struct Engine {
    pub(super) scheduler: Scheduler,
    pub(super) sequences: BTreeMap<SequenceKey, Sequence>,
    pub(super) arrived: Vec<(SequenceKey, Arrival)>,
    step: Vec<Segment>,
    pub(super) starved: bool,
    pub(super) awaited: Option<Awaited>,
    arrivals: u64,
}

/// What the engine is told of the world.
struct Now<'a> {
    sequences: &'a BTreeMap<SequenceKey, Sequence>,
    now: Time,
}

impl Conditions for Now<'_> {
    fn has_room(&self, key: SequenceKey) -> bool {
        self.sequences.get(&key).is_none_or(|s| s.paused_until <= self.now)
    }

    fn is_open(&self, _: SequenceKey, _: SequencePhase) -> bool {
        true
    }
}

impl Engine {
    pub(super) fn new(scheduler: Scheduler) -> Self {
        let (sequences, arrived, step) = (BTreeMap::new(), Vec::new(), Vec::new());
        Self { scheduler, sequences, arrived, step, starved: false, awaited: None, arrivals: 0 }
    }

    pub(super) fn take_turn(&mut self, priority: i32) -> SequenceKey {
        self.arrivals += 1;
        SequenceKey::new(priority, self.arrivals)
    }

    /// Sequences that have not started, those in the mailbox included.
    pub(super) fn waiting(&self) -> usize {
        self.sequences.values().filter(|s| s.queued).count()
    }

    /// Leases of all sequences, in the mailbox or scheduled.
    pub(super) fn leases(&self) -> impl Iterator<Item = &Lease> {
        let scheduled = self.sequences.keys().filter_map(|key| self.scheduler.lease(*key));
        scheduled.chain(self.arrived.iter().filter_map(|(_, arrival)| arrival.lease.as_ref()))
    }
}

impl World {
    /// Hands a sequence to the engine. With a lease it goes on with the last of its tokens.
    pub(super) fn submit(&mut self, w: usize, call: usize, tokens: Vec<TokenId>, lease: Option<Lease>, ships: bool) {
        let (deadline, here) = (self.clock.instant(self.calls[call].deadline), self.addr(w));
        let Call { prompt_len, max_tokens, priority, .. } = self.calls[call];
        let Some(worker) = self.worker_mut(w) else { return };
        let key = worker.engine.take_turn(priority);
        let computed = if lease.is_some() { tokens.len() - 1 } else { 0 };
        let arrival = Arrival { len: tokens.len(), computed, lease, pinned: ships, deadline, prefix: None };
        worker.engine.arrived.push((key, arrival));
        let (oracle, pouch) = (Oracle::of(&tokens), ships.then(Pouch::default));
        if let Some(pouch) = &pouch {
            worker.pouches.push(Rc::downgrade(pouch));
        }
        let (cancelled, paused_until, queued) = (false, 0, computed == 0);
        let sequence =
            Sequence { call, tokens, prompt_len, max_tokens, oracle, pouch, cancelled, paused_until, queued };
        worker.engine.sequences.insert(key, sequence);
        if let Some(call) = worker.calls.get_mut(&call) {
            call.sequence = Some(key);
        }
        self.post(here, Event::Engine);
    }

    /// One turn of the loop: take what came, plan, begin a step.
    pub(super) fn engine_turn(&mut self, w: usize) {
        let (time, here) = (self.clock.now(), self.addr(w));
        let now = self.clock.instant(time);
        let Some(worker) = self.worker_mut(w) else { return };
        let engine = &mut worker.engine;
        if !engine.step.is_empty() {
            return;
        }
        std::mem::take(&mut engine.arrived).into_iter().for_each(|(key, arrival)| engine.scheduler.add(key, arrival));
        let cancelled: Vec<_> = engine.sequences.iter().filter(|(_, s)| s.cancelled).map(|(key, _)| *key).collect();
        for key in cancelled {
            let Some(worker) = self.worker_mut(w) else { return };
            let lease = worker.engine.scheduler.remove(key);
            self.sequence_ends(w, key, lease, None);
        }
        let Some(worker) = self.worker_mut(w) else { return };
        let engine = &mut worker.engine;
        engine.scheduler.keep_for(engine.awaited);
        let decisions = engine.scheduler.plan(now, &Now { sequences: &engine.sequences, now: time });
        engine.starved = decisions.starved;
        engine.step = decisions.batch;
        let idle = engine.step.is_empty();
        decisions.preempted.iter().for_each(|_| self.counts.add("scheduler", "preempted"));
        decisions.started.into_iter().for_each(|key| self.sequence_starts(w, key));
        for (key, end, lease) in decisions.ended {
            let kind = match end {
                End::Deadline => ErrorKind::DeadlineExceeded,
                End::Stalled => ErrorKind::Cancelled,
            };
            self.counts.add("scheduler", if end == End::Deadline { "deadline" } else { "stalled" });
            self.sequence_ends(w, key, lease, Some(kind));
        }
        if !idle {
            let at = time + ms(2) + self.draw(ms(8) as usize) as Time;
            self.clock.post(at, here, Event::StepEnd);
        } else if let Some(at) = decisions.wake_at {
            self.wake_engine(w, here, at);
        }
    }

    fn wake_engine(&mut self, w: usize, here: Addr, at: Instant) {
        let at = self.clock.time(at).max(self.clock.now());
        let Some(worker) = self.worker_mut(w) else { return };
        if worker.wake != Some(at) {
            worker.wake = Some(at);
            self.clock.post(at, here, Event::Engine);
        }
    }

    fn sequence_starts(&mut self, w: usize, key: SequenceKey) {
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(sequence) = worker.engine.sequences.get_mut(&key) else { return };
        let was_queued = std::mem::take(&mut sequence.queued);
        let Some(blocks) = worker.engine.scheduler.lease(key).map(|lease| lease.blocks().clone()) else { return };
        let (call, pouch) = (sequence.call, sequence.pouch.clone());
        if was_queued {
            self.say(w, call, Said::Started);
        }
        if let Some(pouch) = pouch {
            self.offer(w, call, blocks, pouch);
        }
    }

    /// Everything of a sequence goes, and whoever waits for it is told `why`, unless he knows.
    fn sequence_ends(&mut self, w: usize, key: SequenceKey, lease: Option<Lease>, why: Option<ErrorKind>) {
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(sequence) = worker.engine.sequences.remove(&key) else { return };
        let shipment = worker.calls.get(&sequence.call).and_then(|c| c.shipment);
        let key = shipment.filter(|s| !s.sealed).map(|s| s.key);
        if let Some(pouch) = &sequence.pouch {
            *pouch.borrow_mut() = lease; // What reads these blocks keeps them.
            key.into_iter().for_each(|key| self.abort(w, key));
        }
        if let Some(kind) = why {
            self.say(w, sequence.call, Said::Error(Trouble::new(kind)));
        }
    }

    /// The device has computed the step.
    pub(super) fn step_ends(&mut self, w: usize) {
        let Some(worker) = self.worker_mut(w) else { return };
        for segment in std::mem::take(&mut worker.engine.step) {
            self.compute(w, segment);
        }
        self.engine_turn(w);
    }

    fn compute(&mut self, w: usize, Segment { key, position, rows, samples, .. }: Segment) {
        let (now, here) = (self.clock.now(), self.addr(w));
        let fails = std::mem::take(&mut self.procs[w].device_fails);
        let Some(worker) = self.worker_mut(w) else { return };
        let engine = &mut worker.engine;
        let (Some(sequence), Some(lease)) = (engine.sequences.get(&key), engine.scheduler.lease(key)) else {
            return self.fail(Invariant::Core, "a planned sequence does not exist or holds no blocks".into());
        };
        let blocks = &lease.blocks().0[0];
        for (at, &token) in sequence.tokens.iter().enumerate().skip(position).take(rows) {
            worker.memory.compute(blocks, at, token);
        }
        let ships = sequence.pouch.is_some();
        let shipment = worker.calls.get(&sequence.call).and_then(|c| c.shipment);
        let next = samples.then(|| worker.memory.next(blocks, position + rows));
        if next.is_some_and(|next| next != sequence.oracle.next()) {
            let call = sequence.call;
            return self.fail(
                Invariant::VerifiedKv,
                format!("a wrong token was computed for {}: its KV is not that of its past", self.calls[call].name),
            );
        }
        if let Some(shipment) = shipment.filter(|_| ships) {
            let end = (position + rows) as u32;
            for layer in 0..worker.memory.map.layout().groups()[0].layers.len() as u32 {
                let late = self.draw(ms(4) as usize) as Time;
                self.clock.post(now + late, here, Event::LayerReady { key: shipment.key, layer, end, ok: !fails });
            }
        }
        match next {
            None => self.advance(w, key, rows, false),
            Some(token) => self.sampled(w, key, rows, token),
        }
    }

    fn advance(&mut self, w: usize, key: SequenceKey, rows: usize, appended: bool) {
        let now = self.clock.instant(self.clock.now());
        if let Some(worker) = self.worker_mut(w) {
            worker.engine.scheduler.advance(key, rows, appended, now);
        }
    }

    fn sampled(&mut self, w: usize, key: SequenceKey, rows: usize, token: TokenId) {
        let Some(worker) = self.worker_mut(w) else { return };
        let engine = &mut worker.engine;
        let Some(sequence) = engine.sequences.get_mut(&key) else { return };
        sequence.tokens.push(token);
        sequence.oracle.push(token);
        let generated = sequence.tokens.len() - sequence.prompt_len;
        let ends = model::is_end(token) || generated >= sequence.max_tokens;
        let call = sequence.call;
        if let Some(pouch) = sequence.pouch.take() {
            // Between the blocks and a reader that is gone they would be nobody's.
            *pouch.borrow_mut() = engine.scheduler.remove(key);
            let tokens = engine.sequences.remove(&key).map(|s| s.tokens).unwrap_or_default();
            self.say(w, call, Said::Token { token, ends });
            self.prefilled(w, call, tokens, ends);
        } else if ends {
            let lease = engine.scheduler.remove(key);
            engine.sequences.remove(&key);
            drop(lease);
            self.say(w, call, Said::Token { token, ends });
        } else {
            self.say(w, call, Said::Token { token, ends });
            self.advance(w, key, rows, true);
        }
    }
}
