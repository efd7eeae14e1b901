//! The prefix cache of one pool: which whole blocks are cached under which hash, and in which order they are evicted.
//!
//! ```text
//! store ──> in use ── last lease gone ──> evictable, oldest first ── evict, TTL ──> free
//!             ^  └──────── pinned ──────> kept until the pin ends ──┐
//!             └────────────────────── a lease finds it <────────────┘
//! ```
//!
//! Groups are of two sorts. The *main* groups decide whether an entry exists: those that keep all positions, or the widest window where there
//! are none. All others are *side* groups: their blocks come and go while the entry stays. A state is beside the entry behind whose block it
//! is, where a step ended there: a checkpoint. A lease that holds a block of a side group holds
//! those of the main groups at the same index.
//!
//! Where main groups keep all positions, a lease that holds a cached block holds all blocks before it. So after an idle block there are only
//! idle blocks: lists of idle ones are filled from the deepest block up, and their order alone evicts leaves first. Where the main group has
//! a window, entries stand alone: a hit needs only those within the window before its end. A block that a lease holds is never in a list.

mod changes;
mod entries;
mod find;
mod sides;

use crate::{HASH_TOKENS, PoolShape, PrefixHash};
use baton_types::{BlockId, GroupKind, seeded};
pub(crate) use changes::Changes;
pub use changes::{Change, ChangeCursor};
pub(crate) use entries::EntryId;
use entries::{Entries, IdleList};
pub(crate) use find::Hit;
use sides::Sides;
use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::time::{Duration, Instant};

/// Bounds of a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CacheConfig {
    /// Most blocks that may be pinned in total. Of a side group, pins keep at most the same share of its blocks.
    pub pinned_max: usize,
    /// Most blocks that the pins of one owner may hold.
    pub pinned_of_one_max: usize,
    /// Changes kept for followers; one that is further behind takes a snapshot.
    pub changes_max: usize,
}

/// How long blocks are kept once they are unused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Keep {
    /// Time after which unused blocks are evicted; they may be evicted earlier to free blocks.
    pub ttl: Duration,
    /// Until the pin ends, blocks are not evicted for either reason.
    pub pin: Option<Pin>,
}

impl Keep {
    /// Keeps blocks for `ttl`, without a pin.
    pub const fn idle(ttl: Duration) -> Self {
        Self { ttl, pin: None }
    }
}

/// A pin on a prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pin {
    /// The owner whose quota it counts towards: a label of the tenant.
    pub owner: u64,
    /// When the pin ends.
    pub until: Instant,
}

/// Contents and counters of a cache.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheCounts {
    /// Cached blocks, in use or not; the blocks of all groups count once.
    pub blocks: usize,
    /// Cached blocks that no lease holds and that may be evicted.
    pub evictable: usize,
    /// Those that are pinned, in use or not.
    pub pinned: usize,
    /// Blocks stored since the start.
    pub stored: u64,
    /// Blocks evicted to free blocks, since the start.
    pub evicted: u64,
    /// Blocks that expired, since the start.
    pub expired: u64,
    /// Blocks that were not pinned because the quota was used up, since the start.
    pub unpinned: u64,
}

/// Hashes are uniformly distributed, so they need no further hashing.
#[derive(Clone, Copy, Debug, Default)]
struct SpreadHasher(u64);

impl Hasher for SpreadHasher {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        bytes.iter().take(8).for_each(|b| self.0 = self.0 << 8 | u64::from(*b));
    }

    fn write_usize(&mut self, _len: usize) {}
}

/// The cache. Pools without caching have none.
#[derive(Clone, Debug)]
pub(crate) struct PrefixCache {
    config: CacheConfig,
    shape: PoolShape,
    /// Groups whose blocks every entry has.
    main: Vec<usize>,
    /// Whether main groups keep all positions, so that an entry needs those before it.
    is_tree: bool,
    sides: Sides,
    by_hash: HashMap<PrefixHash, EntryId, BuildHasherDefault<SpreadHasher>>,
    entries: Entries,
    /// By group and block.
    entry_of: Vec<Vec<Option<EntryId>>>,
    pinned_by: HashMap<u64, usize>,
    changes: Changes,
    counts: CacheCounts,
    /// The latest time passed in.
    now: Option<Instant>,
}

impl PrefixCache {
    pub(crate) fn new(config: CacheConfig, shape: &PoolShape) -> Self {
        let main = shape.main();
        let all = main.first().map_or(0, |group| shape.groups[*group].blocks as usize).max(1);
        let pinned_max = shape
            .groups
            .iter()
            .enumerate()
            .map(|(g, group)| (!main.contains(&g)).then(|| config.pinned_max * group.blocks as usize / all));
        Self {
            config,
            by_hash: HashMap::default(),
            entries: Entries::new(shape.groups.len()),
            entry_of: shape.groups.iter().map(|group| vec![None; group.blocks as usize]).collect(),
            pinned_by: HashMap::new(),
            changes: Changes::new(config.changes_max),
            counts: CacheCounts::default(),
            now: None,
            is_tree: main.iter().all(|group| !matches!(shape.groups[*group].kind, GroupKind::Window(_))),
            sides: Sides::new(pinned_max),
            main,
            shape: shape.clone(),
        }
    }

    /// Groups of [`HASH_TOKENS`] in a block.
    fn stride(&self) -> usize {
        self.shape.block_tokens / HASH_TOKENS
    }

    pub(crate) fn block_tokens(&self) -> usize {
        self.shape.block_tokens
    }

    pub(crate) fn is_main(&self, group: usize) -> bool {
        self.main.contains(&group)
    }

    /// The first main group, whose table represents those of all main groups.
    pub(crate) fn first_main(&self) -> usize {
        self.main[0]
    }

    pub(crate) fn is_tree(&self) -> bool {
        self.is_tree
    }

    /// Hash of the block at `index` of a prompt, if the hashes cover all of it.
    pub(crate) fn hash_of(&self, hashes: &[PrefixHash], index: usize) -> Option<PrefixHash> {
        hashes.get((index + 1) * self.stride() - 1).copied()
    }

    /// Whether a group has states.
    pub(crate) fn is_state(&self, group: usize) -> bool {
        !self.shape.groups[group].kind.is_by_position()
    }

    pub(crate) fn by_hash(&self, hash: &PrefixHash) -> Option<EntryId> {
        self.by_hash.get(hash).copied()
    }

    pub(crate) fn by_block(&self, group: usize, block: BlockId) -> Option<EntryId> {
        self.entry_of[group][block.0 as usize]
    }

    pub(crate) fn blocks(&self, id: EntryId) -> &[Option<BlockId>] {
        self.entries.blocks(id)
    }

    /// Number of blocks of a group that may be evicted.
    pub(crate) fn evictable_of(&self, group: usize) -> usize {
        if self.is_main(group) { self.entries.len_of(IdleList::Evictable) } else { self.sides.evictable(group) }
    }

    /// Whether the entry's block of a group may be evicted.
    pub(crate) fn is_evictable(&self, group: usize, id: EntryId) -> bool {
        if self.is_main(group) {
            return self.entries.of(id).idle_list() == Some(IdleList::Evictable);
        }
        self.sides.is_evictable(group, id)
    }

    /// Whether a block may stay cached even while unused.
    pub(crate) fn is_pinned(&self, group: usize, block: BlockId) -> bool {
        self.by_block(group, block).is_some_and(|id| self.entries.of(id).pinned.is_some())
    }

    /// Advances the time, which never goes back, and returns it.
    pub(crate) fn at(&mut self, now: Instant) -> Instant {
        *self.now.insert(self.now.map_or(now, |known| known.max(now)))
    }

    /// A lease holds the entry's block of a group from now on.
    pub(crate) fn hold(&mut self, group: usize, id: EntryId) {
        if self.is_main(group) {
            self.entries.leave_list(id);
        } else {
            self.sides.leave(group, id);
        }
    }

    /// The last lease dropped the entry's blocks of the main groups.
    pub(crate) fn wait(&mut self, id: EntryId) {
        // Every cached block was stored at some time, so a time is known.
        if let Some(now) = self.now {
            self.entries.wait(id, now);
        }
    }

    /// The last lease dropped the entry's block of a side group.
    pub(crate) fn wait_side(&mut self, group: usize, id: EntryId) {
        let is_pinned = self.entries.of(id).pinned.is_some() && !seeded!(EvictedPin);
        self.sides.wait(group, id, is_pinned);
    }

    /// The block left the window of the last sequence that held it. A pin does not keep it: what is pinned is what sequences still hold when
    /// they end.
    pub(crate) fn retire(&mut self, group: usize, id: EntryId) {
        if self.is_main(group) {
            self.wait(id);
            self.unpin(id);
        } else {
            self.sides.wait(group, id, false);
        }
    }

    /// The last lease went on from the state beside an entry.
    pub(crate) fn retire_state(&mut self, group: usize, id: EntryId, is_replaceable: bool) {
        self.sides.wait(group, id, false);
        if is_replaceable {
            self.sides.replace(group, id);
        }
    }

    /// Caches a block that a lease holds and that continues `parent`.
    pub(crate) fn add(
        &mut self,
        hash: PrefixHash,
        parent: Option<EntryId>,
        ttl: Duration,
        blocks: impl Iterator<Item = Option<BlockId>>,
    ) -> EntryId {
        let id = self.entries.add(hash, parent, ttl, blocks);
        for (of_group, block) in self.entry_of.iter_mut().zip(self.entries.blocks(id)) {
            if let Some(block) = block {
                of_group[block.0 as usize] = Some(id);
            }
        }
        self.by_hash.insert(hash, id);
        self.counts.stored += 1;
        self.changes.push(true, hash);
        id
    }

    /// Gives an entry the block that it lacks in a side group; a lease holds the block.
    pub(crate) fn complete(&mut self, id: EntryId, group: usize, block: BlockId) {
        *self.entries.block_mut(id, group) = Some(block);
        self.entry_of[group][block.0 as usize] = Some(id);
    }

    /// Extends how long a block that a lease holds is kept. The first blocks of a prefix are pinned first, while the quota lasts.
    pub(crate) fn keep(&mut self, id: EntryId, keep: Keep) {
        let entry = self.entries.of_mut(id);
        entry.ttl = entry.ttl.max(keep.ttl);
        let (had, parent) = (entry.pinned, entry.parent);
        let Some(pin) = keep.pin else { return };
        // Never longer than its parent, which could not be evicted before it.
        let before = parent.map(|parent| self.entries.of(parent).pinned.map(|pinned| pinned.until));
        let until = match before {
            None => Some(pin.until),
            Some(before) => before.map(|before| before.min(pin.until)),
        };
        let until = until.filter(|_| had.is_some() || self.takes_pin(pin.owner));
        let Some(until) = until else {
            self.counts.unpinned += 1;
            return;
        };
        // A tenant's hashes are its own, so only one label pins them.
        let owner = had.map_or(pin.owner, |had| had.owner);
        if had.is_none() {
            *self.pinned_by.entry(owner).or_default() += 1;
            self.counts.pinned += 1;
        }
        let until = had.map_or(until, |had| had.until.max(until));
        self.entries.of_mut(id).pinned = Some(Pin { owner, until });
    }

    fn takes_pin(&self, owner: u64) -> bool {
        let of_one = self.pinned_by.get(&owner).copied().unwrap_or_default();
        self.counts.pinned < self.config.pinned_max && of_one < self.config.pinned_of_one_max
    }

    /// Ends the pin of a block.
    fn unpin(&mut self, id: EntryId) {
        let Some(pinned) = self.entries.of_mut(id).pinned.take() else { return };
        self.counts.pinned -= 1;
        if let Some(of_one) = self.pinned_by.get_mut(&pinned.owner) {
            *of_one -= 1;
            if *of_one == 0 {
                self.pinned_by.remove(&pinned.owner);
            }
        }
        self.sides.unpin(id);
        if self.entries.of(id).idle_list().is_some() {
            self.wait(id);
        }
    }

    /// Ends the pins of idle blocks; returns whether there were any. An entry whose main blocks are in use keeps its pin for these.
    pub(crate) fn waive_pins(&mut self) -> bool {
        let pinned = self.entries.in_list(IdleList::Pinned);
        pinned.iter().for_each(|id| self.unpin(*id));
        let of_used = self.sides.pinned();
        of_used.iter().for_each(|id| self.sides.unpin(*id));
        !pinned.is_empty() || !of_used.is_empty()
    }

    /// The entry to evict next.
    pub(crate) fn oldest(&self) -> Option<EntryId> {
        self.entries.first(IdleList::Evictable)
    }

    /// The entry whose block of a side group is to be evicted next.
    pub(crate) fn oldest_of(&self, group: usize) -> Option<EntryId> {
        self.sides.oldest(group)
    }

    /// Evicts an entry; returns its blocks.
    ///
    /// # Panics
    /// If it is pinned.
    pub(crate) fn evict(&mut self, id: EntryId) -> Vec<Option<BlockId>> {
        assert!(self.entries.of(id).pinned.is_none(), "a pinned block makes room");
        self.counts.evicted += 1;
        self.remove(id)
    }

    /// Evicts the block of an entry in a side group, and returns it.
    pub(crate) fn evict_side(&mut self, group: usize, id: EntryId) -> Option<BlockId> {
        self.sides.leave(group, id);
        let block = self.entries.block_mut(id, group).take()?;
        self.entry_of[group][block.0 as usize] = None;
        Some(block)
    }

    /// The entry, if no hit can end with it or after it: nothing continues it, and it lacks a block that such a hit needs.
    pub(crate) fn useless(&self, id: EntryId) -> Option<EntryId> {
        let entry = self.entries.of(id);
        let lacks = |group: usize| {
            let needs = self.shape.groups[group].kind.first_for(self.shape.block_tokens, self.shape.block_tokens) == 0;
            needs && self.entries.blocks(id)[group].is_none()
        };
        let is_end = self.is_tree && entry.children == 0 && entry.idle_list() == Some(IdleList::Evictable);
        (is_end && self.sides.groups().any(lacks)).then_some(id)
    }

    pub(crate) fn parent(&self, id: EntryId) -> Option<EntryId> {
        self.entries.of(id).parent
    }

    fn remove(&mut self, id: EntryId) -> Vec<Option<BlockId>> {
        let (hash, row) = (self.entries.of(id).hash, self.entries.blocks(id).to_vec());
        self.entries.remove(id);
        self.by_hash.remove(&hash);
        for (group, block) in row.iter().enumerate() {
            self.sides.leave(group, id);
            if let Some(block) = block {
                self.entry_of[group][block.0 as usize] = None;
            }
        }
        self.changes.push(false, hash);
        row
    }

    /// Ends expired pins and evicts expired blocks; returns these blocks, in rows by group.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<Vec<Option<BlockId>>> {
        let now = self.at(now);
        if self.counts.pinned > 0 {
            // Idle ones in the order of their list, so that leaves stay in front.
            let (idle, all) =
                (self.entries.in_list(IdleList::Pinned), self.entry_of[self.first_main()].iter().flatten().copied());
            let pinned: Vec<EntryId> = idle.into_iter().chain(all).collect();
            for id in pinned {
                if self.entries.of(id).pinned.is_some_and(|pinned| pinned.until <= now) {
                    self.unpin(id);
                }
            }
        }
        let mut expired = self.entries.expired(now);
        let mut rows = Vec::with_capacity(expired.len());
        while let Some(id) = expired.pop() {
            // Leaves first: they were kept at most as long. A pinned leaf keeps what it continues.
            let entry = self.entries.of(id);
            if entry.children == 0 && entry.has_expired(now) {
                expired.extend(entry.parent);
                self.counts.expired += 1;
                rows.push(self.remove(id));
            }
        }
        rows
    }

    /// Moves the idle end of a prefix to the front of the idle list: no continuation is expected.
    pub(crate) fn demote(&mut self, hashes: &[PrefixHash]) {
        let chain = self.find(hashes, usize::MAX, None).entries;
        let mut next = 0;
        let cold = chain.iter().rev().take_while(|id| {
            let entry = self.entries.of(**id);
            let is_end = entry.children == next || !self.is_tree;
            next = 1;
            is_end && entry.idle_list() == Some(IdleList::Evictable)
        });
        let cold: Vec<EntryId> = cold.copied().collect();
        for id in cold.into_iter().rev() {
            self.entries.wait_in_front(id);
            self.sides.wait_in_front(id);
        }
    }

    pub(crate) fn counts(&self) -> CacheCounts {
        CacheCounts { blocks: self.entries.len(), evictable: self.entries.len_of(IdleList::Evictable), ..self.counts }
    }

    pub(crate) fn changes(&self) -> &Changes {
        &self.changes
    }

    /// Hashes of all cached blocks.
    pub(crate) fn hashes(&self) -> Vec<PrefixHash> {
        self.by_hash.keys().copied().collect()
    }
}
