//! Blocks of 16 rows times panels that are unpacked once for all of them.

use super::gemm::{AHEAD, Epilogue};
use super::level::Level;
use super::quantize::{ROWS_MAX, Rows};
use super::tile::Tile;
use super::tile::amx::{Tiles, Unpacked, unpack};
use super::{BLOCK, PANEL};
use crate::cpu::lines::Lines;
use crate::cpu::stored::Weights;
use std::cell::RefCell;
use std::ops::Range;

thread_local! {
    static UNPACKED: RefCell<Lines> = const { RefCell::new(Lines::new()) };
}

/// A GEMM by tiles.
pub(super) struct ByTiles<'a> {
    x: &'a Rows,
    w: &'a Weights,
    tiles: Tiles,
}

impl<'a> ByTiles<'a> {
    /// `None` if the level has no tiles, or rows are few.
    ///
    /// # Safety
    /// Nothing else on this thread uses tiles while this exists.
    pub(super) unsafe fn new(level: Level, x: &'a Rows, w: &'a Weights) -> Option<Self> {
        if x.tiled_blocks() == 0 || x.k() == 0 {
            return None;
        }
        // SAFETY: the caller's promise.
        let tiles = unsafe { Tiles::new(level, w.format().kind()) }?;
        Some(Self { x, w, tiles })
    }

    /// Products of those of `blocks` that tiles take, with a panel. Returns the first of the others.
    pub(super) fn run(&mut self, blocks: Range<usize>, panel: usize, epilogue: &mut impl Epilogue) -> usize {
        let Self { x, w, tiles } = self;
        let blocks = blocks.start..blocks.end.min(x.tiled_blocks());
        if blocks.is_empty() {
            return blocks.start;
        }
        let k_blocks = x.k() / BLOCK;
        UNPACKED.with_borrow_mut(|unpacked| {
            let unpacked = unpacked.room::<Unpacked>(k_blocks);
            let records = x.whole_blocks(blocks.clone());
            let panel_bytes = Tile { x: records, w: w.panel(panel), blocks: 0..k_blocks, ahead: AHEAD };
            // SAFETY: levels with tiles have AVX-512; the panel has these blocks, the room too; nothing else uses the room meanwhile.
            let unpacked = unsafe {
                unpack(w.format(), &panel_bytes, unpacked);
                std::slice::from_raw_parts(unpacked.cast_const(), k_blocks)
            };
            tiles.run(records, unpacked, (blocks.start * ROWS_MAX, panel * PANEL), epilogue);
        });
        blocks.end
    }
}
