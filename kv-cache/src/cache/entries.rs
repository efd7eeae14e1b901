//! The entries of a cache, and the lists of idle ones: an arena with links, so that the lists take constant time, and an index by the time
//! of expiry, which takes logarithmic time.

use super::Pin;
use crate::PrefixHash;
use baton_types::{BlockId, seeded};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// Identifies an entry while it exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct EntryId(u32);

/// The list of an idle entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum IdleList {
    /// May be evicted, from the front.
    Evictable,
    /// Pinned: stays until the pin ends.
    Pinned,
}

/// One cached block (at most one of each group) and its place in the tree of prefixes.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    pub(crate) hash: PrefixHash,
    pub(crate) parent: Option<EntryId>,
    /// Number of cached blocks that continue this one.
    pub(crate) children: u32,
    pub(crate) ttl: Duration,
    pub(crate) pinned: Option<Pin>,
    /// The list, and when the last lease dropped the block; `None` while a lease holds it.
    idle: Option<(IdleList, Instant)>,
    before: Option<EntryId>,
    behind: Option<EntryId>,
}

impl Entry {
    pub(crate) fn idle_list(&self) -> Option<IdleList> {
        self.idle.map(|(list, _)| list)
    }

    /// When the entry expires, unless it is used before; `None` if it is in use or pinned, or never expires.
    fn expires_at(&self) -> Option<Instant> {
        let evictable = self.idle.filter(|(list, _)| *list == IdleList::Evictable);
        evictable.and_then(|(_, since)| since.checked_add(self.ttl))
    }

    /// Whether the entry may be evicted and has been idle for its whole retention time.
    pub(crate) fn has_expired(&self, now: Instant) -> bool {
        self.expires_at().is_some_and(|at| at <= now)
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Ends {
    first: Option<EntryId>,
    last: Option<EntryId>,
    len: usize,
}

/// All entries, and lists of those that may be evicted or are pinned.
#[derive(Clone, Debug)]
pub(crate) struct Entries {
    groups: usize,
    entries: Vec<Entry>,
    /// Blocks of each entry by group: `[entries, groups]`, flattened.
    blocks: Vec<Option<BlockId>>,
    vacant: Vec<EntryId>,
    evictable: Ends,
    pinned: Ends,
    /// Evictable entries by when they expire. Their list is in another order: retention times differ, and cold ones go in front.
    due: BTreeSet<(Instant, EntryId)>,
}

impl Entries {
    pub(crate) fn new(groups: usize) -> Self {
        let (evictable, pinned, due) = Default::default();
        Self { groups, entries: Vec::new(), blocks: Vec::new(), vacant: Vec::new(), evictable, pinned, due }
    }

    pub(crate) fn len(&self) -> usize {
        self.entries.len() - self.vacant.len()
    }

    /// Adds an entry that a lease holds; `blocks` has at most one block of each group.
    pub(crate) fn add(
        &mut self,
        hash: PrefixHash,
        parent: Option<EntryId>,
        ttl: Duration,
        blocks: impl Iterator<Item = Option<BlockId>>,
    ) -> EntryId {
        let entry = Entry { hash, parent, children: 0, ttl, pinned: None, idle: None, before: None, behind: None };
        let id = match self.vacant.pop() {
            Some(id) => {
                self.entries[id.0 as usize] = entry;
                id
            }
            None => {
                self.entries.push(entry);
                self.blocks.resize(self.entries.len() * self.groups, None);
                EntryId(self.entries.len() as u32 - 1)
            }
        };
        let row = id.0 as usize * self.groups..;
        self.blocks[row].iter_mut().zip(blocks).for_each(|(place, block)| *place = block);
        if let Some(parent) = parent {
            self.of_mut(parent).children += 1;
        }
        id
    }

    /// Removes an entry. It must be idle, and no cached block may continue it.
    pub(crate) fn remove(&mut self, id: EntryId) {
        assert!(self.of(id).children == 0, "the cache gives up leaves first");
        self.leave_list(id);
        if let Some(parent) = self.of(id).parent {
            self.of_mut(parent).children -= 1;
        }
        self.vacant.push(id);
    }

    pub(crate) fn of(&self, id: EntryId) -> &Entry {
        &self.entries[id.0 as usize]
    }

    pub(crate) fn of_mut(&mut self, id: EntryId) -> &mut Entry {
        &mut self.entries[id.0 as usize]
    }

    /// Its block of each group.
    pub(crate) fn blocks(&self, id: EntryId) -> &[Option<BlockId>] {
        &self.blocks[id.0 as usize * self.groups..][..self.groups]
    }

    /// Its block of one group.
    pub(crate) fn block_mut(&mut self, id: EntryId, group: usize) -> &mut Option<BlockId> {
        &mut self.blocks[id.0 as usize * self.groups + group]
    }

    /// Number of entries in a list.
    pub(crate) fn len_of(&self, list: IdleList) -> usize {
        self.ends_of(list).len
    }

    /// The first entry of a list.
    pub(crate) fn first(&self, list: IdleList) -> Option<EntryId> {
        self.ends_of(list).first
    }

    /// The entries of a list in order.
    pub(crate) fn in_list(&self, list: IdleList) -> Vec<EntryId> {
        std::iter::successors(self.first(list), |id| self.of(*id).behind).collect()
    }

    /// Expired evictable entries, in order of their expiry. Looks at no others.
    pub(crate) fn expired(&self, now: Instant) -> Vec<EntryId> {
        self.due.range(..=(now, EntryId(u32::MAX))).map(|(_, id)| *id).collect()
    }

    /// The last lease dropped it: appends it to its list.
    pub(crate) fn wait(&mut self, id: EntryId, now: Instant) {
        let is_pinned = self.of(id).pinned.is_some() && !seeded!(EvictedPin);
        let list = if is_pinned { IdleList::Pinned } else { IdleList::Evictable };
        self.leave_list(id);
        let last = self.ends(list).last;
        self.link(id, list, now, last, None);
    }

    /// Moves an evictable entry to the front of the list.
    pub(crate) fn wait_in_front(&mut self, id: EntryId) {
        let Some((IdleList::Evictable, since)) = self.of(id).idle else { return };
        self.leave_list(id);
        let first = self.first(IdleList::Evictable);
        self.link(id, IdleList::Evictable, since, None, first);
    }

    /// Removes it from its list: a lease holds it, or it is removed.
    pub(crate) fn leave_list(&mut self, id: EntryId) {
        if let Some(at) = self.of(id).expires_at() {
            self.due.remove(&(at, id));
        }
        let entry = self.of_mut(id);
        let Some((list, _)) = entry.idle.take() else { return };
        let (before, behind) = (entry.before.take(), entry.behind.take());
        match before {
            Some(before) => self.of_mut(before).behind = behind,
            None => self.ends(list).first = behind,
        }
        match behind {
            Some(behind) => self.of_mut(behind).before = before,
            None => self.ends(list).last = before,
        }
        self.ends(list).len -= 1;
    }

    fn link(&mut self, id: EntryId, list: IdleList, since: Instant, before: Option<EntryId>, behind: Option<EntryId>) {
        let entry = self.of_mut(id);
        (entry.idle, entry.before, entry.behind) = (Some((list, since)), before, behind);
        let expires_at = entry.expires_at();
        self.due.extend(expires_at.map(|at| (at, id)));
        match before {
            Some(before) => self.of_mut(before).behind = Some(id),
            None => self.ends(list).first = Some(id),
        }
        match behind {
            Some(behind) => self.of_mut(behind).before = Some(id),
            None => self.ends(list).last = Some(id),
        }
        self.ends(list).len += 1;
    }

    fn ends_of(&self, list: IdleList) -> &Ends {
        match list {
            IdleList::Evictable => &self.evictable,
            IdleList::Pinned => &self.pinned,
        }
    }

    fn ends(&mut self, list: IdleList) -> &mut Ends {
        match list {
            IdleList::Evictable => &mut self.evictable,
            IdleList::Pinned => &mut self.pinned,
        }
    }
}
