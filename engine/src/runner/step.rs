//! One step: collect the batch, launch it, and once it is done send what it sampled.

use super::{Runner, common};
use crate::api::{PrefillObserver, SequenceEvent};
use crate::model::{ModelError, StepInput};
use crate::scheduler::{Segment, SequenceKey};
use crate::step_model::StepModel;
use baton_kernels::device::DeviceError;
use baton_kernels::sampling::{SampleError, Sampled};
use baton_kernels::step::{RowId, SlotRows};
use baton_kv_cache::{Lease, PrefixHash};
use baton_types::{ErrorKind, FinishReason, RequestError};
use std::time::Instant;

/// A step that was launched and is not finished.
pub(super) struct Step {
    segments: Vec<Segment>,
    prefill_rows: usize,
    decode_rows: usize,
    launched: Instant,
    /// What ended sequences leave behind; this step is the last that uses their blocks.
    pub(super) retired: Vec<Retired>,
}

impl Step {
    /// Whether it computes rows of a sequence.
    pub(super) fn has(&self, key: SequenceKey) -> bool {
        self.segments.iter().any(|segment| segment.key == key)
    }

    /// Whether it uses blocks of a sequence that ended.
    pub(super) fn is_retiring(&self) -> bool {
        self.retired.iter().any(|retired| retired.lease.is_some())
    }
}

/// Blocks of a sequence that ended.
pub(super) struct Retired {
    pub(super) observer: Option<Box<dyn PrefillObserver>>,
    pub(super) lease: Option<Lease>,
    /// Hashes of blocks whose reuse is not expected.
    pub(super) cold: Option<Vec<PrefixHash>>,
}

impl<M: StepModel> Runner<M> {
    pub(super) fn launch_step(&mut self, segments: Vec<Segment>) -> Result<Step, ModelError> {
        let launched = self.shared.clock.now();
        if let Some(free_from) = self.free_from.take() {
            self.gaps.add(launched - free_from);
        }
        let step = self.gather(&segments, launched);
        let sequences = &mut self.sequences;
        self.model.launch(&step, &mut |layer, fence| {
            for segment in &segments {
                if let Some(observer) = sequences.get_mut(&segment.key).and_then(|s| s.observer.as_mut()) {
                    observer.layer_launched(layer, segment.position + segment.rows, fence);
                }
            }
        })?;
        for Segment { key, rows, samples, .. } in &segments {
            self.scheduler.launched(*key, *rows, *samples);
            if let Some(sequence) = self.sequences.get_mut(key) {
                sequence.launched_tokens += usize::from(*samples);
            }
        }
        let decode_rows = segments.iter().filter(|s| s.decode).count();
        let prefill_rows = step.ids.len() - decode_rows;
        Ok(Step { prefill_rows, decode_rows, launched, segments, retired: Vec::new() })
    }

    /// Waits for the oldest step; `false` if there is none. Until then its sequences keep their blocks.
    pub(super) fn finish_oldest(&mut self) -> Result<bool, ModelError> {
        if self.steps.is_empty() {
            return Ok(false);
        }
        let output = self.model.finish()?;
        let Some(step) = self.steps.pop_front() else { return Ok(false) };
        let now = self.shared.clock.now();
        // A step that was launched ahead began when the one before it was done.
        let began = self.finished_at.replace(now).map_or(step.launched, |before| before.max(step.launched));
        self.free_from = self.steps.is_empty().then_some(now);
        self.rates.add(step.prefill_rows, step.decode_rows, now - began);
        self.count(step.prefill_rows, step.decode_rows);
        self.shared.health.alive(now, true);
        step.retired.into_iter().for_each(|retired| self.release(retired));
        // Sequences that came meanwhile may have the prompt that was computed. A stop request is reported again later.
        self.take_in()?;
        let mut sampled = output.sampled.into_iter();
        let mut row = 0;
        for segment in &step.segments {
            if !segment.samples {
                self.scheduler.advance(segment.key, segment.rows, false, now);
                continue;
            }
            let Some(result) = sampled.next().and_then(|slot| slot.rows.into_iter().next()) else {
                return Err(DeviceError::Failed("a step sampled fewer tokens than it was asked for".into()).into());
            };
            let logits = (row < output.logits.rows()).then(|| output.logits.row(row));
            row += 1;
            self.sampled(segment, result, logits)?;
        }
        Ok(true)
    }

    fn count(&self, prefill_rows: usize, decode_rows: usize) {
        let mut load = self.shared.load.lock();
        load.steps = self.shared.health.stepped();
        load.prefill_rows += prefill_rows as u64;
        load.decode_rows += decode_rows as u64;
    }

    fn gather(&mut self, segments: &[Segment], launched: Instant) -> StepInput {
        let mut step = StepInput::default();
        let returns_logits = self.shared.logits.read().is_some();
        let common = common(&self.shared, &self.mask_threads);
        self.slots.tell_left(&mut step.deltas);
        for segment in segments {
            let (Some(sequence), Some(lease)) =
                (self.sequences.get_mut(&segment.key), self.scheduler.lease(segment.key))
            else {
                unreachable!("a planned sequence exists and holds blocks");
            };
            sequence.launched_at.get_or_insert(launched);
            sequence.start_grammar(&common);
            let Segment { key, position, rows, samples, .. } = *segment;
            let slot = self.slots.place(key, lease.tables(), segments, &mut step.deltas, || sequence.join());
            // A token that is not known yet is what a launched step samples.
            let tokens = &sequence.request.tokens;
            let id = |position: usize| tokens.get(position).map_or(RowId::LastSampled, |token| RowId::Token(*token));
            step.ids.extend((position..position + rows).map(id));
            let masks = if samples { sequence.masks(position + rows) } else { Vec::new() };
            step.segments.push(SlotRows { slot, position, rows, samples: usize::from(samples), masks });
            if samples && returns_logits {
                step.logit_rows.push(step.ids.len() - 1);
            }
            if let Some(observer) = &mut sequence.observer {
                if self.shared.has_windows {
                    observer.grown(lease.tables());
                }
                step.observed = 0..self.shared.layers.len() as u32;
            }
        }
        step
    }

    /// The next token of a sequence whose tokens are all computed; `logits` are there if somebody observes them.
    fn sampled(
        &mut self,
        segment: &Segment,
        result: Result<Sampled, SampleError>,
        logits: Option<&[f32]>,
    ) -> Result<(), ModelError> {
        let key = segment.key;
        // It may have ended while this step ran.
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        sequence.launched_tokens -= 1;
        let request = &sequence.request;
        if let (Some(logits), Some(observer), Some(lease)) =
            (logits, &*self.shared.logits.read(), self.scheduler.lease(key))
        {
            observer.computed(&request.id, request.tokens.len(), lease.tables(), logits);
        }
        let failure = sequence.failure().cloned();
        let failure =
            failure.or_else(|| Some(RequestError::new(ErrorKind::Internal, result.as_ref().err()?.to_string())));
        let (Ok(sampled), None) = (result, &failure) else {
            let RequestError { kind, message, .. } = failure.unwrap_or_else(|| unreachable!("it has no token"));
            if kind == ErrorKind::Internal {
                tracing::error!(request = %request.id, "{message}");
            }
            let lease = self.scheduler.remove(key);
            self.end_sequence(key, lease, SequenceEvent::Failed { kind, message });
            return Ok(());
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
