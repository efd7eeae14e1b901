//! What workers tell the router.

use super::clock::{ns, seconds};
use super::cluster::{Cluster, Event};
use super::worker::Store;
use baton_types::{BlockCounts, LoadReport};

impl Cluster<'_> {
    /// Tells the router what changed in a worker's cache.
    pub(super) fn tell(&mut self, worker: usize) {
        let store = match worker.checked_sub(self.prefill.len()) {
            None => &mut self.prefill[worker].store,
            Some(d) => &mut self.decode[d].store,
        };
        if let Some(told) = store.changes() {
            self.half_trip(Event::Told(worker, told));
        }
    }

    /// A worker's load changed: it reports at its next tick.
    pub(super) fn changed(&mut self, worker: usize) {
        if !self.reports[worker] {
            self.reports[worker] = true;
            let every = ns(self.rates.router.report_s).max(1);
            // Workers did not all start at the same moment.
            let phase = worker as u64 * 7_919_000 % every;
            let tick = (self.clock.now() + every - phase) / every * every + phase;
            self.clock.post(tick, Event::Reports(worker));
        }
    }

    pub(super) fn reports(&mut self, worker: usize) {
        let report = self.report(worker);
        let busy = report.running + report.waiting > 0;
        self.half_trip(Event::Heard(worker, Box::new(report)));
        self.reports[worker] = false;
        if busy {
            self.changed(worker);
        }
    }

    pub(super) fn report(&self, worker: usize) -> LoadReport {
        let rate = self.rates.prefill.tokens_per_s;
        let counted = |store: &Store| {
            let counts = store.pool.counts();
            BlockCounts {
                total: counts.total as u64,
                free: counts.free as u64,
                referenced: counts.referenced as u64,
                cached: counts.cached as u64,
                quarantined: 0,
            }
        };
        let report = LoadReport { healthy: true, prefill_tokens_per_s: rate as f32, ..LoadReport::default() };
        match worker.checked_sub(self.prefill.len()) {
            None => {
                let prefill = &self.prefill[worker];
                let queued_s = prefill.queue.iter().map(|&r| {
                    let cached = self.tokens_of(prefill.store.cached(self.reusable_names(r)));
                    let got = self.requests[r].decision.map_or(0, |decision| decision.get_to_tokens);
                    self.rates.compute_s(cached.max(got), self.prompt_tokens(r))
                });
                let running_s =
                    prefill.running.map_or(0.0, |(_, until)| seconds(until.saturating_sub(self.clock.now())));
                LoadReport {
                    waiting: prefill.queue.len() as u32,
                    waiting_tokens: ((queued_s.sum::<f64>() + running_s) * rate) as u64,
                    running: prefill.running.is_some().into(),
                    blocks: Some(counted(&prefill.store)),
                    ..report
                }
            }
            Some(d) => {
                let decode = &self.decode[d];
                let ((running, waiting), step_s) = (decode.batch.sequences(), decode.batch.step_s());
                LoadReport {
                    waiting: (waiting + decode.claims) as u32,
                    waiting_tokens: (decode.batch.prompts_s() * rate) as u64,
                    running: running as u32,
                    claimed_tokens: decode.claimed_tokens,
                    decode_steps_per_s: if step_s > 0.0 { (1.0 / step_s) as f32 } else { 0.0 },
                    blocks: Some(counted(&decode.store)),
                    ..report
                }
            }
        }
    }
}
