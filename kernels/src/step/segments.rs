//! The segments of a step, in memory that the next step reuses.

use super::StepSegment;
use baton_types::BlockTable;

/// Segments, whose block tables keep their memory.
#[derive(Clone, Debug, Default)]
pub struct Segments {
    all: Vec<StepSegment>,
    len: usize,
}

impl Segments {
    /// The segments.
    pub fn as_slice(&self) -> &[StepSegment] {
        &self.all[..self.len]
    }

    pub(super) fn clear(&mut self) {
        self.len = 0;
    }

    pub(super) fn push(&mut self, position: usize, rows: usize, table: &BlockTable) {
        if self.len == self.all.len() {
            self.all.push(StepSegment { position: 0, rows: 0, table: BlockTable::default() });
        }
        let segment = &mut self.all[self.len];
        (segment.position, segment.rows) = (position, rows);
        segment.table.first = table.first;
        segment.table.blocks.clone_from(&table.blocks);
        self.len += 1;
    }

    /// Becomes each of `rows` of these segments, as a segment of its own.
    pub(crate) fn select(&mut self, segments: &[StepSegment], rows: &[usize]) {
        self.clear();
        // Most rows follow one another.
        let (mut index, mut first) = (0, 0);
        for &row in rows {
            if row < first {
                (index, first) = (0, 0);
            }
            while row >= first + segments[index].rows {
                first += segments[index].rows;
                index += 1;
            }
            let segment = &segments[index];
            self.push(segment.position + row - first, 1, &segment.table);
        }
    }
}

/// What a launched step needs of its slots.
#[derive(Clone, Debug, Default)]
pub struct Launched {
    /// The segments with their block tables, for each group of the pool.
    pub segments: Vec<Segments>,
    /// [`StepInput::selected_rows`](super::StepInput::selected_rows).
    pub selected: Vec<usize>,
}
