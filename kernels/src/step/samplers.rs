//! What sampling needs of each slot: the operation `Sample` of devices that compute on the host, and of models in tests.

use super::{Delta, Join, LateMask, Logits, RowId, SlotOutput, StepInput, StepOutput};
use crate::sampling::{Constraints, Draw, History, SampleError, Sampled, TokenSet, Words};
use baton_types::{SamplingParams, TokenId};
use std::sync::{Arc, OnceLock};

/// How a device samples: rows of several slots at once.
pub trait RowSampler: Sync {
    /// Samples from `logits`, `[vocab]`, with the bits of [`Draw::sample`].
    fn sample(&self, draw: &Draw<'_>, logits: &[f32]) -> Result<Sampled, SampleError>;

    /// Calls `task(i)` for every `i < tasks`, each once, in any order and on any thread.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// The reference, one row after another.
struct OneByOne;

impl RowSampler for OneByOne {
    fn sample(&self, draw: &Draw<'_>, logits: &[f32]) -> Result<Sampled, SampleError> {
        draw.sample(logits)
    }

    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }
}

/// One sequence.
#[derive(Clone, Debug)]
struct Sampler {
    params: SamplingParams,
    sample_index: u32,
    bias: Vec<(TokenId, f32)>,
    allowed: Option<Arc<TokenSet>>,
    /// Empty where there are no penalties.
    history: History,
    words: Words,
    last: TokenId,
    /// Why a row yielded no token. The sequence goes no further: a row launched behind it has computed another one.
    failed: Option<SampleError>,
}

impl From<&Join> for Sampler {
    fn from(join: &Join) -> Self {
        let params = join.sampling.clone();
        let history = if History::is_needed(&params) {
            let mut history = History::rebuild(&join.tokens, join.prompt_len);
            history.reserve(params.max_tokens as usize);
            history
        } else {
            History::default()
        };
        let words = Words::rebuild(&params.bad_words, &join.tokens[join.prompt_len.min(join.tokens.len())..]);
        Self {
            params,
            words,
            sample_index: join.sample_index,
            bias: join.bias.clone(),
            allowed: join.allowed.clone(),
            history,
            last: join.tokens.last().copied().unwrap_or(0),
            failed: None,
        }
    }
}

impl Sampler {
    /// Samples the token after `position`, unless a row before had none.
    fn sample(
        &self,
        rows: &dyn RowSampler,
        position: usize,
        logits: &[f32],
        mask: Option<&LateMask>,
    ) -> Result<Sampled, SampleError> {
        self.failed.map_or(Ok(()), Err)?;
        let late = mask.map(LateMask::wait).transpose()?;
        let barred: Vec<TokenId> = self.words.barred(&self.params.bad_words).collect();
        let draw = Draw {
            params: &self.params,
            history: &self.history,
            position: position as u64 + 1,
            sample_index: self.sample_index,
            constraints: Constraints {
                bias: &self.bias,
                allowed: [self.allowed.as_deref(), late.as_deref()],
                barred: &barred,
            },
        };
        rows.sample(&draw, logits)
    }

    /// Notes what was sampled. Returns the token.
    fn note(&mut self, row: &Result<Sampled, SampleError>) -> Option<TokenId> {
        match row {
            Ok(Sampled { token, .. }) => {
                if History::is_needed(&self.params) {
                    self.history.push(*token);
                }
                self.words.push(*token);
                self.last = *token;
                Some(*token)
            }
            Err(error) => {
                self.failed = Some(*error);
                None
            }
        }
    }
}

/// A segment whose next row samples.
#[derive(Clone, Copy, Debug)]
struct Pending {
    /// Index of the segment in the step, and of its output.
    segment: usize,
    output: usize,
    /// Of the first row that samples: among the logits, and in the step.
    logits: usize,
    row: usize,
}

/// The samplers of all slots. Its steps have been checked by a [`SlotTable`](super::SlotTable); they are computed in order.
#[derive(Clone, Debug)]
pub struct SlotSamplers {
    slots: Vec<Option<Sampler>>,
    vocab: usize,
    pending: Vec<Pending>,
    /// What each pending row sampled.
    sampled: Vec<OnceLock<Result<Sampled, SampleError>>>,
}

impl SlotSamplers {
    /// Without sequences.
    pub fn new(slots_max: usize, vocab: usize) -> Self {
        Self {
            slots: vec![None; slots_max],
            vocab,
            pending: Vec::with_capacity(slots_max),
            sampled: vec![OnceLock::new(); slots_max],
        }
    }

    /// Begins a step: sequences join and leave. Sets `ids` to the token of each row.
    ///
    /// # Panics
    /// If the step names a slot that is not there.
    pub fn begin(&mut self, step: &StepInput, ids: &mut Vec<TokenId>) {
        for delta in &step.deltas {
            match delta {
                Delta::Join(join) => self.slots[join.slot] = Some(Sampler::from(&**join)),
                Delta::Leave { slot } => self.slots[*slot] = None,
                Delta::Blocks { .. } => {}
            }
        }
        let slots = step.segments.iter().flat_map(|segment| std::iter::repeat_n(segment.slot, segment.rows));
        let token = |(id, slot): (&RowId, usize)| match id {
            RowId::Token(token) => *token,
            RowId::LastSampled => self.slots[slot].as_ref().map_or(0, |sampler| sampler.last),
        };
        ids.clear();
        ids.extend(step.ids.iter().zip(slots).map(token));
    }

    /// Ends a step: samples from the logits of [`StepInput::selected_rows`], `[rows, vocab]`.
    ///
    /// # Panics
    /// If there are fewer logits.
    pub fn sample(&mut self, step: &StepInput, logits: &[f32]) -> StepOutput {
        self.sample_by(&OneByOne, step, logits)
    }

    /// [`SlotSamplers::sample`] by `rows`: first the first sampling row of every slot, then the row behind each accepted draft.
    pub fn sample_by(&mut self, rows: &dyn RowSampler, step: &StepInput, logits: &[f32]) -> StepOutput {
        let logits_of = |at: usize| &logits[at * self.vocab..(at + 1) * self.vocab];
        let mut outputs = Vec::with_capacity(step.segments.len());
        self.pending.clear();
        // A step before may have ended in a panic.
        self.sampled.iter_mut().for_each(|sampled| _ = sampled.take());
        let (mut at, mut end) = (0, 0);
        for (index, segment) in step.segments.iter().enumerate() {
            end += segment.rows;
            if segment.samples > 0 && self.slots[segment.slot].is_some() {
                let row = end - segment.samples;
                self.pending.push(Pending { segment: index, output: outputs.len(), logits: at, row });
                let rows = Vec::with_capacity(segment.samples);
                outputs.push(SlotOutput { slot: segment.slot, rows, accepted: 0 });
            }
            at += segment.samples;
        }
        for draft in 0.. {
            if self.pending.is_empty() {
                break;
            }
            let (slots, pending, sampled) = (&self.slots, &self.pending, &self.sampled);
            rows.run(pending.len(), &|task| {
                let (of, segment) = (pending[task], &step.segments[pending[task].segment]);
                let Some(sampler) = &slots[segment.slot] else { return };
                let position = segment.position + segment.rows - segment.samples + draft;
                let row = sampler.sample(rows, position, logits_of(of.logits + draft), segment.masks.get(draft));
                sampled[task].set(row).unwrap_or_else(|_| unreachable!("each task runs once"));
            });
            let mut sampled = self.sampled.iter_mut();
            self.pending.retain(|of| {
                let segment = &step.segments[of.segment];
                let sampler = self.slots[segment.slot].as_mut();
                let (Some(row), Some(sampler)) = (sampled.next().and_then(OnceLock::take), sampler) else {
                    unreachable!("each task runs once, for a slot that is taken");
                };
                let token = sampler.note(&row);
                let output = &mut outputs[of.output];
                output.rows.push(row);
                let drafted = step.ids[..of.row + segment.samples].get(of.row + draft + 1);
                let accepted = token.is_some() && drafted.copied() == token.map(RowId::Token);
                output.accepted += usize::from(accepted);
                accepted
            });
        }
        let mut requested = Vec::with_capacity(step.logit_rows.len() * self.vocab);
        if !step.logit_rows.is_empty() {
            let selected = step.selected_rows();
            for wanted in &step.logit_rows {
                let at = selected.iter().position(|selected| selected == wanted);
                requested
                    .extend_from_slice(logits_of(at.unwrap_or_else(|| unreachable!("requested rows are selected"))));
            }
        }
        StepOutput { sampled: outputs, logits: Logits::new(self.vocab, requested) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::SlotRows;

    /// The tokens that a sequence generates where 3 is the likeliest token, then 2, then 1. Each step proposes `drafts`.
    fn generated(words: &[&[TokenId]], answer: &[TokenId], drafts: &[TokenId]) -> Vec<TokenId> {
        let bad_words = words.iter().map(|word| word.to_vec()).collect();
        let mut samplers = SlotSamplers::new(1, 4);
        let mut tokens = [&[3, 3], answer].concat();
        let sampling = SamplingParams { bad_words, ..SamplingParams::default() };
        let join = Join { tokens: tokens.clone(), prompt_len: 2, sampling, ..Join::default() };
        let mut deltas = vec![Delta::Join(Box::new(join))];
        while tokens.len() < 12 {
            let rows = 1 + drafts.len();
            let ids = tokens.last().into_iter().chain(drafts).map(|token| RowId::Token(*token)).collect();
            let segment = SlotRows { slot: 0, position: tokens.len() - 1, rows, samples: rows, masks: Vec::new() };
            let deltas = std::mem::take(&mut deltas);
            let step = StepInput { deltas, ids, segments: vec![segment], ..StepInput::default() };
            samplers.begin(&step, &mut Vec::new());
            let output = samplers.sample(&step, &[0.0, 1.0, 2.0, 3.0].repeat(rows));
            tokens.extend(output.sampled[0].rows.iter().map(|row| row.as_ref().unwrap().token));
        }
        tokens[2..12].to_vec()
    }

    #[test]
    fn words_are_barred_in_answers_only_and_across_drafts_and_replays() {
        let whole = [3, 2, 3, 2, 3, 2, 3, 2, 3, 2];
        for drafts in [&[][..], &[2], &[2, 3], &[3, 3, 3]] {
            assert_eq!(generated(&[], &[], drafts), [3; 10]);
            assert_eq!(generated(&[&[3]], &[], drafts), [2; 10]);
            // The prompt ends in 3, and is no part of the answer.
            assert_eq!(generated(&[&[3, 3]], &[], drafts), whole);
            assert_eq!(generated(&[&[3, 3]], &whole[..3], drafts), whole, "a replay goes on with the same tokens");
            assert_eq!(generated(&[&[3, 3], &[3, 2]], &[], drafts), [3, 1, 3, 1, 3, 1, 3, 1, 3, 1]);
            assert_eq!(generated(&[&[3, 3, 3]], &[], drafts), [3, 3, 2, 3, 3, 2, 3, 3, 2, 3]);
        }
    }
}
