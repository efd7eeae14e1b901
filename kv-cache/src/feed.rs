//! Updates for a follower of a cache: a snapshot, then the changes, numbered.
//!
//! ```text
//! start ──> snapshot in parts ──> Removed, Stored ──> Removed, Stored ──> …
//!                 ^                                         │
//!                 └── the next changes have been dropped ───┘
//! ```
//!
//! Each follower has its own feed, which holds a position in the pool's bounded log of changes and at most one snapshot. A slow follower
//! does not delay others: when changes that it has not read are dropped from the log, it restarts with a snapshot.

use crate::{CacheChange, CacheUpdate, Change, ChangeCursor, PrefixHash, SharedPool};
use baton_types::Incarnation;
use std::collections::BTreeMap;

/// Most hashes of one update: 8 KiB of them. A receiver applies an update in one go, under a lock that other threads wait for.
pub const FEED_HASHES_MAX: usize = 512;

/// An update in the form in which it is sent.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeedUpdate {
    /// Number of the update, as in [`CacheUpdate`].
    pub sequence: u64,
    pub change: FeedChange,
}

/// As [`CacheChange`], with its hashes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FeedChange {
    /// Blocks that are cached from now on.
    Stored(Vec<PrefixHash>),
    /// Blocks that are no longer cached.
    Removed(Vec<PrefixHash>),
    /// A part of all cached blocks.
    Snapshot {
        /// Number of the part, from 0.
        part: u32,
        /// Whether it is the last one.
        last: bool,
        /// Blocks of this part.
        blocks: Vec<PrefixHash>,
    },
}

impl FeedUpdate {
    /// The update for an index, from this incarnation of a worker.
    pub fn of(&self, incarnation: Incarnation) -> CacheUpdate<'_> {
        let change = match &self.change {
            FeedChange::Stored(blocks) => CacheChange::Stored(blocks),
            FeedChange::Removed(blocks) => CacheChange::Removed(blocks),
            FeedChange::Snapshot { part, last, blocks } => CacheChange::Snapshot { part: *part, last: *last, blocks },
        };
        CacheUpdate { incarnation, sequence: self.sequence, change }
    }
}

/// The updates for one follower.
#[derive(Debug)]
pub struct CacheFeed {
    pool: SharedPool,
    sequence: u64,
    state: State,
}

#[derive(Debug)]
enum State {
    /// A snapshot is due.
    Behind,
    Snapshot {
        hashes: Vec<PrefixHash>,
        told: usize,
        part: u32,
        cursor: ChangeCursor,
    },
    /// Removals were sent; these blocks were stored meanwhile.
    Removed {
        stored: Vec<PrefixHash>,
        cursor: ChangeCursor,
    },
    /// Everything before this position was sent. `full` if there may be more at once.
    At {
        cursor: ChangeCursor,
        full: bool,
    },
}

impl CacheFeed {
    /// A feed that begins with a snapshot. For a pool without a cache it has no updates.
    pub fn new(pool: SharedPool) -> Self {
        Self { pool, sequence: 0, state: State::Behind }
    }

    /// The next update, if there is one now.
    pub fn next_update(&mut self) -> Option<FeedUpdate> {
        loop {
            match std::mem::replace(&mut self.state, State::Behind) {
                State::Behind => {
                    let (hashes, cursor) = self.pool.snapshot()?;
                    self.state = State::Snapshot { hashes, told: 0, part: 0, cursor };
                }
                State::Snapshot { hashes, told, part, cursor } => {
                    let end = hashes.len().min(told + FEED_HASHES_MAX);
                    let (last, blocks) = (end == hashes.len(), hashes[told..end].to_vec());
                    self.state = if last {
                        State::At { cursor, full: true }
                    } else {
                        State::Snapshot { hashes, told: end, part: part + 1, cursor }
                    };
                    return Some(self.update(FeedChange::Snapshot { part, last, blocks }));
                }
                State::Removed { stored, cursor } => {
                    self.state = State::At { cursor, full: true };
                    return Some(self.event(FeedChange::Stored(stored)));
                }
                State::At { cursor, .. } => {
                    let Some((changes, next)) = self.pool.changes_since(cursor, FEED_HASHES_MAX) else {
                        self.sequence += 1; // The snapshot replaces the dropped changes.
                        continue;
                    };
                    let full = changes.iter().map(|change| change.hashes().len()).sum::<usize>() == FEED_HASHES_MAX;
                    let (removed, stored) = net(&changes);
                    self.state = State::At { cursor: next, full };
                    return match (removed.is_empty(), stored.is_empty()) {
                        (true, true) => None,
                        (true, false) => Some(self.event(FeedChange::Stored(stored))),
                        (false, true) => Some(self.event(FeedChange::Removed(removed))),
                        (false, false) => {
                            self.state = State::Removed { stored, cursor: next };
                            Some(self.event(FeedChange::Removed(removed)))
                        }
                    };
                }
            }
        }
    }

    /// Whether there may be another update already. After `None` there is none until something changes.
    pub fn has_more(&self) -> bool {
        !matches!(self.state, State::At { full: false, .. })
    }

    fn event(&mut self, change: FeedChange) -> FeedUpdate {
        self.sequence += 1;
        self.update(change)
    }

    fn update(&self, change: FeedChange) -> FeedUpdate {
        FeedUpdate { sequence: self.sequence, change }
    }
}

/// Net effect of changes, removed and stored: the last change of each hash. In this order, a follower never assumes more blocks than were
/// cached before or are cached after the changes.
fn net(changes: &[Change]) -> (Vec<PrefixHash>, Vec<PrefixHash>) {
    let mut last: BTreeMap<PrefixHash, bool> = BTreeMap::new();
    for change in changes {
        let stored = matches!(change, Change::Stored(_));
        last.extend(change.hashes().iter().map(|hash| (*hash, stored)));
    }
    let hashes = |is: bool| last.iter().filter(|(_, stored)| **stored == is).map(|(hash, _)| *hash).collect();
    (hashes(false), hashes(true))
}
