//! One step: collect the batch, launch it, and once it is done sample tokens and send events.

use super::Runner;
use crate::api::SequenceEvent;
use crate::model::{ModelError, StepInput};
use crate::sampler;
use crate::scheduler::{Segment, SequenceKey};
use crate::step_model::StepModel;
use baton_kernels::step::StepSegment;
use baton_types::{ErrorKind, FinishReason};
use std::time::Instant;

/// A step that was launched and is not finished.
pub(super) struct Step {
    segments: Vec<Segment>,
    prefill_rows: usize,
    decode_rows: usize,
    launched: Instant,
}

impl<M: StepModel> Runner<M> {
    pub(super) fn launch_step(&mut self, segments: Vec<Segment>) -> Result<Step, ModelError> {
        let launched = self.shared.clock.now();
        let batch = self.gather(&segments, launched);
        let sequences = &mut self.sequences;
        self.model.launch(&batch, &mut |layer, fence| {
            for segment in &segments {
                if let Some(observer) = sequences.get_mut(&segment.key).and_then(|s| s.observer.as_mut()) {
                    observer.layer_launched(layer, segment.position + segment.rows, fence);
                }
            }
        })?;
        let decode_rows = segments.iter().filter(|s| s.decode).count();
        Ok(Step { prefill_rows: batch.ids.len() - decode_rows, decode_rows, launched, segments })
    }

    /// Waits for the launched step. Until then its sequences keep their blocks: a sequence that ended meanwhile is removed after it.
    pub(super) fn finish_step(&mut self, step: Step) -> Result<(), ModelError> {
        let logits = self.model.finish()?;
        let now = self.shared.clock.now();
        self.rates.add(step.prefill_rows, step.decode_rows, now - step.launched);
        self.count(step.prefill_rows, step.decode_rows);
        self.shared.health.alive(now, true);
        // Sequences that came meanwhile may have the prompt that was computed. A stop request is reported again later.
        self.take_in()?;
        let mut row = 0;
        for segment in &step.segments {
            if segment.samples {
                self.sample(segment, logits.row(row))?;
                row += 1;
            } else {
                self.scheduler.advance(segment.key, segment.rows, false, now);
            }
        }
        Ok(())
    }

    fn count(&self, prefill_rows: usize, decode_rows: usize) {
        let mut load = self.shared.load.lock();
        load.steps = self.shared.health.stepped();
        load.prefill_rows += prefill_rows as u64;
        load.decode_rows += decode_rows as u64;
    }

    fn gather(&mut self, segments: &[Segment], launched: Instant) -> StepInput {
        let mut batch = StepInput::default();
        for segment in segments {
            let (Some(sequence), Some(lease)) =
                (self.sequences.get_mut(&segment.key), self.scheduler.lease(segment.key))
            else {
                unreachable!("a planned sequence exists and holds blocks");
            };
            sequence.launched_at.get_or_insert(launched);
            let Segment { position, rows, .. } = *segment;
            batch.ids.extend_from_slice(&sequence.request.tokens[position..position + rows]);
            // The engine computes only layouts of one group; the lease supports several.
            batch.segments.push(StepSegment { position, rows, blocks: lease.blocks().0[0].clone() });
            if segment.samples {
                batch.logit_rows.push(batch.ids.len() - 1);
            }
        }
        batch
    }

    /// Samples the next token of a sequence whose tokens are all computed.
    fn sample(&mut self, segment: &Segment, logits: &[f32]) -> Result<(), ModelError> {
        let key = segment.key;
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        let request = &sequence.request;
        let position = request.tokens.len() as u64;
        if let (Some(observer), Some(lease)) = (&*self.shared.logits.read(), self.scheduler.lease(key)) {
            observer.computed(&request.id, request.tokens.len(), lease.blocks(), logits);
        }
        let sampled =
            match sampler::sample(&request.sampling, logits, &sequence.history, position, request.sample_index) {
                Ok(sampled) => sampled,
                Err(error) => {
                    tracing::error!(request = %request.id, "{error}");
                    let lease = self.scheduler.remove(key);
                    let failed = SequenceEvent::Failed { kind: ErrorKind::Internal, message: error.to_string() };
                    self.end_sequence(key, lease, failed);
                    return Ok(());
                }
            };
        let given = request.tokens.len();
        let finish = sequence.push(sampled.token, &self.shared.config.end_tokens, self.shared.len_max());
        self.generated_tokens += 1;
        let at = self.shared.clock.now();
        // The step's KV stays valid, whatever happens to the token.
        self.scheduler.advance(key, segment.rows, true, at);
        if let Some(hash) = sequence.next_hash() {
            self.scheduler.hashed(key, hash);
        }
        let is_first = !std::mem::replace(&mut sequence.generated, true);
        let reuse = is_first.then(|| self.scheduler.reuse(key, given));
        self.cached_tokens += reuse.map_or(0, |reuse| reuse.cached_tokens as u64);
        let logprobs = sampled.logprobs;
        sequence.tell(SequenceEvent::Token { token: sampled.token, logprobs, finish, reuse, at });
        let (launched, is_observed) = (sequence.launched_at.unwrap_or(at), sequence.observer.is_some());
        if is_first {
            // Its blocks may be released with it next.
            let copies = self.scheduler.fork_for_waiting(key);
            self.copy(&copies)?;
        }
        if is_observed {
            self.hand_out(key, (at - launched).as_micros() as u64, at);
        } else if let Some(reason) = finish {
            self.finish(key, reason);
        }
        Ok(())
    }

    fn finish(&mut self, key: SequenceKey, reason: FinishReason) {
        let lease = self.scheduler.remove(key);
        self.end_sequence(key, lease, SequenceEvent::Finished { reason });
    }

    /// Ends a prefill by passing its blocks to the observer, on this thread: if they were sent to a reader that is gone, they would be
    /// lost. The step is done, so their KV is in memory.
    fn hand_out(&mut self, key: SequenceKey, compute_us: u64, at: Instant) {
        let lease = self.scheduler.remove(key);
        if let (Some(observer), Some(lease)) = (self.sequences.get_mut(&key).and_then(|s| s.observer.as_mut()), lease) {
            observer.prefilled(lease);
        }
        self.end_sequence(key, None, SequenceEvent::Prefilled { compute_us, at });
    }
}
