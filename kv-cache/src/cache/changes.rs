//! The log of recent changes of a cache, for its followers.

use crate::PrefixHash;
use std::collections::VecDeque;

/// A run of changes of one kind. A block is identified by the prefix that ends with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Change {
    /// Blocks that are cached from now on.
    Stored(Vec<PrefixHash>),
    /// Blocks that are no longer cached.
    Removed(Vec<PrefixHash>),
}

#[allow(missing_docs, reason = "the names of methods say it")]
impl Change {
    pub fn hashes(&self) -> &[PrefixHash] {
        match self {
            Self::Stored(hashes) | Self::Removed(hashes) => hashes,
        }
    }
}

/// Position in the log of a cache's changes; everything before it has been read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ChangeCursor(u64);

/// The latest changes, up to a bound.
#[derive(Clone, Debug)]
pub(crate) struct Changes {
    log: VecDeque<(bool, PrefixHash)>,
    /// Number of the first one in the log.
    first: u64,
    max: usize,
}

impl Changes {
    pub(crate) fn new(max: usize) -> Self {
        Self { log: VecDeque::new(), first: 0, max }
    }

    pub(crate) fn push(&mut self, stored: bool, hash: PrefixHash) {
        if self.log.len() == self.max {
            self.log.pop_front();
            self.first += 1;
        }
        self.log.push_back((stored, hash));
    }

    /// The position after all changes so far.
    pub(crate) fn end(&self) -> ChangeCursor {
        ChangeCursor(self.first + self.log.len() as u64)
    }

    /// At most `max` changes from a position on, and the position after them; `None` if some of them were dropped.
    pub(crate) fn since(&self, cursor: ChangeCursor, max: usize) -> Option<(Vec<Change>, ChangeCursor)> {
        let skip = cursor.0.checked_sub(self.first)? as usize;
        let mut runs: Vec<Change> = Vec::new();
        let mut taken = 0;
        for &(stored, hash) in self.log.iter().skip(skip).take(max) {
            taken += 1;
            match (runs.last_mut(), stored) {
                (Some(Change::Stored(hashes)), true) | (Some(Change::Removed(hashes)), false) => hashes.push(hash),
                (_, true) => runs.push(Change::Stored(vec![hash])),
                (_, false) => runs.push(Change::Removed(vec![hash])),
            }
        }
        Some((runs, ChangeCursor(cursor.0 + taken)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(i: u8) -> PrefixHash {
        PrefixHash([i; 16])
    }

    #[test]
    fn runs_of_one_kind_come_together_and_what_is_forgotten_is_said() {
        let mut changes = Changes::new(4);
        let start = changes.end();
        [(true, 1), (true, 2), (false, 1), (true, 3)].iter().for_each(|&(stored, i)| changes.push(stored, hash(i)));
        let (runs, next) = changes.since(start, 9).unwrap();
        let expected =
            [Change::Stored(vec![hash(1), hash(2)]), Change::Removed(vec![hash(1)]), Change::Stored(vec![hash(3)])];
        assert_eq!((runs.as_slice(), next), (expected.as_slice(), changes.end()));
        let (runs, next) = changes.since(start, 1).unwrap();
        assert_eq!(runs, [Change::Stored(vec![hash(1)])]);
        changes.push(true, hash(4));
        assert_eq!(changes.since(start, 9), None);
        assert!(changes.since(next, 9).is_some());
        assert_eq!(changes.since(changes.end(), 9), Some((vec![], changes.end())));
    }
}
