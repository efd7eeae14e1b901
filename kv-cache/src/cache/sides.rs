//! The idle blocks of side groups: groups with a window or states, whose blocks are given up one by one while their entries stay.

use super::entries::EntryId;
use std::collections::{BTreeMap, BTreeSet, HashMap};

/// Where the idle block of an entry is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum IdleBlock {
    /// In the queue, at this number.
    Evictable(i64),
    /// Kept until the pin of its entry ends.
    Pinned,
}

/// The idle blocks of one group.
#[derive(Clone, Debug, Default)]
struct SideGroup {
    places: HashMap<EntryId, IdleBlock>,
    queue: BTreeMap<i64, EntryId>,
    pinned_max: usize,
}

/// The idle blocks of all side groups, by entry.
#[derive(Clone, Debug)]
pub(crate) struct Sides {
    /// `None` for groups that are none.
    groups: Vec<Option<SideGroup>>,
    newest: i64,
    coldest: i64,
    replaced: i64,
}

/// Where the queues begin with blocks whose place others take.
const REPLACED: i64 = i64::MIN / 2;

impl Sides {
    /// `pinned_max[g]` is how many blocks of group `g` pins may keep, `None` where it is no side group.
    pub(crate) fn new(pinned_max: impl Iterator<Item = Option<usize>>) -> Self {
        let side =
            |pinned_max: Option<usize>| pinned_max.map(|pinned_max| SideGroup { pinned_max, ..SideGroup::default() });
        Self { groups: pinned_max.map(side).collect(), newest: 0, coldest: 0, replaced: 0 }
    }

    /// The side groups.
    pub(crate) fn groups(&self) -> impl Iterator<Item = usize> + use<> {
        let sides = self.groups.iter().enumerate().filter(|(_, side)| side.is_some());
        sides.map(|(group, _)| group).collect::<Vec<_>>().into_iter()
    }

    /// Number of blocks of a group that may be evicted.
    pub(crate) fn evictable(&self, group: usize) -> usize {
        self.groups[group].as_ref().map_or(0, |side| side.queue.len())
    }

    /// Whether the entry's block may be evicted.
    pub(crate) fn is_evictable(&self, group: usize, id: EntryId) -> bool {
        let place = self.groups[group].as_ref().and_then(|side| side.places.get(&id));
        matches!(place, Some(IdleBlock::Evictable(_)))
    }

    /// The entry whose block is to be evicted next.
    pub(crate) fn oldest(&self, group: usize) -> Option<EntryId> {
        self.groups[group].as_ref()?.queue.first_key_value().map(|(_, id)| *id)
    }

    /// The last lease dropped the entry's block. A pin keeps it within the group's bound.
    pub(crate) fn wait(&mut self, group: usize, id: EntryId, is_pinned: bool) {
        self.leave(group, id);
        let Some(side) = &mut self.groups[group] else { return };
        if is_pinned && side.places.len() - side.queue.len() < side.pinned_max {
            side.places.insert(id, IdleBlock::Pinned);
            return;
        }
        self.newest += 1;
        side.queue.insert(self.newest, id);
        side.places.insert(id, IdleBlock::Evictable(self.newest));
    }

    /// The block is no longer idle, or no longer there.
    pub(crate) fn leave(&mut self, group: usize, id: EntryId) {
        let Some(side) = &mut self.groups[group] else { return };
        if let Some(IdleBlock::Evictable(at)) = side.places.remove(&id) {
            side.queue.remove(&at);
        }
    }

    /// Entries of which a pin keeps an idle block, in order.
    pub(crate) fn pinned(&self) -> BTreeSet<EntryId> {
        let places = self.groups.iter().flatten().flat_map(|side| &side.places);
        places.filter(|(_, place)| **place == IdleBlock::Pinned).map(|(id, _)| *id).collect()
    }

    /// The pin of an entry ended: its blocks may be evicted.
    pub(crate) fn unpin(&mut self, id: EntryId) {
        for group in self.groups() {
            let is_pinned = |side: &SideGroup| side.places.get(&id) == Some(&IdleBlock::Pinned);
            if self.groups[group].as_ref().is_some_and(is_pinned) {
                self.wait(group, id, false);
            }
        }
    }

    /// Moves the evictable blocks of an entry to the front of their queues.
    pub(crate) fn wait_in_front(&mut self, id: EntryId) {
        self.coldest -= 1;
        (0..self.groups.len()).for_each(|group| self.place_at(group, id, self.coldest));
    }

    /// Moves the evictable block of an entry before all that were not moved so, and behind those.
    pub(crate) fn replace(&mut self, group: usize, id: EntryId) {
        self.replaced += 1;
        self.place_at(group, id, REPLACED + self.replaced);
    }

    fn place_at(&mut self, group: usize, id: EntryId, place: i64) {
        let Some(side) = &mut self.groups[group] else { return };
        let Some(IdleBlock::Evictable(at)) = side.places.get_mut(&id) else { return };
        side.queue.remove(at);
        *at = place;
        side.queue.insert(place, id);
    }
}
