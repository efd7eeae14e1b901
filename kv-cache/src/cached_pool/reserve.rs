//! Blocks for a sequence: those that are cached for it, and fresh ones.

use super::{CachedPool, Table};
use crate::cache::Hit;
use crate::{PoolShape, PrefixHash};
use baton_types::{BlockTable, BlockTables, GroupBlocks, GroupKind};
use std::ops::Range;
use std::time::Instant;

/// A request for the blocks of one sequence.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct Reserve<'a> {
    /// Hashes of its prefixes, one per 16 tokens; empty if it does not use the cache.
    pub hashes: &'a [PrefixHash],
    /// Most tokens to take from the cache. One less than the sequence has, because the logits of the last token are needed.
    pub reuse_tokens_max: usize,
    /// Tokens that the blocks are to hold, including those from the cache.
    pub tokens: usize,
    pub fill: Fill,
    /// Blocks of each group that must stay free for others, none where it is empty; waived while no block is referenced.
    pub keep_free: &'a [usize],
    pub now: Instant,
}

/// How the tokens that are not cached get into the blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fill {
    /// They are computed, at most `chunk` at once. Of a group with a window, the lease has as many blocks as this needs at once; it
    /// exchanges them by [`crate::Lease::hold`].
    Computed {
        /// Most positions of one step.
        chunk: usize,
    },
    /// A peer fills them. Of a group with a window, the lease has only the blocks that the position after them needs; of states the one behind
    /// them, and none that is cached before. The first of those is
    /// filled only in part where the peer's own first block begins later; then it is not cached.
    Received {
        /// Tokens of the peer's blocks; `None` if unknown.
        peer_block_tokens: Option<usize>,
    },
}

/// Blocks of one group to take: those of the cache at these indices, and fresh ones after them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Part {
    cached: Range<usize>,
    fresh: usize,
}

impl Part {
    fn of(kind: GroupKind, shape: &PoolShape, wanted: &Reserve<'_>, cached: usize) -> Self {
        let size = shape.block_tokens;
        let end = wanted.tokens.div_ceil(size);
        match wanted.fill {
            // The state to go on from, and those behind the next steps.
            Fill::Computed { .. } if kind == GroupKind::State => {
                Self { cached: cached.saturating_sub(1)..cached, fresh: 2 * end.min(1) }
            }
            Fill::Computed { chunk } => {
                let first = kind.first_for(cached * size, size).min(cached);
                let at_once = kind.blocks_at_once(wanted.tokens, chunk, size);
                Self { cached: first..cached, fresh: (end - cached).min(at_once) }
            }
            Fill::Received { .. } => {
                let first = kind.first_for(wanted.tokens, size).min(end);
                let received = end - cached.max(first);
                // Of states one more, to go on with.
                let fresh = if kind.is_by_position() { received } else { 2 * received };
                Self { cached: first.min(cached)..cached, fresh }
            }
        }
    }

    /// How many of the fresh blocks are not of the table: those for the states behind the next steps.
    fn next(&self, kind: GroupKind) -> usize {
        let of_table = usize::from(self.cached.is_empty());
        if kind.is_by_position() { 0 } else { self.fresh.saturating_sub(of_table) }
    }

    /// Index of its first block, cached or fresh.
    fn first(&self, kind: GroupKind, shape: &PoolShape, wanted: &Reserve<'_>) -> usize {
        let is_received = matches!(wanted.fill, Fill::Received { .. });
        if self.cached.is_empty() && is_received {
            return wanted.tokens.div_ceil(shape.block_tokens) - (self.fresh - self.next(kind));
        }
        self.cached.start
    }
}

/// Index of the first block, from `first` on, that a peer fills whole.
fn first_whole(kind: GroupKind, shape: &PoolShape, wanted: &Reserve<'_>, first: usize, cached: usize) -> usize {
    let (GroupKind::Window(_), Fill::Received { peer_block_tokens }) = (kind, wanted.fill) else { return 0 };
    let is_whole =
        peer_block_tokens.is_some_and(|peer| kind.first_for(wanted.tokens, peer) * peer <= first * shape.block_tokens);
    if first < cached || is_whole { 0 } else { first + 1 }
}

impl CachedPool {
    pub(crate) fn reserve(&mut self, wanted: Reserve<'_>) -> Option<Table> {
        let blocks_max = wanted.tokens.div_ceil(self.shape.block_tokens);
        let received = matches!(wanted.fill, Fill::Received { .. }).then_some(wanted.tokens);
        let hit = self.find(wanted.hashes, wanted.reuse_tokens_max, blocks_max, received);
        if let Some(table) = self.take(&hit, &wanted) {
            return Some(table);
        }
        // A window's cached blocks and its fresh ones may together be more than a sequence needs at once. Without the hit, the cached ones
        // may be evicted: whatever fits the pool fits so.
        if hit.blocks > 0 { self.take(&Hit::default(), &wanted) } else { None }
    }

    /// Takes the blocks of a hit, and fresh ones, or none at all.
    fn take(&mut self, hit: &Hit, wanted: &Reserve<'_>) -> Option<Table> {
        let kinds: Vec<GroupKind> = self.shape.groups.iter().map(|group| group.kind).collect();
        let parts: Vec<Part> = kinds.iter().map(|kind| Part::of(*kind, &self.shape, wanted, hit.blocks)).collect();
        let fresh: Vec<usize> = parts.iter().map(|part| part.fresh).collect();
        // Blocks that it found cached cannot be evicted for it.
        let idle = |group: usize, part: &Part| {
            let Some(cache) = &self.cache else { return 0 };
            part.cached.clone().filter(|index| cache.is_evictable(group, hit.entry(*index))).count()
        };
        let available = self.available();
        let rest = parts.iter().enumerate().map(|(g, part)| available[g] - idle(g, part)).collect::<Vec<_>>();
        let fits = rest.iter().zip(&fresh).all(|(rest, fresh)| rest >= fresh);
        if !fits || !self.leaves(&fresh, &rest, wanted.keep_free) {
            return None;
        }
        let mut tables = BlockTables(vec![BlockTable::default(); parts.len()]);
        self.hold_cached(hit, &parts, &mut tables, wanted.now);
        let ends = tables.0.iter().map(|table| table.blocks.last().copied()).collect::<Vec<_>>();
        let more = self.allocate(&fresh, Some(&ends)).expect("as many are there");
        let mut whole = Vec::with_capacity(parts.len());
        let mut next = GroupBlocks(Vec::with_capacity(parts.len()));
        for (group, (table, mut more)) in tables.0.iter_mut().zip(more.0).enumerate() {
            next.0.push(more.split_off(more.len() - parts[group].next(kinds[group])));
            table.first = parts[group].first(kinds[group], &self.shape, wanted);
            table.blocks.extend(more);
            whole.push(first_whole(kinds[group], &self.shape, wanted, table.first, hit.blocks));
        }
        Some(Table { tables, cached: hit.blocks, known: hit.known, whole, next })
    }

    fn hold_cached(&mut self, hit: &Hit, parts: &[Part], tables: &mut BlockTables, now: Instant) {
        let Some(cache) = &mut self.cache else { return };
        cache.at(now);
        for (group, part) in parts.iter().enumerate() {
            for index in part.cached.clone() {
                let id = hit.entry(index);
                let block = cache.blocks(id)[group].expect("a hit has the blocks that the next position needs");
                cache.hold(group, id);
                self.pool.reference(group, block);
                tables.0[group].blocks.push(block);
            }
        }
    }

    fn find(&self, hashes: &[PrefixHash], tokens_max: usize, blocks_max: usize, received: Option<usize>) -> Hit {
        let Some(cache) = &self.cache else { return Hit::default() };
        cache.find(hashes, blocks_max.min(tokens_max / cache.block_tokens()), received)
    }

    /// Tokens of the longest cached prefix, in whole blocks.
    pub(crate) fn cached_tokens(&self, hashes: &[PrefixHash]) -> usize {
        self.find(hashes, usize::MAX, usize::MAX, None).blocks * self.shape.block_tokens
    }

    /// The blocks of the longest cached prefix that the next position needs.
    pub(crate) fn cached_blocks(&self, hashes: &[PrefixHash]) -> BlockTables {
        let hit = self.find(hashes, usize::MAX, usize::MAX, None);
        let size = self.shape.block_tokens;
        let table = |(group, kind): (usize, GroupKind)| {
            let first = kind.first_for(hit.blocks * size, size).min(hit.blocks);
            let block = |index| self.cache.as_ref()?.blocks(hit.entry(index))[group];
            BlockTable { first, blocks: (first..hit.blocks).filter_map(block).collect() }
        };
        BlockTables(self.shape.groups.iter().map(|group| group.kind).enumerate().map(table).collect())
    }
}
