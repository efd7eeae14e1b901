//! Decode workers: claims, blocks, and the batch.

use super::batch::{Batch, Sequence, Stepped};
use super::clock::Time;
use super::cluster::{Cluster, Event};
use super::worker::Store;
use std::collections::VecDeque;

/// A decode worker.
pub(super) struct Decode {
    pub(super) store: Store,
    pub(super) batch: Batch,
    /// Claims that are not adopted.
    pub(super) claims: usize,
    /// Tokens of claims that have no blocks yet.
    pub(super) claimed_tokens: u64,
    /// Requests that wait for blocks, those with KV on its way and those to be computed here.
    pub(super) lacking: VecDeque<usize>,
}

impl Cluster<'_> {
    pub(super) fn claim_ended(&mut self, r: usize) {
        let Some((_, d)) = self.placed(r) else { return };
        self.decode[d].lacking.retain(|&lacking| lacking != r);
        self.decode[d].claims -= 1;
        if self.requests[r].decode_lease.take().is_none() {
            self.decode[d].claimed_tokens -= self.prompt_tokens(r);
        }
        self.has_room(d);
        self.changed(self.prefill.len() + d);
    }

    pub(super) fn at_decode(&mut self, r: usize) {
        let Some((prefill, d)) = self.placed(r) else { return };
        self.decode[d].claims += 1;
        self.decode[d].claimed_tokens += self.prompt_tokens(r);
        if prefill.is_none() {
            self.reserve(r);
        }
        self.changed(self.prefill.len() + d);
    }

    /// The decode worker takes blocks for prompt and answer, now or as soon as it has them.
    pub(super) fn reserve(&mut self, r: usize) {
        let Some((_, d)) = self.placed(r) else { return };
        if !self.decode[d].lacking.is_empty() || !self.try_reserve(r) {
            self.decode[d].lacking.push_back(r);
        }
    }

    pub(super) fn try_reserve(&mut self, r: usize) -> bool {
        let Some((prefill, d)) = self.placed(r) else { return false };
        let (names, reusable, instant) = (self.names.of(r), self.reusable(r), self.clock.instant());
        let tokens = self.prompt_tokens(r) + u64::from(self.trace.requests[r].output_tokens);
        let blocks = self.blocks_for(tokens);
        let store = &mut self.decode[d].store;
        store.expire(instant);
        let Some(lease) = store.reserve(names, reusable, blocks, instant) else { return false };
        let cached_tokens = self.tokens_of(lease.cached_blocks());
        self.decode[d].claimed_tokens -= self.prompt_tokens(r);
        let request = &mut self.requests[r];
        (request.decode_lease, request.decode_cached_tokens) = (Some(lease), cached_tokens);
        request.reserved_at = Some(self.clock.now());
        self.tell(self.prefill.len() + d);
        if prefill.is_some() {
            self.hand_on(r);
        } else {
            self.requests[r].cached_tokens = cached_tokens;
            self.decode[d].claims -= 1;
            let left_s = self.rates.prefill.prompt_s + self.rates.compute_s(cached_tokens, self.prompt_tokens(r));
            let begun = self.decode[d].batch.compute(r, left_s, self.clock.now(), self.rates);
            self.step_on(d, begun);
        }
        true
    }

    pub(super) fn adopted(&mut self, r: usize) {
        let Some((Some(p), d)) = self.placed(r) else { return };
        self.requests[r].prefill_lease = None;
        self.next_prompt(p);
        self.changed(p);
        self.decode[d].claims -= 1;
        self.keep_on_decode(r, d);
        self.join(r, d, self.requests[r].prefilled_at.unwrap_or_default());
    }

    pub(super) fn keep_on_decode(&mut self, r: usize, d: usize) {
        let (instant, names) = (self.clock.instant(), self.names.of(r));
        if let Some(lease) = &mut self.requests[r].decode_lease {
            self.decode[d].store.store(lease, names, instant);
        }
        self.tell(self.prefill.len() + d);
    }

    /// A sequence that has its first token goes on in the batch.
    pub(super) fn join(&mut self, r: usize, d: usize, last: Time) {
        let left = self.trace.requests[r].output_tokens.saturating_sub(1);
        if left == 0 {
            self.ended(r, d);
        } else {
            let sequence = Sequence { request: r, left, context: self.prompt_tokens(r), last };
            let begun = self.decode[d].batch.join(sequence, self.clock.now(), self.rates);
            self.step_on(d, begun);
        }
        self.changed(self.prefill.len() + d);
    }

    pub(super) fn step_on(&mut self, d: usize, begun: Option<(Time, u64)>) {
        if let Some((at, boundary)) = begun {
            self.clock.post(at, Event::Stepped(d, boundary));
        }
    }

    pub(super) fn stepped(&mut self, d: usize, boundary: u64) {
        let Some(stepped) = self.decode[d].batch.reached(boundary, self.rates) else { return };
        let Stepped { gaps_us, ended, prefilled } = stepped;
        for (r, gaps) in gaps_us {
            self.requests[r].gaps_us.extend(gaps);
        }
        ended.into_iter().for_each(|r| self.ended(r, d));
        if let Some(r) = prefilled {
            let now = self.clock.now();
            self.requests[r].prefilled_at = Some(now);
            self.keep_on_decode(r, d);
            self.half_trip(Event::FirstToken(r));
            self.join(r, d, now);
        }
        if self.decode[d].batch.is_idle() {
            let begun = self.decode[d].batch.begin(self.clock.now(), self.rates);
            self.step_on(d, begun);
        }
        self.changed(self.prefill.len() + d);
    }

    pub(super) fn ended(&mut self, r: usize, d: usize) {
        self.requests[r].decode_lease = None;
        self.half_trip(Event::Ends(r));
        self.has_room(d);
    }

    /// Blocks came back: those that wait for some are asked in their order.
    pub(super) fn has_room(&mut self, d: usize) {
        while let Some(&r) = self.decode[d].lacking.front() {
            if !self.try_reserve(r) {
                return;
            }
            self.decode[d].lacking.pop_front();
        }
    }
}
