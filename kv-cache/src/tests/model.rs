//! A simple model of pool and cache: sets and lists, recounted each time. It makes no decisions: it takes those of the real ones, checks
//! that they were allowed, and knows what every block must hold.

use super::TTL;
use crate::{Change, ChangeCursor, Keep, Lease, Pin, PrefixHash, Quarantined, SharedPool};
use baton_types::BlockId;
use std::collections::{BTreeMap, HashMap};
use std::time::Instant;

/// A block of a group.
type Place = (usize, BlockId);

/// The contents of a block: KV of a prefix, or data that one lease is still writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Content {
    Kv(PrefixHash),
    Draft(u64),
}

/// A lease, and the contents that its user expects.
pub(super) struct Held {
    pub(super) lease: Lease,
    pub(super) hashes: Vec<PrefixHash>,
    /// Leading rows whose KV is complete, and those that were stored.
    pub(super) complete: usize,
    stored: usize,
    pin: Option<Pin>,
    /// Blocks that were replaced.
    spare: Vec<Place>,
}

/// A cached row.
struct Cached {
    row: Vec<BlockId>,
    parent: Option<PrefixHash>,
    /// Order in which rows became idle; `None` while one is used.
    idle: Option<(i64, Instant)>,
    pinned_until: Option<Instant>,
}

/// Why blocks are removed.
#[derive(Clone, Copy, PartialEq)]
enum Why {
    Room,
    Time,
}

pub(super) struct Model {
    pub(super) pool: SharedPool,
    pub(super) held: Vec<Held>,
    pub(super) quarantined: Vec<Quarantined>,
    pub(super) now: Instant,
    groups: usize,
    stride: usize,
    contents: HashMap<Place, Content>,
    cached: BTreeMap<PrefixHash, Cached>,
    cursor: ChangeCursor,
    drafts: u64,
    order: i64,
    coldest: i64,
}

impl Model {
    pub(super) fn new(groups: usize, blocks: u32, block_tokens: usize) -> Self {
        let pool = super::pool(groups, blocks, block_tokens);
        let (held, quarantined, contents, cached) = Default::default();
        let cursor = pool.snapshot().unwrap().1;
        let (stride, now) = (block_tokens / 16, Instant::now());
        let (drafts, order, coldest) = (0, 0, 0);
        Self { pool, held, quarantined, now, groups, stride, contents, cached, cursor, drafts, order, coldest }
    }

    /// Hashes of whole blocks.
    fn rows_of(&self, hashes: &[PrefixHash]) -> Vec<PrefixHash> {
        hashes.chunks_exact(self.stride).map(|block| block[self.stride - 1]).collect()
    }

    /// Leading rows of a prompt that are cached.
    pub(super) fn find(&self, hashes: &[PrefixHash], rows_max: usize) -> usize {
        self.rows_of(hashes).iter().take(rows_max).take_while(|hash| self.cached.contains_key(*hash)).count()
    }

    /// Rows available for a lease that finds this many rows of a prompt cached.
    pub(super) fn room(&self, hashes: &[PrefixHash], found: usize) -> usize {
        let finds: Vec<_> = self.rows_of(hashes).into_iter().take(found).collect();
        let idle = self.cached.iter().filter(|(hash, c)| self.may_go(c) && !finds.contains(hash)).count();
        self.pool.counts().free / self.groups + idle
    }

    fn may_go(&self, cached: &Cached) -> bool {
        cached.idle.is_some() && cached.pinned_until.is_none()
    }

    fn places(lease: &Lease) -> Vec<Place> {
        let groups = lease.blocks().0.iter().enumerate();
        groups.flat_map(|(group, blocks)| blocks.iter().map(move |block| (group, *block))).collect()
    }

    fn row(lease: &Lease, row: usize) -> Vec<BlockId> {
        lease.blocks().0.iter().map(|group| group[row]).collect()
    }

    /// A new lease: the rows that it found must match its hashes, and the rest must be unowned.
    pub(super) fn take(&mut self, lease: Lease, hashes: Vec<PrefixHash>, pin: Option<Pin>) {
        let found = lease.cached_blocks();
        for (row, hash) in self.rows_of(&hashes).into_iter().take(found).enumerate() {
            let cached = self.cached.get_mut(&hash).expect("what it found is cached");
            assert_eq!(cached.row, Self::row(&lease, row), "the row of another hash");
            cached.idle = None;
        }
        self.follow(None);
        self.held.push(Held { lease, hashes, complete: found, stored: 0, pin, spare: vec![] });
        let rows = self.held[self.held.len() - 1].lease.blocks_min();
        self.draft(self.held.len() - 1, found..rows);
    }

    /// A user writes its own rows.
    fn draft(&mut self, index: usize, rows: std::ops::Range<usize>) {
        for row in rows {
            for (group, block) in Self::row(&self.held[index].lease, row).into_iter().enumerate() {
                self.assert_writable(index, (group, block));
                self.drafts += 1;
                self.contents.insert((group, block), Content::Draft(self.drafts));
            }
        }
    }

    fn assert_writable(&self, index: usize, place: Place) {
        let users = self.held.iter().filter(|held| Self::places(&held.lease).contains(&place)).count();
        let spare = self.held.iter().any(|held| held.spare.contains(&place));
        let cached = self.cached.values().any(|cached| cached.row[place.0] == place.1);
        let barred = self.quarantined.iter().any(|q| q.blocks().0[place.0].contains(&place.1));
        assert!(users == 1 && !spare && !cached && !barred, "{place:?} of lease {index} is somebody else's too");
    }

    pub(super) fn grow(&mut self, index: usize, rows: usize) {
        let had = self.held[index].lease.blocks_min();
        let room = self.room(&[], 0);
        let grown = self.held[index].lease.grow(rows);
        assert_eq!(grown, rows <= room);
        self.follow(None);
        self.draft(index, had..had + if grown { rows } else { 0 });
    }

    /// Computes rows of a lease up to `rows`.
    pub(super) fn complete(&mut self, index: usize, rows: usize) {
        let hashes = self.rows_of(&self.held[index].hashes);
        let rows = rows.min(hashes.len()).min(self.held[index].lease.blocks_min());
        for (row, hash) in hashes.into_iter().enumerate().take(rows).skip(self.held[index].complete) {
            for place in Self::row(&self.held[index].lease, row).into_iter().enumerate() {
                self.assert_writable(index, place);
                self.contents.insert(place, Content::Kv(hash));
            }
        }
        self.held[index].complete = self.held[index].complete.max(rows);
    }

    /// Caches the complete rows of a lease.
    pub(super) fn store(&mut self, index: usize) {
        let hashes = self.rows_of(&self.held[index].hashes);
        let held = &mut self.held[index];
        let (rows, pin) = (held.complete, held.pin);
        let before: Vec<_> = (0..rows).map(|row| Self::row(&held.lease, row)).collect();
        let tokens = rows * self.stride * 16;
        held.lease.store(&held.hashes, tokens, Keep { ttl: TTL, pin }, self.now);
        for (row, before) in before.into_iter().enumerate() {
            let after = Self::row(&self.held[index].lease, row);
            let known = self.cached.get_mut(&hashes[row]).map(|cached| {
                cached.idle = None;
                cached.row.clone()
            });
            assert_eq!(
                after,
                known.unwrap_or_else(|| before.clone()),
                "it goes on with the cached row, if there is one"
            );
            if after != before {
                self.held[index].spare.extend(before.into_iter().enumerate());
            }
        }
        self.follow(Some(index));
        let stored = std::mem::replace(&mut self.held[index].stored, rows);
        if let Some(pin) = pin {
            self.pinned(&hashes, stored..rows, pin);
        }
    }

    /// The pool reports how many blocks the quota allowed; the first ones come first, each after a pinned one.
    fn pinned(&mut self, hashes: &[PrefixHash], rows: std::ops::Range<usize>, pin: Pin) {
        let known = self.cached.values().filter(|c| c.pinned_until.is_some()).count();
        let mut new = self.pool.cache_counts().pinned - known;
        for row in rows {
            let before = row.checked_sub(1).map(|row| self.cached[&hashes[row]].pinned_until);
            let Some(until) = before.map_or(Some(pin.until), |until| until.map(|until| until.min(pin.until))) else {
                break;
            };
            let cached = self.cached.get_mut(&hashes[row]).expect("just stored");
            match &mut cached.pinned_until {
                Some(had) => *had = (*had).max(until),
                None if new == 0 => break,
                None => {
                    new -= 1;
                    cached.pinned_until = Some(until);
                }
            }
        }
        assert_eq!(new, 0, "pins are of this prefix");
    }

    pub(super) fn fork(&mut self, index: usize, tokens: usize) {
        let block_tokens = self.stride * 16;
        let room = self.room(&[], 0);
        let needs = usize::from(!tokens.is_multiple_of(block_tokens));
        let forked = self.held[index].lease.fork(tokens, block_tokens, (needs, 0));
        assert_eq!(forked.is_some(), needs <= room);
        self.follow(None);
        let Some((lease, copy)) = forked else { return };
        let (whole, hashes) = (tokens / block_tokens, self.held[index].hashes.clone());
        let complete = self.held[index].complete.min(whole);
        let pin = self.held[index].pin;
        self.held.push(Held { lease, hashes, complete, stored: 0, pin, spare: vec![] });
        assert_eq!(copy.is_some(), needs == 1);
        self.draft(self.held.len() - 1, whole..whole + needs);
    }

    pub(super) fn let_go_of_spares(&mut self, index: usize) {
        self.held[index].lease.let_go_of_spares();
        self.held[index].spare.clear();
    }

    pub(super) fn drop_lease(&mut self, index: usize) {
        let rows = self.end_use(index);
        drop(self.held.swap_remove(index));
        self.idle(rows);
    }

    /// Rows of a fork that are not cached belong to several leases; such a lease is never under a grant.
    pub(super) fn may_be_quarantined(&self, index: usize) -> bool {
        let places = Self::places(&self.held[index].lease);
        let others = self.held.iter().enumerate().filter(|(i, _)| *i != index);
        let shared = others.flat_map(|(_, held)| [Self::places(&held.lease), held.spare.clone()].concat());
        let shared: Vec<_> = shared.collect();
        let is_cached = |place: &Place| self.cached.values().any(|cached| cached.row[place.0] == place.1);
        places.iter().all(|place| is_cached(place) || !shared.contains(place))
    }

    pub(super) fn quarantine(&mut self, index: usize) {
        let rows = self.end_use(index);
        let held = self.held.swap_remove(index);
        self.quarantined.push(held.lease.quarantine(index as u64));
        self.idle(rows);
    }

    /// Cached rows of a lease, the last one first.
    fn end_use(&self, index: usize) -> Vec<PrefixHash> {
        let lease = &self.held[index].lease;
        let rows = (0..lease.blocks_min()).rev().map(|row| Self::row(lease, row));
        rows.filter_map(|row| self.cached.iter().find(|(_, c)| c.row == row).map(|(hash, _)| *hash)).collect()
    }

    fn idle(&mut self, rows: Vec<PrefixHash>) {
        for hash in rows {
            let row = self.cached[&hash].row[0];
            if !self.held.iter().any(|held| held.lease.blocks().0[0].contains(&row)) {
                self.order += 1;
                let idle = Some((self.order, self.now));
                self.cached.get_mut(&hash).expect("it is cached").idle = idle;
            }
        }
    }

    pub(super) fn chill(&mut self, hashes: &[PrefixHash]) {
        self.pool.chill(hashes);
        let chain = &self.rows_of(hashes)[..self.find(hashes, usize::MAX)];
        let mut next = 0;
        let mut cold = vec![];
        for hash in chain.iter().rev() {
            let children = self.cached.values().filter(|c| c.parent == Some(*hash)).count();
            if children != next || !self.may_go(&self.cached[hash]) {
                break;
            }
            next = 1;
            cold.push(*hash);
        }
        for hash in cold.into_iter().rev() {
            self.coldest -= 1;
            let cached = self.cached.get_mut(&hash).expect("it is cached");
            cached.idle = cached.idle.map(|(_, since)| (self.coldest, since));
        }
    }

    pub(super) fn expire(&mut self) {
        self.pool.expire(self.now);
        let mut over: Vec<_> =
            self.cached.iter().filter(|(_, c)| c.pinned_until.is_some_and(|u| u <= self.now)).collect();
        over.sort_by_key(|(_, c)| c.idle);
        for hash in over.into_iter().map(|(hash, _)| *hash).collect::<Vec<_>>() {
            self.order += 1;
            let cached = self.cached.get_mut(&hash).expect("it is cached");
            cached.pinned_until = None;
            cached.idle = cached.idle.map(|_| (self.order, self.now));
        }
        let due = |c: &Cached| c.idle.is_some_and(|(_, since)| self.now - since >= TTL) && c.pinned_until.is_none();
        let due = self.cached.values().filter(|c| due(c)).count();
        assert_eq!(self.changed(None, Why::Time), due, "what is over goes, and nothing else");
    }

    fn follow(&mut self, stored_by: Option<usize>) {
        self.changed(stored_by, Why::Room);
    }

    /// Processes the changes that the cache reports, and checks that they were allowed; returns the number of removed blocks.
    fn changed(&mut self, stored_by: Option<usize>, why: Why) -> usize {
        let (changes, next) = self.pool.changes_since(self.cursor, usize::MAX).expect("nothing is forgotten");
        self.cursor = next;
        let mut removed = 0;
        for change in changes {
            match change {
                Change::Stored(hashes) => {
                    let held = &self.held[stored_by.expect("somebody stores")];
                    let rows = self.rows_of(&held.hashes);
                    for hash in hashes {
                        let row = rows.iter().position(|n| *n == hash).expect("a row of the lease that stores");
                        let parent = row.checked_sub(1).map(|row| rows[row]);
                        assert!(row < held.complete && parent.is_none_or(|parent| self.cached.contains_key(&parent)));
                        let row = Self::row(&held.lease, row);
                        self.cached.insert(hash, Cached { row, parent, idle: None, pinned_until: None });
                    }
                }
                Change::Removed(hashes) => hashes.into_iter().for_each(|hash| {
                    removed += 1;
                    self.removed(hash, why);
                }),
            }
        }
        removed
    }

    fn removed(&mut self, hash: PrefixHash, why: Why) {
        let gone = self.cached.remove(&hash).expect("it was cached");
        assert!(self.may_go(&gone), "a block that is used or pinned went");
        assert!(self.cached.values().all(|c| c.parent != Some(hash)), "leaves go first");
        let older =
            self.cached.values().filter(|c| self.may_go(c)).filter_map(|c| c.idle).map(|(order, _)| order).min();
        let oldest = older.is_none_or(|older| gone.idle.is_some_and(|(order, _)| order < older));
        assert!(oldest || why == Why::Time, "the oldest makes room first");
    }

    /// Checks all invariants.
    pub(super) fn check(&self) {
        let mut used: Vec<Place> = self.held.iter().flat_map(|h| Self::places(&h.lease)).collect();
        used.extend(self.held.iter().flat_map(|held| &held.spare));
        used.sort_unstable();
        used.dedup();
        let idle = self.cached.values().filter(|c| c.idle.is_some()).count() * self.groups;
        let quarantined: usize = self.quarantined.iter().map(|q| q.blocks().total()).sum();
        let counts = self.pool.counts();
        assert_eq!((counts.referenced, counts.cached, counts.quarantined), (used.len(), idle, quarantined));
        assert_eq!(counts.free, counts.total - used.len() - idle - quarantined, "nothing is lost");
        assert_eq!(self.pool.cache_counts().blocks, self.cached.len());
        for held in &self.held {
            for (row, hash) in self.rows_of(&held.hashes).into_iter().take(held.complete).enumerate() {
                for place in Self::row(&held.lease, row).into_iter().enumerate() {
                    assert_eq!(self.contents[&place], Content::Kv(hash), "a block changed under a lease");
                }
            }
        }
        for (hash, cached) in &self.cached {
            for place in cached.row.iter().copied().enumerate() {
                assert_eq!(self.contents[&place], Content::Kv(*hash), "a cached block changed");
                let in_use = used.binary_search(&place).is_ok();
                assert_eq!(cached.idle.is_none(), in_use);
            }
        }
        for quarantined in &self.quarantined {
            for (group, blocks) in quarantined.blocks().0.iter().enumerate() {
                assert!(blocks.iter().all(|block| used.binary_search(&(group, *block)).is_err()));
            }
        }
        let (hashes, cursor) = self.pool.snapshot().expect("there is a cache");
        assert_eq!((hashes.len(), cursor), (self.cached.len(), self.cursor));
        assert!(hashes.iter().all(|hash| self.cached.contains_key(hash)));
    }
}
