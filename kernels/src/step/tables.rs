//! Steps on whole block tables, for callers that keep no sequences between steps: tests and benchmarks.

use super::{Delta, Join, SlotRows, StepInput, StepSegment};
use baton_types::TokenId;

/// Makes steps whose segments each join a slot, which the next step leaves. Nothing samples.
#[derive(Clone, Copy, Debug, Default)]
pub struct TableSteps {
    taken: usize,
}

impl TableSteps {
    /// A step of these segments; the logits of `logit_rows` come back, and the first `layers` layers are observed.
    pub fn step(
        &mut self,
        ids: Vec<TokenId>,
        segments: Vec<StepSegment>,
        logit_rows: Vec<usize>,
        layers: u32,
    ) -> StepInput {
        let mut deltas: Vec<Delta> = (0..self.taken).map(|slot| Delta::Leave { slot }).collect();
        self.taken = segments.len();
        let mut rows = Vec::with_capacity(segments.len());
        for (slot, StepSegment { position, rows: count, blocks }) in segments.into_iter().enumerate() {
            deltas.push(Delta::Join(Box::new(Join { slot, blocks, ..Join::default() })));
            rows.push(SlotRows { slot, position, rows: count, ..SlotRows::default() });
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
