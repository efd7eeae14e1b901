//! Proposals of the draft model, which runs between two steps of the model.

use super::Runner;
use super::sequence::Sequence;
use crate::draft_model::Task;
use crate::model::ModelError;
use crate::scheduler::{Segment, SequenceKey};
use crate::speculation::{Choice, Proposer};
use crate::step_model::StepModel;
use baton_kernels::step::SlotOutput;
use std::time::Duration;

/// A sequence of a batch for which the draft model has something to do.
#[derive(Clone, Copy)]
struct Drafted {
    /// Index in the batch.
    at: usize,
    /// Tokens to take in.
    rows: usize,
    /// Tokens to propose.
    drafts: usize,
}

impl Sequence {
    fn task(&self, key: SequenceKey, rows: usize, drafts: usize) -> Task<'_> {
        let (bias, allowed) = (&self.request.sampling.logit_bias, self.allowed().cloned());
        Task { key, tokens: &self.request.tokens, rows, drafts, bias, allowed }
    }
}

impl<M: StepModel> Runner<M> {
    /// Has the draft model propose what was chosen. Those that it still has to take in more of than one chunk have no proposals yet.
    pub(super) fn draft(&mut self, batch: &mut [Segment], choice: &Choice) {
        let drafted = self.hold_drafts(batch, choice);
        if drafted.is_empty() {
            return;
        }
        let proposals = self.draft_round(batch, &drafted, choice.is_probe).unwrap_or_else(|error| {
            tracing::error!("{error}: the draft model failed and proposes nothing from now on; restart this worker");
            self.draft = None;
            vec![Vec::new(); drafted.len()]
        });
        for (Drafted { at, drafts, .. }, proposals) in drafted.into_iter().zip(proposals) {
            let segment = &mut batch[at];
            let missing = drafts - proposals.len();
            segment.rows -= missing;
            segment.drafts -= missing;
            if missing > 0 {
                self.scheduler.withdrawn(segment.key);
            }
            if let Some(sequence) = self.sequences.get_mut(&segment.key) {
                (sequence.drafts, sequence.proposer) = (proposals, Proposer::Draft);
            }
        }
    }

    /// Gets blocks in both pools, and rows of one chunk of the draft model: first for sequences that lack least.
    fn hold_drafts(&mut self, batch: &mut [Segment], choice: &Choice) -> Vec<Drafted> {
        let Some(draft) = &mut self.draft else { return Vec::new() };
        let shares = choice.shares.iter().enumerate();
        let chosen = shares.filter(|(_, share)| share.proposer == Proposer::Draft && share.count > 0);
        let mut chosen: Vec<_> = chosen
            .filter_map(|(at, share)| {
                let tokens = &self.sequences.get(&batch[at].key)?.request.tokens;
                Some((draft.behind(batch[at].key, tokens), at, share.count, tokens))
            })
            .collect();
        chosen.sort_by_key(|(behind, ..)| *behind);
        let mut room = draft.chunk();
        let mut drafted = Vec::new();
        for (behind, at, count, tokens) in chosen {
            let segment = &mut batch[at];
            let rows = behind.min(room);
            let count = if rows == behind { count } else { 0 };
            if rows == 0 || !draft.hold(segment.key, tokens, rows, count) {
                continue;
            }
            if count > 0 {
                self.scheduler.propose(segment, count);
                if segment.drafts == 0 {
                    continue;
                }
            }
            room -= rows;
            drafted.push(Drafted { at, rows, drafts: segment.drafts });
        }
        drafted
    }

    fn draft_round(
        &mut self,
        batch: &[Segment],
        drafted: &[Drafted],
        is_probe: bool,
    ) -> Result<Vec<Vec<u32>>, ModelError> {
        let (Some(draft), Some(speculation)) = (&mut self.draft, &mut self.speculation) else {
            return Ok(vec![Vec::new(); drafted.len()]);
        };
        let sequences = &self.sequences;
        let tasks = drafted.iter().map(|Drafted { at, rows, drafts }| {
            let key = batch[*at].key;
            sequences[&key].task(key, *rows, *drafts)
        });
        let tasks: Vec<_> = tasks.collect();
        let (clock, health) = (&self.shared.clock, &self.shared.health);
        let mut total = Duration::ZERO;
        let proposals = draft.round(&tasks, &mut |step, run| {
            let from = clock.now();
            health.alive(from, true);
            run()?;
            let elapsed = clock.now().saturating_duration_since(from);
            speculation.draft_took(step.rows, step.catches_up, is_probe, elapsed);
            total += elapsed;
            Ok(())
        });
        // The device was not idle meanwhile.
        self.free_from = self.free_from.map(|from| from + total);
        self.drafting += total;
        proposals
    }

    /// A sequence ended or lost its blocks.
    pub(super) fn leave_draft(&mut self, key: SequenceKey) {
        if let Some(draft) = &mut self.draft {
            draft.leave(key);
        }
    }

    /// How many proposals of the draft model a finished step accepted: the odds of its sequence.
    pub(super) fn note_drafted(&mut self, segment: &Segment, slot: &SlotOutput) {
        let sequence = self.sequences.get_mut(&segment.key).and_then(|sequence| sequence.drafter.as_mut());
        if let (Some(drafter), Some(speculation)) = (sequence, &mut self.speculation) {
            speculation.drafted(drafter, segment.drafts, slot.accepted.min(segment.drafts));
        }
    }
}
