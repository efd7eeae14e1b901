//! One step: collect the batch, launch it, and once it is done send what it sampled.

use super::Runner;
use crate::api::{PrefillObserver, SequenceEvent};
use crate::model::{ModelError, StepInput};
use crate::scheduler::{Rest, Segment, SequenceKey};
use crate::speculation::Proposer;
use crate::step_model::StepModel;
use baton_kernels::device::DeviceError;
use baton_kernels::sampling::{SampleError, Sampled, prompt_logprob};
use baton_kernels::step::{Logits, RowId, SlotOutput, SlotRows};
use baton_kv_cache::{Lease, PrefixHash};
use baton_types::{ErrorKind, FinishReason, PromptLogprobs, seeded};
use std::time::{Duration, Instant};

/// A step that was launched and is not finished.
pub(super) struct Step {
    segments: Vec<Segment>,
    prefill_rows: usize,
    decode_rows: usize,
    launched: Instant,
    /// When the device had nothing else to do: at the launch, or at the end of the step before.
    from: Instant,
    /// Sequences whose proposals are of the draft model.
    drafted: Vec<SequenceKey>,
    /// How long the draft model took before the launch.
    drafting: Duration,
    /// What ended sequences leave behind; this step is the last that uses their blocks.
    pub(super) retired: Vec<Retired>,
}

impl Step {
    /// Whether it computes rows of a sequence.
    pub(super) fn has(&self, key: SequenceKey) -> bool {
        self.segments.iter().any(|segment| segment.key == key)
    }

    /// Whether it has rows of proposed tokens: which of them it samples is not known before its end.
    pub(super) fn has_drafts(&self) -> bool {
        self.segments.iter().any(|segment| segment.drafts > 0)
    }

    /// Its sequences, if all its rows are decode rows.
    pub(super) fn decoding(&self) -> Option<&[Segment]> {
        self.segments.iter().all(|segment| segment.decode).then_some(&self.segments)
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
        let free_from = self.free_from.take();
        if let Some(free_from) = free_from {
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
        for segment in &segments {
            let tokens = segment.tokens_max();
            self.scheduler.launched(segment.key, segment.rows, tokens);
            if let Some(sequence) = self.sequences.get_mut(&segment.key) {
                sequence.launched_tokens += tokens;
                sequence.launched_scores += usize::from(segment.scored > 0);
            }
        }
        let decode_rows = segments.iter().filter(|s| s.decode).map(|s| s.rows).sum();
        let prefill_rows = step.ids.len() - decode_rows;
        let from = free_from.unwrap_or(launched);
        let is_drafted = |segment: &&Segment| {
            let sequence = self.sequences.get(&segment.key);
            segment.drafts > 0 && sequence.is_some_and(|sequence| sequence.proposer == Proposer::Draft)
        };
        let drafted = segments.iter().filter(is_drafted).map(|segment| segment.key).collect();
        let drafting = std::mem::take(&mut self.drafting);
        Ok(Step { prefill_rows, decode_rows, launched, from, drafted, drafting, segments, retired: Vec::new() })
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
        let before = self.finished_at.replace(now);
        let began = before.map_or(step.launched, |before| before.max(step.launched));
        self.free_from = self.steps.is_empty().then_some(now);
        let sampled = step.segments.iter().filter(|segment| segment.samples).zip(&output.sampled);
        let mut accepted = 0;
        for (segment, slot) in sampled.filter(|(segment, _)| segment.drafts > 0) {
            let taken = self.taken(segment.key, slot);
            accepted += taken;
            let is_drafted = step.drafted.contains(&segment.key);
            let proposer = if is_drafted { Proposer::Draft } else { Proposer::Ngrams };
            if let Some(speculation) = &mut self.speculation {
                speculation.count(proposer, segment.drafts, taken);
            }
            if is_drafted {
                self.note_drafted(segment, slot);
            }
        }
        if let (Some(speculation), 0) = (&mut self.speculation, step.prefill_rows) {
            let free_from = before.map_or(step.from, |before| before.max(step.from));
            speculation.took(step.decode_rows, now.saturating_duration_since(free_from));
        }
        let decoding = step.segments.iter().filter(|segment| segment.decode && segment.samples).count();
        self.rates.add(step.prefill_rows, decoding, decoding + accepted, now - began + step.drafting);
        self.count(step.prefill_rows, decoding + accepted);
        self.shared.health.alive(now, true);
        step.retired.into_iter().for_each(|retired| self.release(retired));
        // Sequences that came meanwhile may have the prompt that was computed. A stop request is reported again later.
        self.take_in()?;
        let mut sampled = output.sampled.into_iter();
        // Logits of prompts come first.
        let mut scored = 0;
        let mut row: usize = step.segments.iter().map(|segment| segment.scored).sum();
        for segment in &step.segments {
            if segment.scored > 0 {
                self.score(segment, &output.logits, scored)?;
                scored += segment.scored;
            }
            if !segment.samples {
                self.scheduler.advance(segment.key, segment.rows, false, Rest::Nothing, now);
                continue;
            }
            let as_asked = |slot: &SlotOutput| slot.accepted <= segment.drafts && slot.rows.len() == 1 + slot.accepted;
            let Some(slot) = sampled.next().filter(as_asked) else {
                return Err(DeviceError::Failed("a step sampled other tokens than it was asked for".into()).into());
            };
            let logits = |at: usize| (at < output.logits.rows()).then(|| output.logits.row(at));
            let rejected = segment.drafts - slot.accepted;
            // Behind a proposal that was accepted comes the next row of the same sequence, as in a step of its own.
            let rows = segment.rows - segment.drafts;
            let last = slot.rows.len() - 1;
            for (at, mut result) in slot.rows.into_iter().enumerate() {
                let rest = match rejected {
                    0 if at == last => Rest::Nothing,
                    0 => Rest::Accepted,
                    _ => Rest::Rejected,
                };
                if seeded!(RejectedTaken) && at == slot.accepted {
                    self.take_rejected(segment.key, at, &mut result);
                }
                let rows = if at == 0 { rows } else { 1 };
                self.sampled(segment.key, rows, rest, result, logits(row + at))?;
            }
            self.reject(segment.key, rejected, now);
            row += segment.tokens_max();
        }
        Ok(true)
    }

    /// Proposals that become tokens of a sequence: those that were sampled, but for those behind its end.
    fn taken(&self, key: SequenceKey, slot: &SlotOutput) -> usize {
        let Some(sequence) = self.sequences.get(&key) else { return 0 };
        let (sampling, end_tokens) = (&sequence.request.sampling, &self.shared.config.end_tokens);
        let ends =
            |row: &Result<Sampled, SampleError>| row.as_ref().is_ok_and(|s| sampling.is_end(s.token, end_tokens));
        slot.rows.iter().position(ends).unwrap_or(slot.accepted).min(slot.accepted)
    }

    /// The defect: in place of what was sampled, the proposal.
    fn take_rejected(&self, key: SequenceKey, at: usize, result: &mut Result<Sampled, SampleError>) {
        let proposal = self.sequences.get(&key).and_then(|sequence| sequence.drafts.get(at));
        if let (Some(proposal), Ok(sampled)) = (proposal, result) {
            sampled.token = *proposal;
        }
    }

    /// So many proposals of a sequence were not sampled.
    fn reject(&mut self, key: SequenceKey, drafts: usize, now: Instant) {
        if let Some(sequence) = self.sequences.get_mut(&key) {
            sequence.launched_tokens -= drafts;
            sequence.drafts.clear();
        }
        self.scheduler.rejected(key, drafts, now);
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
        self.slots.tell_left(&mut step.deltas);
        let mut observed = Vec::new();
        for segment in segments {
            let (Some(sequence), Some(lease)) =
                (self.sequences.get_mut(&segment.key), self.scheduler.lease(segment.key))
            else {
                unreachable!("a planned sequence exists and holds blocks");
            };
            sequence.launched_at.get_or_insert(launched);
            let Segment { key, position, rows, samples, drafts, .. } = *segment;
            debug_assert_eq!(sequence.drafts.len(), drafts, "each proposal has a row");
            let slot = self.slots.place(key, lease.tables(), segments, &mut step.deltas, || sequence.join());
            // A token that is not known yet is what a launched step samples.
            let tokens = &sequence.request.tokens;
            let id = |position: usize| tokens.get(position).map_or(RowId::LastSampled, |token| RowId::Token(*token));
            step.ids.extend((position..position + rows - drafts).map(id));
            step.ids.extend(sequence.drafts.iter().map(|token| RowId::Token(*token)));
            let samples = if samples { 1 + drafts } else { 0 };
            let masks = (position + rows - samples..position + rows).flat_map(|row| sequence.mask(row + 1)).collect();
            step.segments.push(SlotRows { slot, position, rows, samples, masks });
            let scored_first = step.ids.len() - rows + segment.scored_from - position;
            step.logit_rows.extend(scored_first..scored_first + segment.scored);
            if returns_logits {
                observed.extend(step.ids.len() - samples..step.ids.len());
            }
            if let Some(observer) = &mut sequence.observer {
                if self.shared.exchanges_blocks {
                    observer.grown(&lease.tables_behind(position + rows));
                }
                step.observed = 0..self.shared.layers.len() as u32;
            }
        }
        step.logit_rows.extend(observed);
        step
    }

    /// Reports log-probabilities of a prompt, from the logits of a segment's rows, the first of which is the row `first` of `logits`.
    fn score(&mut self, segment: &Segment, logits: &Logits, first: usize) -> Result<(), ModelError> {
        // It may have ended while this step ran.
        let Some(sequence) = self.sequences.get_mut(&segment.key) else { return Ok(()) };
        sequence.launched_scores -= 1;
        if logits.rows() < first + segment.scored {
            return Err(DeviceError::Failed("a step returned other logits than it was asked for".into()).into());
        }
        let request = &sequence.request;
        let top = request.sampling.prompt_logprobs.unwrap_or(0) as usize;
        let next = segment.scored_from + 1;
        let tokens = request.tokens[next..next + segment.scored].iter().enumerate();
        let tokens = tokens.map(|(at, token)| prompt_logprob(logits.row(first + at), *token, top));
        match tokens.collect::<Result<_, _>>() {
            Ok(tokens) => sequence.tell(SequenceEvent::Prompt(PromptLogprobs { first: next as u32, tokens })),
            Err(error) => self.fail(segment.key, &error),
        }
        Ok(())
    }

    /// The next token of a sequence whose tokens are all computed, the last `rows` of them by the finished step; `logits` are there if
    /// somebody observes them.
    fn sampled(
        &mut self,
        key: SequenceKey,
        rows: usize,
        rest: Rest,
        result: Result<Sampled, SampleError>,
        logits: Option<&[f32]>,
    ) -> Result<(), ModelError> {
        // It may have ended while this step ran, or with a token before.
        let Some(sequence) = self.sequences.get_mut(&key) else { return Ok(()) };
        sequence.launched_tokens -= 1;
        let request = &sequence.request;
        if let (Some(logits), Some(observer), Some(lease)) =
            (logits, &*self.shared.logits.read(), self.scheduler.lease(key))
        {
            observer.computed(&request.id, request.tokens.len(), &lease.tables_behind(request.tokens.len()), logits);
        }
        if sequence.failure().is_some() {
            // It ends before the next step is planned.
            return Ok(());
        }
        let sampled = match result {
            Ok(sampled) => sampled,
            Err(error) => {
                self.fail(key, &error);
                return Ok(());
            }
        };
        let given = request.tokens.len();
        let finish = sequence.push(sampled.token, &self.shared.config.end_tokens, self.shared.len_max());
        self.generated_tokens += 1;
        let at = self.shared.clock.now();
        // The step's KV stays valid, whatever happens to the token.
        self.scheduler.advance(key, rows, true, rest, at);
        if let Some(hash) = sequence.next_hash() {
            self.scheduler.hashed(key, hash);
        }
        if let Some(speculation) = self.speculation.as_mut().filter(|_| finish.is_none()) {
            sequence.note(speculation, self.shared.len_max());
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

    /// A row of it could not be sampled.
    fn fail(&mut self, key: SequenceKey, error: &SampleError) {
        let message = error.to_string();
        let kind = match error {
            // Its parameters say so, whoever computes it.
            SampleError::NothingAllowed => ErrorKind::InvalidRequest,
            SampleError::NotFinite { .. } | SampleError::Empty | SampleError::MaskLate => ErrorKind::Internal,
        };
        if let Some(sequence) = self.sequences.get(&key).filter(|_| kind == ErrorKind::Internal) {
            tracing::error!(request = %sequence.request.id, "{message}");
        }
        let lease = self.scheduler.remove(key);
        self.end_sequence(key, lease, SequenceEvent::Failed { kind, message });
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
