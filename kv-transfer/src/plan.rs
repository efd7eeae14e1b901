//! Which bytes go where: contiguous copies between two pools whose block sizes may differ.

use crate::heads::Heads;
use baton_types::{BlockId, KvPoolMap};
use std::ops::Range;

/// One contiguous copy, as offsets into the two regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CopyRun {
    pub from: usize,
    pub to: usize,
    pub len: usize,
}

/// One side of a copy: a pool, and the blocks of one group that hold the sequence.
#[derive(Clone, Copy)]
pub struct Side<'a> {
    pub map: &'a KvPoolMap,
    pub blocks: &'a [BlockId],
    /// Which of its heads take part.
    pub heads: &'a Heads,
}

impl Side<'_> {
    fn block_tokens(&self) -> u32 {
        self.map.layout().block_tokens()
    }

    /// Where `token` lies: its block, and its place in it.
    fn locate(&self, token: u32) -> (BlockId, u32) {
        (self.blocks[(token / self.block_tokens()) as usize], token % self.block_tokens())
    }

    fn offset(&self, group: usize, layer: usize, plane: usize, token: u32) -> usize {
        let (block, within) = self.locate(token);
        self.map.token_range(group, layer, block, plane, within..within + 1).start
    }
}

/// The copies that move positions `tokens` of one layer of one group (layer *of the group*), in memory order of the source, neighbours
/// merged and nothing longer than `len_max`. Runs are as long as both sides are contiguous: whole runs of neighbouring blocks where
/// block sizes agree, one plane of the finer block otherwise, one token where the two pools hold different heads.
pub fn copies(
    source: Side<'_>,
    sink: Side<'_>,
    group: usize,
    layer: usize,
    tokens: Range<u32>,
    len_max: usize,
    mut emit: impl FnMut(CopyRun),
) {
    let planes = &source.map.layout().groups()[group].planes;
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
        let piece =
            at..next_boundary(at, source.block_tokens()).min(next_boundary(at, sink.block_tokens())).min(tokens.end);
        for (p, plane) in planes.iter().enumerate() {
            let (ours, theirs) = (&source.heads[group][p], &sink.heads[group][p]);
            let row = ours.len() * plane.head_stride();
            let from = source.offset(group, layer, p, at) + ours.start as usize * plane.head_stride();
            let to = sink.offset(group, layer, p, at) + theirs.start as usize * plane.head_stride();
            let (from_stride, to_stride) = (plane.token_stride(), sink_planes[p].token_stride());
            if row == from_stride && row == to_stride {
                copy(from, to, piece.len() * row);
            } else {
                (0..piece.len()).for_each(|token| copy(from + token * from_stride, to + token * to_stride, row));
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

/// Byte ranges of a pool that a grant of `blocks` lets its ticket write, sorted and merged: those of the blocks that hold positions from
/// `from` on, where one begins. Whatever holds earlier ones may be shared with other sequences.
pub(crate) fn granted_ranges(map: &KvPoolMap, blocks: &[Vec<BlockId>], from: u32) -> Vec<Range<usize>> {
    let kept = (from / map.layout().block_tokens()) as usize;
    let mut ranges = Vec::new();
    for (g, (group, blocks)) in map.layout().groups().iter().zip(blocks).enumerate() {
        let block_bytes = group.token_bytes() * map.layout().block_tokens() as usize;
        for layer in 0..group.layers.len() {
            for &block in blocks.iter().skip(kept) {
                let start = map.plane_offset(g, layer, block, 0);
                ranges.push(start..start + block_bytes);
            }
        }
    }
    ranges.sort_unstable_by_key(|r| r.start);
    ranges.dedup_by(|next, last| {
        let joins = last.end >= next.start;
        if joins {
            last.end = last.end.max(next.end);
        }
        joins
    });
    ranges
}

/// Whether `blocks` can hold positions `0..tokens` of `map`: one table per group, long enough, each block once and in the pool.
pub(crate) fn check_blocks(map: &KvPoolMap, blocks: &[Vec<BlockId>], tokens: u32) -> Result<(), String> {
    let groups = map.layout().groups().len();
    if blocks.len() != groups {
        return Err(format!("{} block tables for {groups} groups", blocks.len()));
    }
    let needed = map.layout().blocks_for(tokens as usize);
    for (g, table) in blocks.iter().enumerate() {
        if table.len() < needed {
            return Err(format!("group {g} has {} blocks, {tokens} tokens need {needed}", table.len()));
        }
        if let Some(block) = table.iter().find(|b| b.0 >= map.blocks()) {
            return Err(format!("block {block} of group {g} is outside the pool of {}", map.blocks()));
        }
        let mut seen = table.clone();
        seen.sort_unstable();
        if let Some(twice) = seen.windows(2).find(|w| w[0] == w[1]) {
            return Err(format!("block {} of group {g} is there twice", twice[0]));
        }
    }
    Ok(())
}

/// Whether the positions of a sequence of `tokens` from `from` on are a part that begins with a block of `map`.
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
#[path = "plan_tests.rs"]
mod tests;
