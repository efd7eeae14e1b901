//! Blocks of 16 rows times panels that are unpacked once for all of them.

use super::gemm::{AHEAD, Epilogue};
use super::level::Level;
use super::quantize::{ROWS_MAX, Rows};
use super::tile::Tile;
use super::tile::tiles::{Tiles, Unpacked, unpack};
use super::{BLOCK, PANEL};
use crate::cpu::lines::Lines;
use crate::cpu::stored::{Format, Weights};
use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    static UNPACKED: RefCell<Lines> = const { RefCell::new(Lines::new()) };
}

/// Tiles for a GEMM.
pub(super) struct ByTiles {
    tiles: Tiles,
    format: Format,
    /// Blocks that tiles take; one behind them has fewer rows.
    blocks: usize,
}

impl ByTiles {
    /// `None` if the level has no tiles, or rows are few.
    pub(super) fn new(level: Level, x: &Rows, w: &Weights, blocks: &Range<usize>) -> Option<Self> {
        let (format, blocks) = (w.format(), blocks.end.min(x.tiled_blocks()));
        let tiles = if blocks > 0 { Tiles::new(level, format) } else { None };
        tiles.map(|tiles| Self { tiles, format, blocks })
    }

    /// Products of those of `blocks` that tiles take, with a panel. Returns the first of the others.
    pub(super) fn run(
        &mut self,
        x: &Rows,
        w: &Weights,
        blocks: Range<usize>,
        panel: usize,
        epilogue: &mut impl Epilogue,
    ) -> usize {
        let blocks = blocks.start..blocks.end.min(self.blocks);
        if blocks.is_empty() {
            return blocks.start;
        }
        let k_blocks = x.k() / BLOCK;
        UNPACKED.with_borrow_mut(|unpacked| {
            let unpacked = unpacked.room::<Unpacked>(k_blocks);
            let records = x.whole_blocks(blocks.clone());
            let tile = Tile { x: records, w: w.panel(panel), blocks: 0..k_blocks, ahead: AHEAD };
            // SAFETY: levels with tiles have AVX-512; the panel has these blocks, the room too; nothing else uses the room meanwhile.
            let unpacked = unsafe {
                unpack(self.format, &tile, unpacked);
                std::slice::from_raw_parts(unpacked.cast_const(), k_blocks)
            };
            self.tiles.run(self.format, records, unpacked, (blocks.start * ROWS_MAX, panel * PANEL), epilogue);
        });
        blocks.end
    }
}
