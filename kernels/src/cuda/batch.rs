//! The rows of a step in the order in which the device computes them.
//!
//! A segment of one row is decoded: attention divides it by splits. Longer segments are cut into tiles of prefill attention. The rows of the
//! first kind come first, whatever their order in the step, so that one kernel covers each kind. No result depends on the order of rows.

use crate::numerics::ATTENTION_SPLIT;
use crate::step::{RowId, SlotRows, StepInput};

/// The slot of a row that only fills a bucket.
const PADDING: i32 = -1;

/// The id of a row whose token its slot sampled last.
const LAST_SAMPLED: i32 = -1;

/// Rows of a step, padded to the number that is computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Batch {
    /// Token of each row.
    pub(super) ids: Vec<i32>,
    pub(super) slots: Vec<i32>,
    pub(super) positions: Vec<i32>,
    /// How many rows, from the first on, are decoded.
    pub(super) decoded: usize,
    /// Longer segments: slot, first row, rows, position of the first row.
    pub(super) prefilled: Vec<[i32; 4]>,
    /// The selected rows, and their slots and positions.
    pub(super) chosen: Vec<i32>,
    pub(super) chosen_slots: Vec<i32>,
    pub(super) chosen_positions: Vec<i32>,
    /// Where each row of the step is.
    places: Vec<usize>,
}

impl Batch {
    /// Orders the rows of a checked step, of which `selected` go on to the head.
    pub(super) fn fill(&mut self, step: &StepInput, selected: &[usize]) {
        let Self { ids, slots, positions, prefilled, chosen, chosen_slots, chosen_positions, places, .. } = self;
        for cleared in [&mut *ids, slots, positions, chosen, chosen_slots, chosen_positions] {
            cleared.clear();
        }
        prefilled.clear();
        places.clear();
        places.resize(step.ids.len(), 0);
        self.decoded = step.segments.iter().filter(|segment| segment.rows == 1).count();
        for decoded in [true, false] {
            let mut first = 0;
            for segment in &step.segments {
                let rows = first..first + segment.rows;
                first = rows.end;
                if (segment.rows == 1) != decoded {
                    continue;
                }
                if !decoded {
                    prefilled.push([segment.slot, ids.len(), segment.rows, segment.position].map(|x| x as i32));
                }
                for (row, position) in rows.zip(segment.position..) {
                    places[row] = ids.len();
                    ids.push(match step.ids[row] {
                        RowId::Token(token) => token as i32,
                        RowId::LastSampled => LAST_SAMPLED,
                    });
                    slots.push(segment.slot as i32);
                    positions.push(position as i32);
                }
            }
        }
        for &row in selected {
            let place = places[row];
            chosen.push(place as i32);
            chosen_slots.push(slots[place]);
            chosen_positions.push(positions[place]);
        }
    }

    /// Fills a batch of decoded rows up to `rows`, and its selected rows likewise.
    pub(super) fn pad(&mut self, rows: usize) {
        debug_assert!(self.prefilled.is_empty() && self.ids.len() <= rows);
        for (padded, value) in [
            (&mut self.ids, 0),
            (&mut self.slots, PADDING),
            (&mut self.positions, 0),
            (&mut self.chosen, PADDING),
            (&mut self.chosen_slots, PADDING),
            (&mut self.chosen_positions, 0),
        ] {
            padded.resize(rows, value);
        }
        self.decoded = rows;
    }

    /// Tiles of prefill attention of at most `rows` rows each.
    pub(super) fn tiles(&self, rows: usize) -> impl Iterator<Item = [i32; 4]> + '_ {
        let rows = rows as i32;
        self.prefilled.iter().flat_map(move |&[slot, first, all, position]| {
            let starts = (0..all).step_by(rows as usize);
            starts.map(move |start| [slot, first + start, rows.min(all - start), position + start])
        })
    }
}

/// Most splits that one of these rows attends to. With a window, fewer may exist.
pub(super) fn splits(positions: &[i32]) -> usize {
    positions.iter().max().map_or(1, |position| *position as usize / ATTENTION_SPLIT + 1)
}

/// Whether every segment is one row that samples: then a graph may compute the step.
pub(super) fn is_decode(step: &StepInput) -> bool {
    let one = |segment: &SlotRows| segment.rows == 1 && segment.samples == 1;
    step.segments.iter().all(one) && step.observed.is_empty() && step.logit_rows.is_empty()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rows(slot: usize, position: usize, rows: usize, samples: usize) -> SlotRows {
        SlotRows { slot, position, rows, samples, masks: Vec::new() }
    }

    fn mixed() -> StepInput {
        let ids = (10..19).map(RowId::Token).collect();
        let segments = vec![rows(4, 7, 3, 1), rows(1, 20, 1, 1), rows(2, 0, 4, 0), rows(3, 600, 1, 1)];
        StepInput { ids, segments, ..StepInput::default() }
    }

    #[test]
    fn decoded_rows_come_first() {
        let mut step = mixed();
        step.ids[3] = RowId::LastSampled;
        let mut batch = Batch::default();
        batch.fill(&step, &step.selected_rows());
        assert_eq!(batch.ids, [-1, 18, 10, 11, 12, 14, 15, 16, 17]);
        assert_eq!(batch.slots, [1, 3, 4, 4, 4, 2, 2, 2, 2]);
        assert_eq!(batch.positions, [20, 600, 7, 8, 9, 0, 1, 2, 3]);
        assert_eq!((batch.decoded, splits(&batch.positions[..2])), (2, 2));
        assert_eq!(batch.prefilled, [[4, 2, 3, 7], [2, 5, 4, 0]]);
        // In the step, rows 2, 3 and 8.
        assert_eq!(batch.chosen, [4, 0, 1]);
        assert_eq!((batch.chosen_slots, batch.chosen_positions), (vec![4, 1, 3], vec![9, 20, 600]));
    }

    #[test]
    fn tiles_cover_every_row_once() {
        let mut batch = Batch::default();
        batch.fill(&mixed(), &[]);
        let cut = |rows| batch.tiles(rows).collect::<Vec<_>>();
        assert_eq!(cut(2), [[4, 2, 2, 7], [4, 4, 1, 9], [2, 5, 2, 0], [2, 7, 2, 2]]);
        assert_eq!(cut(64), batch.prefilled);
    }

    #[test]
    fn padding_belongs_to_no_slot() {
        let segments = vec![rows(5, 3, 1, 1), rows(0, 9, 1, 1)];
        let step = StepInput { ids: vec![RowId::Token(1), RowId::LastSampled], segments, ..StepInput::default() };
        assert!(is_decode(&step) && !is_decode(&mixed()));
        let mut batch = Batch::default();
        batch.fill(&step, &step.selected_rows());
        batch.pad(4);
        assert_eq!((&batch.slots[..], &batch.chosen[..]), (&[5, 0, -1, -1][..], &[0, 1, -1, -1][..]));
        assert_eq!((batch.ids, batch.decoded), (vec![1, -1, 0, 0], 4));
    }
}
