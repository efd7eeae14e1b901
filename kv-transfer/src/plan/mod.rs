//! Plans the contiguous copies between two pools whose block sizes may differ.
//!
//! A state has no positions. Of a sequence it moves as if it were the last granule of tokens: once, whole, and with one checksum for each
//! plane of each layer. So offers, checksums and the order of copies need no form of their own for it.

use crate::checksum::GRANULE;
use crate::heads::Heads;
use baton_types::{BlockId, BlockTable, BlockTables, GroupKind, KvGroup, KvLayout, KvPoolMap};
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

/// One contiguous copy, as offsets into the two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    pub from: usize,
    pub to: usize,
    pub len: usize,
}

/// One side of a copy: a pool, and the blocks of one group that hold the sequence.
#[derive(Clone, Copy)]
pub(crate) struct Side<'a> {
    pub map: &'a KvPoolMap,
    pub blocks: &'a BlockTable,
    /// The heads that take part.
    pub heads: &'a Heads,
}

impl Side<'_> {
    fn block_tokens(&self) -> u32 {
        self.map.layout().block_tokens()
    }

    fn offset(&self, group: usize, layer: usize, plane: usize, token: u32) -> usize {
        let (block, row) = locate(self.map, self.blocks, group, token);
        self.map.token_range(group, layer, block, plane, row..row + 1).start
    }
}

/// The block with `token` in the table of a group, and its row there. Of states, the only one that moves: the one behind the last position,
/// whose block is the last of the table.
///
/// # Panics
/// If the table does not hold it.
pub(crate) fn locate(map: &KvPoolMap, blocks: &BlockTable, group: usize, token: u32) -> (BlockId, u32) {
    let size = map.layout().block_tokens();
    let (block, row) = match map.layout().groups()[group].kind {
        GroupKind::State => (blocks.blocks.last().copied(), 0),
        _ => (blocks.get((token / size) as usize), token % size),
    };
    (block.expect("tables were checked to hold what moves"), row)
}

/// The end of the rows that lie together from `token` on, as positions: those of one block, or of one state.
fn rows_end(group: &KvGroup, token: u32, block_tokens: u32) -> u32 {
    if group.kind == GroupKind::State { u32::MAX } else { next_boundary(token, block_tokens) }
}

/// The copies that move positions `tokens` of one layer of one group (layer *of the group*), in memory order of the source. Neighbours are
/// merged, and no copy is longer than `len_max`.
///
/// A run is as long as both sides are contiguous. That is whole runs of neighbouring blocks where block sizes agree, one plane of the
/// smaller block otherwise, and one token where the two pools hold different heads.
pub(crate) fn copies(
    source: Side<'_>,
    sink: Side<'_>,
    group: usize,
    layer: usize,
    tokens: Range<u32>,
    len_max: usize,
    mut emit: impl FnMut(CopyRun),
) {
    let shape = &source.map.layout().groups()[group];
    let sink_planes = &sink.map.layout().groups()[group].planes;
    let mut pending: Option<CopyRun> = None;
    let mut copy = |from, to, len| match &mut pending {
        Some(run) if run.from + run.len == from && run.to + run.len == to => run.len += len,
        _ => {
            if let Some(done) = pending.replace(CopyRun { from, to, len }) {
                cut_run(done, len_max, &mut emit);
            }
        }
    };
    let mut at = tokens.start;
    while at < tokens.end {
        let ends = [source, sink].map(|side| rows_end(shape, at, side.block_tokens()));
        let piece = at..tokens.end.min(ends[0]).min(ends[1]);
        let rows = shape.rows(piece.len());
        for (p, plane) in shape.planes.iter().enumerate() {
            let (ours, theirs) = (&source.heads[group][p], &sink.heads[group][p]);
            let row = ours.len() * plane.head_stride();
            let from = source.offset(group, layer, p, at) + ours.start as usize * plane.head_stride();
            let to = sink.offset(group, layer, p, at) + theirs.start as usize * plane.head_stride();
            let (from_stride, to_stride) = (plane.token_stride(), sink_planes[p].token_stride());
            if row == from_stride && row == to_stride {
                copy(from, to, rows * row);
            } else {
                (0..rows).for_each(|token| copy(from + token * from_stride, to + token * to_stride, row));
            }
        }
        at = piece.end;
    }
    if let Some(done) = pending {
        cut_run(done, len_max, &mut emit);
    }
}

fn next_boundary(token: u32, block_tokens: u32) -> u32 {
    (token / block_tokens + 1) * block_tokens
}

fn cut_run(run: CopyRun, len_max: usize, emit: &mut impl FnMut(CopyRun)) {
    for at in (0..run.len).step_by(len_max) {
        emit(CopyRun { from: run.from + at, to: run.to + at, len: len_max.min(run.len - at) });
    }
}

/// Most blocks, of the pool with the larger ones, whose copies are planned in one step.
const BLOCKS_AT_ONCE: u32 = 256;

/// One pool's side of a move under a ticket.
#[derive(Debug)]
pub(crate) struct End {
    pub(crate) map: KvPoolMap,
    pub(crate) blocks: Arc<BlockTables>,
    pub(crate) heads: Arc<Heads>,
}

impl End {
    fn side(&self, group: usize) -> Side<'_> {
        Side { map: &self.map, blocks: &self.blocks.0[group], heads: &self.heads }
    }
}

/// What moves under a ticket: source and destination.
#[derive(Debug)]
pub(crate) struct Move {
    pub(crate) source: End,
    pub(crate) sink: End,
    pub(crate) run_bytes_max: usize,
}

impl Move {
    /// The same move out of other blocks of the source: a window's come while its sequence is computed.
    pub(crate) fn with_source(&self, blocks: &Arc<BlockTables>) -> Self {
        let end = |end: &End, blocks: &Arc<BlockTables>| End {
            map: end.map.clone(),
            blocks: blocks.clone(),
            heads: end.heads.clone(),
        };
        let (source, sink) = (end(&self.source, blocks), end(&self.sink, &self.sink.blocks));
        Self { source, sink, run_bytes_max: self.run_bytes_max }
    }
}

/// The copy of one layer, whose runs are planned as they are taken. So a long sequence delays others only as long as [`BLOCKS_AT_ONCE`]
/// blocks take to plan.
#[derive(Debug)]
pub(crate) struct LayerCopy {
    of: Arc<Move>,
    group: usize,
    layer: usize,
    /// Positions whose runs are not planned yet.
    tokens: Range<u32>,
    runs: VecDeque<CopyRun>,
}

impl LayerCopy {
    pub(crate) fn new(of: Arc<Move>, group: usize, layer: usize, tokens: Range<u32>) -> Self {
        Self { of, group, layer, tokens, runs: VecDeque::new() }
    }

    /// A copy of one planned run.
    #[cfg(test)]
    pub(crate) fn of_run(run: CopyRun) -> Self {
        let layout = baton_types::KvLayout::llama(16, 1, 1, 1, baton_types::Dtype::Bf16).unwrap();
        let map = KvPoolMap::try_new(layout, 1).unwrap();
        let end = || End { map: map.clone(), blocks: Arc::default(), heads: Arc::default() };
        let of = Arc::new(Move { source: end(), sink: end(), run_bytes_max: 1 });
        Self { runs: VecDeque::from([run]), ..Self::new(of, 0, 0, 0..0) }
    }

    /// Copies of every layer, of the positions from `starts[group]` on.
    pub(crate) fn all_layers(of: &Arc<Move>, starts: &[u32], tokens: u32) -> Vec<Self> {
        let groups = of.source.map.layout().groups().iter().enumerate();
        let layers = groups.flat_map(|(group, shape)| (0..shape.layers.len()).map(move |layer| (group, layer)));
        layers.map(|(group, layer)| Self::new(of.clone(), group, layer, starts[group]..tokens)).collect()
    }

    /// The next run, if one is left.
    pub(crate) fn peek(&mut self) -> Option<CopyRun> {
        if self.runs.is_empty() && !self.tokens.is_empty() {
            let (source, sink) = (self.of.source.side(self.group), self.of.sink.side(self.group));
            let span = BLOCKS_AT_ONCE * source.block_tokens().max(sink.block_tokens());
            let end = next_boundary(self.tokens.start, span).min(self.tokens.end);
            let (runs, max) = (&mut self.runs, self.of.run_bytes_max);
            copies(source, sink, self.group, self.layer, self.tokens.start..end, max, |run| runs.push_back(run));
            self.tokens.start = end;
        }
        self.runs.front().copied()
    }

    pub(crate) fn next(&mut self) -> Option<CopyRun> {
        self.peek()?;
        self.runs.pop_front()
    }
}

/// The first position that moves, by group, of a sequence of `tokens` positions of which the sink has those before `from`.
///
/// A group with a window moves only the blocks that position `tokens` attends to, those that both sides hold; a group of states the state
/// behind the last position, in place of the last granule. Both sides compute the same.
pub(crate) fn first_moved(ours: &KvLayout, theirs: &KvLayout, from: u32, tokens: u32) -> Vec<u32> {
    let sizes = [ours, theirs].map(|layout| layout.block_tokens() as usize);
    let first = |kind: GroupKind| {
        let sizes = if kind == GroupKind::State { [GRANULE as usize; 2] } else { sizes };
        let held = sizes.map(|size| (kind.first_for(tokens as usize, size) * size) as u32);
        held.into_iter().fold(from, u32::max).min(tokens)
    };
    ours.groups().iter().map(|group| first(group.kind)).collect()
}

/// [`first_moved`] for a get, whose positions count from its first one.
pub(crate) fn got_from(ours: &KvLayout, theirs: &KvLayout, from: u32, tokens: u32) -> Vec<u32> {
    first_moved(ours, theirs, from, tokens).into_iter().map(|first| first - from).collect()
}

/// Checks that `blocks` can hold positions `starts[group]..tokens` of `map`, full groups all before, and groups of states nothing but the
/// state behind them: one table per group, long enough, each block once and in the pool.
pub(crate) fn check_blocks(map: &KvPoolMap, blocks: &BlockTables, starts: &[u32], tokens: u32) -> Result<(), String> {
    let groups = map.layout().groups();
    if blocks.0.len() != groups.len() {
        return Err(format!("{} block tables for {} groups", blocks.0.len(), groups.len()));
    }
    let needed = map.layout().blocks_for(tokens as usize);
    for (g, table) in blocks.0.iter().enumerate() {
        let held = format!("blocks {} to {}", table.first, table.end());
        if groups[g].kind == GroupKind::State {
            let at = state_index(map, tokens);
            if table.indices() != (at..at + 1) {
                return Err(format!("group {g} has {held}, the state behind {tokens} tokens has index {at}"));
            }
            continue;
        }
        let is_window = matches!(groups[g].kind, GroupKind::Window(_));
        let first = if is_window { (starts[g] / map.layout().block_tokens()) as usize } else { 0 };
        if table.first > first || table.end() < needed {
            return Err(format!("group {g} has {held}, {tokens} tokens need {first} to {needed}"));
        }
    }
    check_ids(map, blocks)
}

/// Index of the block with the state behind `tokens` positions.
fn state_index(map: &KvPoolMap, tokens: u32) -> usize {
    GroupKind::State.first_for(tokens as usize, map.layout().block_tokens() as usize)
}

/// Whether a source's blocks of a group hold these positions. Of states, they must be the one behind the last of `tokens` positions. The
/// table of an earlier chunk has another index, or the same block, which the steps within it change in place. So a source that was not told
/// of its last block sends none.
pub(crate) fn holds(map: &KvPoolMap, group: usize, table: &BlockTable, positions: &Range<u32>, tokens: u32) -> bool {
    let size = map.layout().block_tokens();
    if map.layout().groups()[group].kind != GroupKind::State {
        return table.covers(&((positions.start / size) as usize..positions.end.div_ceil(size) as usize));
    }
    let at = state_index(map, tokens);
    table.indices() == (at..at + 1)
}

/// Checks that each block is there once and in the pool, and that there is a table for each group.
fn check_ids(map: &KvPoolMap, blocks: &BlockTables) -> Result<(), String> {
    let groups = map.layout().groups().len();
    if blocks.0.len() != groups {
        return Err(format!("{} block tables for {groups} groups", blocks.0.len()));
    }
    for (g, table) in blocks.0.iter().enumerate() {
        if let Some(block) = table.blocks.iter().find(|b| b.0 >= map.blocks(g)) {
            return Err(format!("block {block} of group {g} is outside the pool of {}", map.blocks(g)));
        }
        // Not a mark for each block of the pool: a peer tells how large its pool is.
        let mut ids = table.blocks.clone();
        ids.sort_unstable();
        if let Some([twice, _]) = ids.array_windows().find(|[a, b]| a == b) {
            return Err(format!("block {twice} of group {g} is there twice"));
        }
    }
    Ok(())
}

/// Checks the tables with which a put begins: [`check_blocks`], but blocks of windows and states may come later.
pub(crate) fn check_begin(map: &KvPoolMap, blocks: &BlockTables, tokens: u32) -> Result<(), String> {
    let needed = map.layout().blocks_for(tokens as usize);
    for (g, (group, table)) in map.layout().groups().iter().zip(&blocks.0).enumerate() {
        let keeps_all = !matches!(group.kind, GroupKind::Window(_) | GroupKind::State);
        if keeps_all && (table.first > 0 || table.end() < needed) {
            let held = format!("blocks {} to {}", table.first, table.end());
            return Err(format!("group {g} has {held}, {tokens} tokens need 0 to {needed}"));
        }
    }
    check_ids(map, blocks)
}

/// Blocks of all groups that the positions from `from` on take, for a sequence of `tokens` positions that a peer fills.
pub(crate) fn blocks_filled(layout: &KvLayout, from: u32, tokens: u32) -> Vec<usize> {
    let size = layout.block_tokens() as usize;
    let end = layout.blocks_for(tokens as usize);
    let first = |kind: GroupKind| kind.first_for(tokens as usize, size).max(from as usize / size);
    layout.groups().iter().map(|group| end.saturating_sub(first(group.kind))).collect()
}

/// Checks that the positions of a sequence of `tokens` from `from` on are a part that begins at a block boundary of `map`.
pub(crate) fn check_from(map: &KvPoolMap, from: u32, tokens: u32) -> Result<(), String> {
    let size = map.layout().block_tokens();
    if from >= tokens {
        return Err(format!("nothing is left of {tokens} tokens from position {from} on"));
    }
    if !from.is_multiple_of(size) {
        return Err(format!("no block of {size} tokens begins with position {from}"));
    }
    Ok(())
}

#[cfg(test)]
mod tests;
