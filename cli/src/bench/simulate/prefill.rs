//! Prefill workers: what becomes of a prompt there.

use super::clock::{Time, ns};
use super::cluster::{Cluster, Event};
use super::worker::Store;
use std::collections::VecDeque;

/// A prefill worker: one prompt at a time, first come, first served.
pub(super) struct Prefill {
    pub(super) store: Store,
    pub(super) queue: VecDeque<usize>,
    /// What it computes, and until when.
    pub(super) running: Option<(usize, Time)>,
}

impl Cluster<'_> {
    pub(super) fn at_prefill(&mut self, r: usize) {
        let Some((Some(p), _)) = self.placed(r) else { return };
        self.prefill[p].queue.push_back(r);
        self.next_prompt(p);
        self.changed(p);
    }

    /// A prefill worker takes the next prompt, if it has nothing to do and its pool has room.
    pub(super) fn next_prompt(&mut self, p: usize) {
        let (None, Some(&r)) = (self.prefill[p].running, self.prefill[p].queue.front()) else { return };
        let (now, instant, names) = (self.clock.now(), self.clock.instant(), self.names.of(r));
        let (reusable, blocks) = (self.reusable(r), self.blocks_for(self.prompt_tokens(r)));
        let store = &mut self.prefill[p].store;
        store.expire(instant);
        let Some(lease) = store.reserve(names, reusable, blocks, instant) else { return };
        self.prefill[p].queue.pop_front();
        self.requests[r].cached_tokens = self.tokens_of(lease.cached_blocks());
        self.requests[r].prefill_lease = Some(lease);
        self.tell(p);
        match self.get(r) {
            Some(read) => {
                self.prefill[p].running = Some((r, read));
                self.clock.post(read, Event::Got(r));
            }
            None => self.compute(r, now),
        }
        self.reserve(r);
    }

    /// Begins to read what the decode worker has beyond the prefill worker's own; when it is read.
    pub(super) fn get(&mut self, r: usize) -> Option<Time> {
        let (wanted, now) = (self.requests[r].decision?.get_to_tokens, self.clock.now());
        let (_, d) = self.placed(r)?;
        let names = self.reusable_names(r);
        let store = &mut self.decode[d].store;
        let wanted = (wanted / u64::from(self.trace.block_tokens)) as usize;
        let there = store.cached(names).min(wanted);
        let tokens = (there as u64 * u64::from(self.trace.block_tokens)).saturating_sub(self.requests[r].cached_tokens);
        if tokens == 0 {
            return None;
        }
        let pin = store.reserve(names, there, there, self.clock.instant())?;
        let sent = store.send(now, self.rates.moved_s(tokens));
        self.requests[r].pin = Some(pin);
        self.requests[r].got_tokens = tokens;
        Some(sent + ns(self.rates.transfer.latency_s))
    }

    pub(super) fn got(&mut self, r: usize) {
        self.requests[r].pin = None;
        if let Some((_, d)) = self.placed(r) {
            self.has_room(d);
        }
        self.compute(r, self.clock.now());
    }

    /// Computes what a prefill worker lacks.
    pub(super) fn compute(&mut self, r: usize, now: Time) {
        let Some((Some(p), _)) = self.placed(r) else { return };
        let there = self.requests[r].cached_tokens + self.requests[r].got_tokens;
        let took = self.rates.prefill.prompt_s + self.rates.compute_s(there, self.prompt_tokens(r));
        self.requests[r].computes_from = now;
        self.prefill[p].running = Some((r, now + ns(took)));
        self.clock.post(now + ns(took), Event::Prefilled(r));
    }

    pub(super) fn prefilled(&mut self, r: usize) {
        let Some((Some(p), _)) = self.placed(r) else { return };
        let (now, instant, names) = (self.clock.now(), self.clock.instant(), self.names.of(r));
        if let Some(lease) = &mut self.requests[r].prefill_lease {
            self.prefill[p].store.store(lease, names, instant);
        }
        self.requests[r].prefilled_at = Some(now);
        self.prefill[p].running = None;
        self.tell(p);
        self.half_trip(Event::FirstToken(r));
        if self.trace.requests[r].output_tokens <= 1 {
            // The answer ends with it: nothing is handed on.
            self.requests[r].prefill_lease = None;
            self.claim_ended(r);
            self.half_trip(Event::Ends(r));
        } else {
            self.hand_on(r);
        }
        self.next_prompt(p);
        self.changed(p);
    }

    /// Sends KV once the prompt is computed and the blocks for it are there. It left while layers were computed, as far as the NIC was
    /// free; what the decode worker has is not sent.
    pub(super) fn hand_on(&mut self, r: usize) {
        let request = &self.requests[r];
        let (Some(prefilled), Some(reserved)) = (request.prefilled_at, request.reserved_at) else { return };
        let Some((Some(p), _)) = self.placed(r) else { return };
        let moved_s = self.rates.moved_s(self.prompt_tokens(r) - request.decode_cached_tokens);
        let sent = self.prefill[p].store.send(request.computes_from.max(reserved), moved_s);
        let last_layer = prefilled.max(reserved) + ns(moved_s / f64::from(self.rates.transfer.layers));
        self.clock.post(sent.max(last_layer) + ns(self.rates.transfer.latency_s), Event::Adopted(r));
    }
}
