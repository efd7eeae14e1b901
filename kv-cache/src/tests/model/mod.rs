//! A simple model of pool and cache: sets and lists, recounted each time. It makes no decisions: it takes those of the real ones, checks
//! that they were allowed, and knows what every block must hold.

mod check;

use crate::tests::TTL;
use crate::{ChangeCursor, Keep, Lease, Pin, PoolShape, PrefixHash, Quarantined, SharedPool, StateBefore};
use baton_types::{BlockId, BlockTables, GroupKind};
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
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
    /// Tokens that it began with: no earlier position is computed.
    least: usize,
    pin: Option<Pin>,
    /// Blocks that were replaced.
    spare: Vec<Place>,
}

/// A cached row.
struct Cached {
    row: Vec<Option<BlockId>>,
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

/// Blocks of each group.
pub(super) struct Room {
    /// Those that are available for certain.
    pub(super) least: Vec<usize>,
    /// The same, and those that a pin may keep.
    pub(super) most: Vec<usize>,
}

impl Room {
    /// Whether `wanted` blocks must be given: `None` if pins decide.
    pub(super) fn fits(&self, wanted: &[usize], keep_free: usize) -> Option<bool> {
        let fits = |room: &[usize]| room.iter().zip(wanted).all(|(room, wanted)| *room >= wanted + keep_free);
        (fits(&self.least) == fits(&self.most)).then(|| fits(&self.least))
    }
}

pub(super) struct Model {
    pub(super) pool: SharedPool,
    pub(super) shape: PoolShape,
    pub(super) held: Vec<Held>,
    pub(super) quarantined: Vec<Quarantined>,
    pub(super) now: Instant,
    stride: usize,
    /// The first group that decides whether a row is cached.
    main: usize,
    /// Whether rows are cached only together with those before them, and whether there are groups with a window beside them.
    pub(super) is_tree: bool,
    has_sides: bool,
    contents: HashMap<Place, Content>,
    cached: BTreeMap<PrefixHash, Cached>,
    cursor: ChangeCursor,
    drafts: u64,
    order: i64,
    coldest: i64,
}

impl Model {
    pub(super) fn new(shape: PoolShape) -> Self {
        let pool = crate::tests::pool_of(shape.clone());
        let (held, quarantined, contents, cached) = Default::default();
        let cursor = pool.snapshot().unwrap().1;
        let (stride, now) = (shape.block_tokens / 16, Instant::now());
        let main = shape.main();
        let is_tree = !matches!(shape.groups[main[0]].kind, GroupKind::Window(_));
        let has_sides = main.len() < shape.groups.len();
        let (drafts, order, coldest, main) = (0, 0, 0, main[0]);
        Self {
            pool,
            shape,
            held,
            quarantined,
            now,
            stride,
            main,
            is_tree,
            has_sides,
            contents,
            cached,
            cursor,
            drafts,
            order,
            coldest,
        }
    }

    /// Hashes of whole blocks.
    fn rows_of(&self, hashes: &[PrefixHash]) -> Vec<PrefixHash> {
        hashes.chunks_exact(self.stride).map(|block| block[self.stride - 1]).collect()
    }

    fn kinds(&self) -> impl Iterator<Item = GroupKind> {
        self.shape.groups.iter().map(|group| group.kind)
    }

    /// First row of a group that the next position of a lease needs.
    fn first_needed(&self, held: &Held, kind: GroupKind) -> usize {
        let position = (held.complete * self.shape.block_tokens).max(held.least);
        kind.first_for(position, self.shape.block_tokens).min(held.complete)
    }

    /// Rows of a group that the position after `rows` rows needs.
    fn needed(&self, kind: GroupKind, rows: usize) -> Range<usize> {
        let size = self.shape.block_tokens;
        kind.first_for(rows * size, size).min(rows)..rows
    }

    /// Leading rows of a prompt that are cached, where it can continue; or where a peer can, which fills rows up to `received`.
    pub(super) fn find(&self, hashes: &[PrefixHash], rows_max: usize, received: Option<usize>) -> usize {
        let rows = self.rows_of(hashes);
        let has = |row: usize, group: usize| self.cached.get(&rows[row]).is_some_and(|c| c.row[group].is_some());
        let is_hit = |end: &usize| {
            let mut groups = self.kinds().enumerate();
            let brings = |kind| kind == GroupKind::State && received.is_some_and(|rows| *end < rows);
            self.cached.contains_key(&rows[end - 1])
                && groups.all(|(group, kind)| brings(kind) || self.needed(kind, *end).all(|row| has(row, group)))
        };
        (1..=rows.len().min(rows_max)).rev().find(is_hit).unwrap_or(0)
    }

    /// Blocks available for a lease that finds this many rows of a prompt cached, and computes this position next.
    pub(super) fn room(&self, hashes: &[PrefixHash], found: usize, position: usize) -> Room {
        let finds: Vec<_> = self.rows_of(hashes).into_iter().take(found).collect();
        let groups = self.kinds().enumerate().map(|(group, kind)| {
            let needed = &finds[kind.first_for(position, self.shape.block_tokens).min(found)..];
            let idle = self.cached.iter().filter(|(hash, cached)| {
                !needed.contains(hash) && cached.row[group].is_some_and(|block| self.users((group, block)) == 0)
            });
            let (free, idle) = (self.pool.counts_of(group).free, idle.map(|(_, cached)| cached.pinned_until));
            let is_side = self.has_sides && matches!(kind, GroupKind::Window(_) | GroupKind::State);
            let (unpinned, all) =
                idle.fold((0, 0), |(unpinned, all), pin| (unpinned + usize::from(pin.is_none()), all + 1));
            (free + unpinned, free + if is_side { all } else { unpinned })
        });
        let (least, most) = groups.unzip();
        Room { least, most }
    }

    /// Number of leases with this block in their tables.
    fn users(&self, place: Place) -> usize {
        self.held.iter().filter(|held| held.lease.held().any(|held| held == place)).count()
    }

    fn may_go(&self, cached: &Cached) -> bool {
        cached.idle.is_some() && cached.pinned_until.is_none()
    }

    fn places(lease: &Lease) -> Vec<Place> {
        lease.held().collect()
    }

    /// The blocks of a lease at an index.
    fn row(lease: &Lease, row: usize) -> Vec<Place> {
        let groups = lease.tables().0.iter().enumerate();
        groups.filter_map(|(group, table)| Some((group, table.get(row)?))).collect()
    }

    /// A new lease: the rows that it found must match its hashes, and the rest must be unowned.
    pub(super) fn take(&mut self, lease: Lease, hashes: Vec<PrefixHash>, pin: Option<Pin>) {
        let found = lease.cached_blocks();
        for (row, hash) in self.rows_of(&hashes).into_iter().take(found).enumerate() {
            for (group, block) in Self::row(&lease, row) {
                let cached = self.cached.get_mut(&hash).expect("what it found is cached");
                assert_eq!(cached.row[group], Some(block), "the block of another hash");
                if group == self.main {
                    cached.idle = None;
                }
            }
        }
        self.held.push(Held { lease, hashes, complete: found, stored: 0, least: 0, pin, spare: vec![] });
        self.follow(None);
        self.draft(self.held.len() - 1, found..usize::MAX);
    }

    /// A user writes its own rows.
    fn draft(&mut self, index: usize, rows: Range<usize>) {
        let tables = self.held[index].lease.tables().clone();
        for (group, table) in tables.0.iter().enumerate() {
            for row in table.indices().filter(|row| rows.contains(row)) {
                let place = (group, table.get(row).unwrap());
                self.assert_writable(index, place);
                self.drafts += 1;
                self.contents.insert(place, Content::Draft(self.drafts));
            }
        }
    }

    fn assert_writable(&self, index: usize, place: Place) {
        let spare = self.held.iter().any(|held| held.spare.contains(&place));
        let cached = self.cached.values().any(|cached| cached.row[place.0] == Some(place.1));
        let barred = self.quarantined.iter().any(|q| q.blocks().0[place.0].contains(&place.1));
        let alone = self.users(place) == 1 && !spare && !cached && !barred;
        assert!(alone, "{place:?} of lease {index} is somebody else's too");
    }

    /// Computes up to `rows` rows more: gets their blocks, returns those that left a window, and writes them.
    pub(super) fn advance(&mut self, index: usize, rows: usize) {
        let (complete, size) = (self.held[index].complete, self.shape.block_tokens);
        let positions = (complete * size).max(self.held[index].least)..(complete + rows) * size;
        let before = self.held[index].lease.tables().clone();
        let missing = self.held[index].lease.missing(positions.clone(), StateBefore::Replaced);
        let held = self.held[index].lease.hold(positions.clone(), StateBefore::Replaced);
        // What it gave up first is available to it, unless others use it.
        self.retired(index, &before);
        self.follow(None);
        if !held {
            assert!(missing.iter().any(|n| *n > 0), "it had all blocks");
            assert_ne!(self.room(&[], 0, 0).fits(&missing, 0), Some(true));
            return;
        }
        let tables = self.held[index].lease.tables();
        for (group, kind) in self.shape.groups.iter().map(|group| group.kind).enumerate() {
            let live = kind.live(positions.clone(), size);
            let needed = if kind.is_by_position() { live.clone() } else { live.start..live.start + 1 };
            assert!(tables.0[group].covers(&needed), "{live:?} of {:?}", tables.0[group]);
            assert_eq!(tables.0[group].first, before.0[group].first.max(live.start), "nothing else is held");
        }
        for (group, table) in before.0.iter().enumerate() {
            let end = self.held[index].lease.tables().0[group].end();
            let fresh: Vec<_> = (table.end()..end)
                .filter_map(|row| Some((group, self.held[index].lease.tables().0[group].get(row)?)))
                .collect();
            for place in fresh {
                self.assert_writable(index, place);
                self.drafts += 1;
                self.contents.insert(place, Content::Draft(self.drafts));
            }
        }
        self.complete(index, complete + rows);
    }

    /// Holds what the next positions need, and goes back.
    pub(super) fn go_back(&mut self, index: usize, tokens: usize) {
        let from = (self.held[index].complete * self.shape.block_tokens).max(self.held[index].least);
        let before = self.held[index].lease.tables().clone();
        let held = self.held[index].lease.hold(from..from + tokens, StateBefore::Kept);
        self.retired(index, &before);
        self.follow(None);
        let lease = &mut self.held[index].lease;
        let has_states = self.shape.groups.iter().any(|group| group.kind == GroupKind::State);
        assert!(!held || lease.holds_state_before() == (has_states && from > 0));
        lease.undo();
        assert!(!held || !lease.holds_state_before());
    }

    /// Rows of the main group that a lease gave up become idle, in order. One of their blocks may be its own again already.
    fn retired(&mut self, index: usize, before: &BlockTables) {
        let main = self.main;
        for row in before.0[main].first..self.held[index].lease.tables().0[main].first {
            let Some(block) = before.0[main].get(row) else { continue };
            let mut others = self.held.iter().enumerate().filter(|(i, _)| *i != index);
            let is_used = others.any(|(_, held)| held.lease.tables().0[main].blocks.contains(&block));
            let cached = self.cached.values_mut().find(|c| c.row[main] == Some(block));
            if let (false, Some(cached)) = (is_used, cached) {
                self.order += 1;
                cached.idle = Some((self.order, self.now));
            }
        }
    }

    /// Writes rows of a lease up to `rows`.
    pub(super) fn complete(&mut self, index: usize, rows: usize) {
        let hashes = self.rows_of(&self.held[index].hashes);
        let rows = rows.min(hashes.len()).min(self.held[index].lease.blocks_end());
        if rows > self.held[index].complete {
            // As if half of what was there were a prompt.
            self.held[index].lease.settle(rows * self.shape.block_tokens, hashes.len() / 2 * self.shape.block_tokens);
            self.follow(None);
        }
        for (row, hash) in hashes.into_iter().enumerate().take(rows).skip(self.held[index].complete) {
            for place in Self::row(&self.held[index].lease, row) {
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
        let tokens = rows * self.shape.block_tokens;
        held.lease.store(&held.hashes, tokens, Keep { ttl: TTL, pin }, self.now);
        for (row, before) in before.into_iter().enumerate().skip(self.held[index].stored) {
            let after = Self::row(&self.held[index].lease, row);
            let Some(cached) = self.cached.get_mut(&hashes[row]) else {
                assert_eq!(after, before);
                continue;
            };
            for (before, after) in before.into_iter().zip(after) {
                match cached.row[before.0] {
                    // It goes on with its own state, which is cached where it has a block for the next.
                    _ if !self.shape.groups[before.0].kind.is_by_position() => assert_eq!(before, after),
                    Some(known) => assert_eq!(after.1, known, "it goes on with the cached block"),
                    None => cached.row[before.0] = Some(after.1),
                }
                if before.0 == self.main {
                    cached.idle = None;
                }
                if before != after {
                    self.held[index].spare.push(before);
                }
            }
        }
        self.follow(Some(index));
        let stored = std::mem::replace(&mut self.held[index].stored, rows);
        if let Some(pin) = pin {
            self.pinned(&hashes, stored..rows, pin);
        }
    }

    /// The pool reports how many blocks the quota allowed; the first ones come first, each after a pinned one.
    fn pinned(&mut self, hashes: &[PrefixHash], rows: Range<usize>, pin: Pin) {
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
        let size = self.shape.block_tokens;
        let (whole, needs) = (tokens / size, usize::from(!tokens.is_multiple_of(size)));
        let room = self.room(&[], 0, 0);
        let tables = self.held[index].lease.tables();
        let holds = self
            .kinds()
            .zip(&tables.0)
            .all(|(kind, table)| table.covers(&(kind.first_for(tokens, size).min(whole)..whole + needs)));
        let holds = holds && self.kinds().all(GroupKind::is_by_position);
        let forked = self.held[index].lease.fork(tokens, tokens, &[]);
        let fits = room.fits(&vec![needs; self.shape.groups.len()], 0);
        assert!(fits.is_none_or(|fits| forked.is_some() == (holds && fits)));
        let Some((lease, copy)) = forked else { return self.follow(None) };
        let hashes = self.held[index].hashes.clone();
        let complete = self.held[index].complete.min(whole);
        let pin = self.held[index].pin;
        self.held.push(Held { lease, hashes, complete, stored: 0, least: tokens, pin, spare: vec![] });
        self.follow(None);
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
        let is_cached = |place: &Place| self.cached.values().any(|cached| cached.row[place.0] == Some(place.1));
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
        let blocks = self.held[index].lease.tables().0[self.main].blocks.iter().rev();
        let of = |block: &BlockId| self.cached.iter().find(|(_, c)| c.row[self.main] == Some(*block));
        blocks.filter_map(of).map(|(hash, _)| *hash).collect()
    }

    fn idle(&mut self, rows: Vec<PrefixHash>) {
        for hash in rows {
            let block = self.cached[&hash].row[self.main].unwrap();
            if self.users((self.main, block)) == 0 {
                self.order += 1;
                let idle = Some((self.order, self.now));
                self.cached.get_mut(&hash).expect("it is cached").idle = idle;
            }
        }
    }

    pub(super) fn demote(&mut self, hashes: &[PrefixHash]) {
        self.pool.demote(hashes);
        if self.has_sides {
            return; // Their order is not followed.
        }
        let chain = &self.rows_of(hashes)[..self.find(hashes, usize::MAX, None)];
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
}
