//! One round: the draft model takes in tokens of some sequences, and continues them greedily, all of them in one batch.

use super::{DraftRunner, Past};
use crate::model::{ModelError, StepInput};
use crate::scheduler::SequenceKey;
use baton_kernels::sampling::TokenSet;
use baton_kernels::step::{Delta, Join, RowId, SlotRows};
use baton_types::{SamplingParams, TokenId};
use std::sync::Arc;

/// What to do for one sequence.
#[derive(Clone, Debug)]
pub(crate) struct Task<'a> {
    pub(crate) key: SequenceKey,
    /// All of its tokens.
    pub(crate) tokens: &'a [TokenId],
    /// How many of those without KV to take in.
    pub(crate) rows: usize,
    /// How many tokens to propose, where all are taken in.
    pub(crate) drafts: usize,
    /// As in [`Join`]: what the sequence itself cannot sample is not proposed either.
    pub(crate) bias: &'a [(TokenId, f32)],
    /// As in [`Join`].
    pub(crate) allowed: Option<Arc<TokenSet>>,
}

/// A step of the draft model.
#[derive(Clone, Copy, Debug)]
pub(crate) struct DraftStep {
    pub(crate) rows: usize,
    /// Whether most of its rows only take in tokens.
    pub(crate) catches_up: bool,
}

/// Computes a step.
type Compute<'a> = &'a mut dyn FnMut() -> Result<(), ModelError>;

impl DraftRunner {
    /// Gets blocks for the next rows and proposals of a sequence. A sequence without room loses those that it has: others may use them.
    pub(crate) fn hold(&mut self, key: SequenceKey, tokens: &[TokenId], rows: usize, drafts: usize) -> bool {
        // The last proposal has no row here.
        let positions = rows + drafts.saturating_sub(1);
        let held = match self.pasts.get_mut(&key) {
            Some(past) => past.continue_with(tokens, positions),
            None => Past::new(&self.pool).is_some_and(|mut past| {
                let held = past.continue_with(tokens, positions);
                self.pasts.insert(key, past);
                held
            }),
        };
        if !held {
            self.leave(key);
        }
        held
    }

    /// Runs the tasks, whose sequences hold their blocks, and returns the proposals of each: as many as it asks for, or fewer where a row has
    /// no token. `step` runs each step, for the caller to measure.
    pub(crate) fn round(
        &mut self,
        tasks: &[Task<'_>],
        step: &mut dyn FnMut(DraftStep, Compute<'_>) -> Result<(), ModelError>,
    ) -> Result<Vec<Vec<TokenId>>, ModelError> {
        let mut proposals = vec![Vec::new(); tasks.len()];
        let mut input = self.first(tasks);
        let mut of_step: Vec<usize> = (0..tasks.len()).collect();
        while !input.ids.is_empty() {
            let sampling = input.segments.iter().filter(|segment| segment.samples > 0).count();
            let told = DraftStep { rows: input.ids.len(), catches_up: input.ids.len() > 2 * sampling };
            let mut output = None;
            step(told, &mut || {
                self.model.launch(&input, &mut |_, _| ())?;
                output = Some(self.model.finish()?);
                Ok(())
            })?;
            let mut sampled = output.into_iter().flat_map(|output| output.sampled);
            let sampled_of = of_step.iter().zip(&input.segments).filter(|(_, segment)| segment.samples > 0);
            for (task, _) in sampled_of {
                let row = sampled.next().and_then(|slot| slot.rows.into_iter().next());
                proposals[*task].extend(row.and_then(Result::ok).map(|row| row.token));
            }
            (input, of_step) = self.next(tasks, &proposals, &of_step);
        }
        Ok(proposals)
    }

    /// The step that takes in tokens. Sequences join anew: what the device counts as their tokens are proposals that may not have come true.
    fn first(&mut self, tasks: &[Task<'_>]) -> StepInput {
        let mut input = StepInput::default();
        input.deltas.extend((0..self.joined).map(|slot| Delta::Leave { slot }));
        self.joined = tasks.len();
        for (slot, task) in tasks.iter().enumerate() {
            let Some(past) = self.pasts.get_mut(&task.key) else { unreachable!("a task's sequence holds blocks") };
            input.deltas.push(Delta::Join(Box::new(Join {
                slot,
                tables: past.lease.tables().clone(),
                tokens: task.tokens.to_vec(),
                prompt_len: task.tokens.len(),
                sampling: SamplingParams { temperature: 0.0, ..SamplingParams::default() },
                bias: task.bias.to_vec(),
                allowed: task.allowed.clone(),
                ..Join::default()
            })));
            let position = past.computed;
            past.computed += task.rows;
            input.ids.extend(task.tokens[position..past.computed].iter().copied().map(RowId::Token));
            let samples = usize::from(task.drafts > 0);
            input.segments.push(SlotRows { slot, position, rows: task.rows, samples, masks: Vec::new() });
        }
        input
    }

    /// The step behind the last proposals, of those sequences that ask for more; and which tasks these are.
    fn next(&mut self, tasks: &[Task<'_>], proposals: &[Vec<TokenId>], of_step: &[usize]) -> (StepInput, Vec<usize>) {
        let depth = of_step.iter().map(|task| proposals[*task].len()).max().unwrap_or(0);
        let continues = |task: &usize| proposals[*task].len() == depth && depth > 0 && depth < tasks[*task].drafts;
        let of_step: Vec<usize> = of_step.iter().copied().filter(continues).collect();
        let mut input = StepInput::default();
        for &task in &of_step {
            let Some(past) = self.pasts.get_mut(&tasks[task].key) else { continue };
            let Some(token) = proposals[task].last() else { continue };
            past.ahead.push(*token);
            input.ids.push(RowId::Token(*token));
            let position = tasks[task].tokens.len() + depth - 1;
            input.segments.push(SlotRows { slot: task, position, rows: 1, samples: 1, masks: Vec::new() });
        }
        (input, of_step)
    }
}
