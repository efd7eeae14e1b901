//! What sampling needs of each slot: the operation `Sample` of devices that compute on the host, and of models in tests.

use super::{Delta, Join, LateMask, Logits, RowId, SlotOutput, StepInput, StepOutput};
use crate::sampling::{Constraints, Draw, History, SampleError, Sampled, TokenSet};
use baton_types::{SamplingParams, TokenId};
use std::sync::Arc;

/// One sequence.
#[derive(Clone, Debug)]
struct Sampler {
    params: SamplingParams,
    sample_index: u32,
    bias: Vec<(TokenId, f32)>,
    allowed: Option<Arc<TokenSet>>,
    history: History,
    last: TokenId,
}

impl From<&Join> for Sampler {
    fn from(join: &Join) -> Self {
        Self {
            params: join.sampling.clone(),
            sample_index: join.sample_index,
            bias: join.bias.clone(),
            allowed: join.allowed.clone(),
            history: History::rebuild(&join.tokens, join.prompt_len),
            last: join.tokens.last().copied().unwrap_or(0),
        }
    }
}

impl Sampler {
    /// Samples the token after `position`.
    fn sample(&mut self, position: usize, logits: &[f32], mask: Option<&LateMask>) -> Result<Sampled, SampleError> {
        let late = mask.map(LateMask::wait).transpose()?;
        let draw = Draw {
            params: &self.params,
            history: &self.history,
            position: position as u64 + 1,
            sample_index: self.sample_index,
            constraints: Constraints { bias: &self.bias, allowed: [self.allowed.as_deref(), late.as_deref()] },
        };
        let sampled = draw.sample(logits)?;
        self.history.push(sampled.token);
        self.last = sampled.token;
        Ok(sampled)
    }
}

/// The samplers of all slots. Its steps have been checked by a [`SlotTable`](super::SlotTable); they are computed in order.
#[derive(Clone, Debug)]
pub struct SlotSamplers {
    slots: Vec<Option<Sampler>>,
    vocab: usize,
}

impl SlotSamplers {
    /// Without sequences.
    pub fn new(slots_max: usize, vocab: usize) -> Self {
        Self { slots: vec![None; slots_max], vocab }
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
        let row = |at: usize| &logits[at * self.vocab..(at + 1) * self.vocab];
        let (mut at, mut end, mut sampled) = (0, 0, Vec::new());
        for segment in &step.segments {
            end += segment.rows;
            let first = end - segment.samples;
            let Some(sampler) = self.slots[segment.slot].as_mut().filter(|_| segment.samples > 0) else { continue };
            let mut output = SlotOutput { slot: segment.slot, rows: Vec::new(), accepted: 0 };
            for index in 0..segment.samples {
                let position = segment.position + segment.rows - segment.samples + index;
                let result = sampler.sample(position, row(at + index), segment.masks.get(index));
                let token = result.as_ref().ok().map(|sampled| RowId::Token(sampled.token));
                output.rows.push(result);
                if token.is_none() || step.ids[first..end].get(index + 1).copied() != token {
                    break;
                }
                output.accepted += 1;
            }
            at += segment.samples;
            sampled.push(output);
        }
        let mut requested = Vec::with_capacity(step.logit_rows.len() * self.vocab);
        if !step.logit_rows.is_empty() {
            let selected = step.selected_rows();
            for wanted in &step.logit_rows {
                let at = selected.iter().position(|selected| selected == wanted);
                requested.extend_from_slice(row(at.unwrap_or_else(|| unreachable!("requested rows are selected"))));
            }
        }
        StepOutput { sampled, logits: Logits::new(self.vocab, requested) }
    }
}
