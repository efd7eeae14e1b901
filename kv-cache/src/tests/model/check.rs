//! What changed in the cache, and the invariants.

use super::{Cached, Content, Model, Place, Why};
use crate::{Change, PrefixHash};

impl Model {
    pub(super) fn follow(&mut self, stored_by: Option<usize>) {
        self.changed(stored_by, Why::Room);
    }

    /// Processes the changes that the cache reports, and checks that they were allowed; returns the number of removed blocks.
    pub(super) fn changed(&mut self, stored_by: Option<usize>, why: Why) -> usize {
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
                        let parent = parent.filter(|_| self.is_tree);
                        assert!(row < held.complete && parent.is_none_or(|parent| self.cached.contains_key(&parent)));
                        let tables = self.shape.groups.iter().zip(&held.lease.tables().0);
                        let row = tables.map(|(group, table)| table.get(row).filter(|_| group.kind.is_by_position()));
                        let row = row.collect();
                        self.cached.insert(hash, Cached { row, parent, idle: None, pinned_until: None });
                    }
                }
                Change::Removed(hashes) => hashes.into_iter().for_each(|hash| {
                    removed += 1;
                    self.removed(hash, why);
                }),
            }
        }
        self.changed_sides(stored_by, why);
        removed
    }

    /// Blocks of groups with a window, and states, may have gone alone. A lease that stores may have given its state.
    fn changed_sides(&mut self, stored_by: Option<usize>, why: Why) {
        for (hash, row) in self.pool.lock().entries() {
            let known = self.cached[&hash].row.clone();
            for (group, (known, now)) in known.into_iter().zip(&row).enumerate() {
                if known == *now {
                    continue;
                }
                if let (Some(block), Some(by)) = (*now, stored_by) {
                    let table = &self.held[by].lease.tables().0[group];
                    assert!(!self.shape.groups[group].kind.is_by_position() && table.blocks.contains(&block));
                    self.cached.get_mut(&hash).expect("it is cached").row[group] = *now;
                    continue;
                }
                assert!(now.is_none() && group != self.main && why == Why::Room, "only blocks of side groups go alone");
                self.cached.get_mut(&hash).expect("it is cached").row[group] = None;
            }
        }
    }

    fn removed(&mut self, hash: PrefixHash, why: Why) {
        let gone = self.cached.remove(&hash).expect("it was cached");
        assert!(self.may_go(&gone), "a block that is used or pinned went");
        assert!(self.cached.values().all(|c| c.parent != Some(hash)), "leaves go first");
        let older =
            self.cached.values().filter(|c| self.may_go(c)).filter_map(|c| c.idle).map(|(order, _)| order).min();
        let oldest = older.is_none_or(|older| gone.idle.is_some_and(|(order, _)| order < older));
        // Rows at the end without the block of a side group go with it.
        assert!(oldest || why == Why::Time || self.has_sides, "the oldest makes room first");
    }

    /// Checks all invariants.
    pub(in crate::tests) fn check(&self) {
        let mut used: Vec<Place> = self.held.iter().flat_map(|h| Self::places(&h.lease)).collect();
        used.extend(self.held.iter().flat_map(|held| &held.spare));
        used.sort_unstable();
        used.dedup();
        let is_used = |place: &Place| used.binary_search(place).is_ok();
        let cached = self.cached.iter().flat_map(|(hash, cached)| {
            let row = cached.row.iter().enumerate();
            row.filter_map(move |(group, block)| Some((hash, (group, (*block)?))))
        });
        for group in 0..self.shape.groups.len() {
            let of_group = |place: &Place| place.0 == group;
            let held = used.iter().filter(|place| of_group(place)).count();
            let idle = cached.clone().filter(|(_, place)| of_group(place) && !is_used(place)).count();
            let quarantined: usize = self.quarantined.iter().map(|q| q.blocks().0[group].len()).sum();
            let counts = self.pool.counts_of(group);
            assert_eq!((counts.referenced, counts.cached, counts.quarantined), (held, idle, quarantined));
            assert_eq!(counts.free, counts.total - held - idle - quarantined, "nothing is lost");
        }
        assert_eq!(self.pool.cache_counts().blocks, self.cached.len());
        let (room, available) = (self.room(&[], 0, 0), self.pool.available());
        let between = room.least.iter().zip(&room.most).zip(&available);
        assert!(between.into_iter().all(|((least, most), n)| (least..=most).contains(&n)), "{available:?}");
        for held in &self.held {
            for (row, hash) in self.rows_of(&held.hashes).into_iter().take(held.complete).enumerate() {
                for place in Self::row(&held.lease, row) {
                    assert_eq!(self.contents[&place], Content::Kv(hash), "a block changed under a lease");
                }
            }
            for (kind, table) in self.kinds().zip(&held.lease.tables().0) {
                let needed = self.first_needed(held, kind)..held.complete;
                assert!(table.covers(&needed), "the next position needs {needed:?} of {table:?}");
            }
        }
        for (hash, place) in cached {
            assert_eq!(self.contents[&place], Content::Kv(*hash), "a cached block changed");
            if place.0 == self.main {
                assert_eq!(self.cached[hash].idle.is_none(), is_used(&place));
            }
        }
        for quarantined in &self.quarantined {
            for (group, blocks) in quarantined.blocks().0.iter().enumerate() {
                assert!(blocks.iter().all(|block| !is_used(&(group, *block))));
            }
        }
        let (hashes, cursor) = self.pool.snapshot().expect("there is a cache");
        assert_eq!((hashes.len(), cursor), (self.cached.len(), self.cursor));
        assert!(hashes.iter().all(|hash| self.cached.contains_key(hash)));
    }
}
