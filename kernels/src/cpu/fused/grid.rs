//! The division of an operation into tasks: blocks of rows times columns.

use crate::cpu::matrix::Tiles;
use crate::cpu::threads::TASKS_PER_THREAD;
use std::ops::Range;

/// Bytes of packed rows that stay in the second-level cache (1 MiB a core, or more) while weights pass by.
const BLOCK_BYTES: usize = 512 << 10;

/// Rows for which a thread reads all weights of an operation from the third-level cache by itself: that takes less time than the arithmetic.
const ROWS_EACH: usize = 32;

/// Elements that an operation keeps of a product until it is finished: they stay in the second-level cache with the rows.
const KEPT: usize = 8 << 10;

/// Columns of an operation, side by side.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Columns<'a> {
    /// Of each part.
    pub(in crate::cpu) parts: &'a [usize],
    /// Columns that tasks take together; the last of a part may be fewer. Whole panels.
    pub(in crate::cpu) unit: usize,
}

impl Columns<'_> {
    pub(in crate::cpu) fn units(&self) -> usize {
        self.parts.iter().map(|columns| columns.div_ceil(self.unit)).sum()
    }

    /// Calls `work` with part and columns for these units, at most `most` of them at once.
    pub(in crate::cpu) fn each(&self, units: Range<usize>, most: usize, mut work: impl FnMut(usize, Range<usize>)) {
        let mut end = 0;
        for (part, &columns) in self.parts.iter().enumerate() {
            let first = end;
            end += columns.div_ceil(self.unit);
            let units = units.start.max(first)..units.end.min(end);
            for from in units.clone().step_by(most) {
                let to = from.saturating_add(most).min(units.end);
                work(part, (from - first) * self.unit..((to - first) * self.unit).min(columns));
            }
        }
    }
}

/// Part `i` of `parts` nearly equal ones.
pub(in crate::cpu) fn share(all: usize, i: usize, parts: usize) -> Range<usize> {
    all * i / parts..all * (i + 1) / parts
}

/// Tasks: those of one block of rows follow one another, so that mostly one thread packs it.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Grid {
    rows: usize,
    /// Rows of a tile, and tiles.
    height: usize,
    tiles: usize,
    /// Blocks of rows.
    blocks: usize,
    /// Tasks of a block, by units of columns.
    columns: usize,
    units: usize,
}

impl Grid {
    /// For at least one row, and one unit of columns.
    pub(in crate::cpu) fn new(threads: usize, rows: usize, tiles: Tiles, units: usize) -> Self {
        let count = rows.div_ceil(tiles.rows_max);
        let mut blocks = (rows * tiles.row_bytes).div_ceil(BLOCK_BYTES).max(1);
        if rows >= threads * ROWS_EACH {
            // As many for each thread.
            blocks = blocks.next_multiple_of(threads);
        }
        let blocks = blocks.min(rows.div_ceil(tiles.rows_min)).min(count);
        let wanted = if threads > 1 { (threads * TASKS_PER_THREAD).div_ceil(blocks) } else { 1 };
        Self { rows, height: rows.div_ceil(count), tiles: count, blocks, columns: wanted.min(units), units }
    }

    pub(in crate::cpu) fn tasks(&self) -> usize {
        self.blocks * self.columns
    }

    /// The block of a task.
    pub(in crate::cpu) fn block(&self, task: usize) -> usize {
        task / self.columns
    }

    /// The rows of a block: whole tiles.
    pub(in crate::cpu) fn rows(&self, block: usize) -> Range<usize> {
        let tiles = share(self.tiles, block, self.blocks);
        (tiles.start * self.height).min(self.rows)..(tiles.end * self.height).min(self.rows)
    }

    /// The units of a task.
    pub(in crate::cpu) fn units(&self, task: usize) -> Range<usize> {
        share(self.units, task % self.columns, self.columns)
    }

    /// Most units at once, if what they yield is kept for a moment.
    pub(in crate::cpu) fn units_kept(&self, unit: usize) -> usize {
        let rows = self.rows.div_ceil(self.blocks).max(1);
        (KEPT / (rows * unit)).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_row_gives_each_thread_its_tasks() {
        let tiles = Tiles { rows_max: 4, row_bytes: 2304, rows_min: 1 };
        let tasks = |threads, units| Grid::new(threads, 1, tiles, units).tasks();
        assert_eq!(tasks(4, 64), 4 * TASKS_PER_THREAD);
        assert_eq!(tasks(4, 3), 3, "no more than units");
        assert_eq!(tasks(1, 64), 1, "nobody to share with");
    }

    #[test]
    fn every_row_and_column_is_in_one_task() {
        let parts = [576, 192, 200, 9];
        for unit in [32, 64, 96] {
            let columns = Columns { parts: &parts, unit };
            for threads in [1, 2, 3, 7, 32] {
                for rows in (1..40).chain([63, 64, 65, 128, 257, 512, 2048]) {
                    for rows_max in [4, 5, 6, 12, 16, 32] {
                        let tiles = Tiles { rows_max, row_bytes: 2304, rows_min: 1 };
                        let grid = Grid::new(threads, rows, tiles, columns.units());
                        let mut seen = vec![[0usize; 4]; rows];
                        for task in 0..grid.tasks() {
                            let block = grid.rows(grid.block(task));
                            assert!(block.len() * 2304 <= BLOCK_BYTES + 2304 * rows_max);
                            columns.each(grid.units(task), grid.units_kept(unit), |part, features| {
                                assert!(features.start % unit == 0 && features.end <= parts[part]);
                                block.clone().for_each(|row| seen[row][part] += features.len());
                            });
                        }
                        assert!(seen.iter().all(|seen| *seen == parts), "{threads} threads, {rows} rows, {tiles:?}");
                    }
                }
            }
        }
    }
}
