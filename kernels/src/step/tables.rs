//! Steps on whole block tables, for callers that keep no sequences between steps: tests and benchmarks.

use super::{Delta, Join, SlotRows, StepInput, StepSegment};
use baton_types::{BlockTables, TokenId};

/// Makes steps whose segments each join a slot, which the next step leaves. Nothing samples.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableSteps {
    taken: usize,
}

impl TableSteps {
    /// Frees the slots of the step before, for a step that is made otherwise.
    pub fn leave(&mut self) -> Vec<Delta> {
        (0..std::mem::take(&mut self.taken)).map(|slot| Delta::Leave { slot }).collect()
    }

    /// Says that so many slots are taken by a step that was made otherwise: the next step frees them.
    pub fn joined(&mut self, slots: usize) {
        self.taken = slots;
    }

    /// A step of these segments, which come with their tables of the only group; the logits of `logit_rows` come back, and the first `layers`
    /// layers are observed.
    pub fn step(
        &mut self,
        ids: Vec<TokenId>,
        segments: Vec<StepSegment>,
        logit_rows: Vec<usize>,
        layers: u32,
    ) -> StepInput {
        self.step_of_groups(ids, &[segments], logit_rows, layers)
    }

    /// As [`TableSteps::step`], with the same segments for each group.
    ///
    /// # Panics
    /// If there is no group, or one has fewer segments than the first.
    pub fn step_of_groups(
        &mut self,
        ids: Vec<TokenId>,
        groups: &[Vec<StepSegment>],
        logit_rows: Vec<usize>,
        layers: u32,
    ) -> StepInput {
        let mut deltas = self.leave();
        self.joined(groups[0].len());
        let mut rows = Vec::with_capacity(groups[0].len());
        for (slot, StepSegment { position, rows: count, .. }) in groups[0].iter().enumerate() {
            let tables = BlockTables(groups.iter().map(|segments| segments[slot].table.clone()).collect());
            deltas.push(Delta::Join(Box::new(Join { slot, tables, ..Join::default() })));
            rows.push(SlotRows { slot, position: *position, rows: *count, ..SlotRows::default() });
        }
        StepInput {
            deltas,
            ids: ids.into_iter().map(Into::into).collect(),
            segments: rows,
            logit_rows,
            observed: 0..layers,
        }
    }
}
