//! Proposed tokens: which sequences have some, and how many rows a step spends on them.

use super::Runner;
use super::sequence::Sequence;
use crate::scheduler::{Decisions, Segment};
use crate::speculation::Speculation;
use crate::step_model::StepModel;

impl Sequence {
    /// The last of its tokens was just sampled, and it goes on.
    pub(super) fn note(&mut self, speculation: &mut Speculation, len_max: usize) {
        if !self.may_speculate() {
            return;
        }
        let len_max = len_max.min(self.request.prompt_len + self.request.sampling.max_tokens as usize);
        let drafter = self.drafter.get_or_insert_with(|| speculation.drafter(len_max));
        speculation.sampled(drafter, &self.request.tokens);
    }

    /// The masks of a grammar follow from the tokens before, which proposals are not; an observed sequence ends with its first token.
    fn may_speculate(&self) -> bool {
        self.request.sampling.grammar.is_none() && self.observer.is_none()
    }

    /// The chances that its first proposals are all accepted, as many as it may have: the tokens that they and the row before them sample
    /// fit into its length and its sink, and either all or none come before its `min_tokens`, as only all or no rows of a step have masks.
    fn chances(&self, drafts_max: usize, len_max: usize) -> Vec<f32> {
        let Some(drafter) = &self.drafter else { return Vec::new() };
        let (len, unknown) = (self.request.tokens.len() + self.launched_tokens, self.launched_tokens);
        let sampling = &self.request.sampling;
        let answer = len - self.request.prompt_len;
        let mut tokens = (sampling.max_tokens as usize).saturating_sub(answer).min(len_max.saturating_sub(len));
        let min_tokens = sampling.min_tokens as usize;
        if answer < min_tokens {
            tokens = tokens.min(min_tokens - answer);
        }
        let mut chances = drafter.chances(unknown, drafts_max.min(tokens.saturating_sub(1)));
        // A sink that is not read fills up; the end needs room too.
        while !chances.is_empty() && !self.sink.has_room(2 + unknown + chances.len()) {
            chances.pop();
        }
        chances
    }

    /// Makes so many proposals.
    pub(super) fn draft(&mut self, count: usize) {
        self.drafts = match &self.drafter {
            Some(drafter) if count > 0 => drafter.draft(&self.request.tokens, count),
            _ => Vec::new(),
        };
    }
}

impl<M: StepModel> Runner<M> {
    /// Whether the next step is not launched yet, although the device could take it: proposals of a launched step decide what it computes,
    /// or it will have proposals, for which the tokens of the launched one must be known.
    pub(super) fn awaits_tokens(&self) -> bool {
        let Some(launched) = self.steps.back() else { return false };
        let proposes = || {
            let batch = launched.decoding().unwrap_or_default();
            self.shares_of(batch).is_some_and(|drafts| drafts.iter().any(|drafts| *drafts > 0))
        };
        launched.has_drafts() || proposes()
    }

    /// Adds proposals to a plan. A step with prefill has none: its rows are those that others wait for.
    pub(super) fn propose(&mut self, decisions: &mut Decisions) {
        let only_decodes = decisions.batch.iter().all(|segment| segment.decode && segment.samples);
        if !only_decodes || decisions.starved || !self.steps.is_empty() {
            return;
        }
        let Some(drafts) = self.shares_of(&decisions.batch) else { return };
        for (segment, drafts) in decisions.batch.iter_mut().zip(drafts).filter(|(_, drafts)| *drafts > 0) {
            self.scheduler.propose(segment, drafts);
        }
    }

    /// How many proposals each sequence of a batch gets; `None` if there is no speculation.
    fn shares_of(&self, batch: &[Segment]) -> Option<Vec<usize>> {
        let speculation = self.speculation.as_ref()?;
        let len_max = self.shared.len_max();
        let chances = |segment: &Segment| {
            let sequence = self.sequences.get(&segment.key);
            sequence.map(|sequence| sequence.chances(speculation.drafts_max(), len_max)).unwrap_or_default()
        };
        let chances: Vec<_> = batch.iter().map(chances).collect();
        Some(speculation.choose(&chances))
    }
}
