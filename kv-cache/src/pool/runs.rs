//! Free blocks of one group, stored as maximal runs of contiguous ids.

use baton_types::BlockId;
use std::collections::BTreeMap;

/// `start -> length` of each maximal run of free ids; adjacent runs are always merged.
#[derive(Clone, Debug)]
pub(super) struct FreeRuns {
    runs: BTreeMap<u32, u32>,
    count: usize,
}

impl FreeRuns {
    pub(super) fn new(blocks: u32) -> Self {
        Self { runs: BTreeMap::from([(0, blocks)]), count: blocks as usize }
    }

    pub(super) fn count(&self) -> usize {
        self.count
    }

    /// Takes `n` ids, which must be free: from `next` on if that is free, then the lowest run that fits the whole rest, otherwise the
    /// longest runs, to get as few pieces as possible.
    pub(super) fn take(&mut self, n: usize, next: Option<u32>) -> Vec<BlockId> {
        assert!(n <= self.count, "{n} blocks of {} free", self.count);
        let mut out = Vec::with_capacity(n);
        if let Some(start) = next.filter(|id| n > 0 && self.contains(*id)) {
            self.cut(start, n as u32, &mut out);
        }
        while out.len() < n {
            let rest = (n - out.len()) as u32;
            let whole = self.runs.iter().find(|(_, len)| **len >= rest);
            let run = whole.or_else(|| self.runs.iter().max_by_key(|(start, len)| (**len, std::cmp::Reverse(**start))));
            let start = *run.expect("the count says that a run is left").0;
            self.cut(start, rest, &mut out);
        }
        out
    }

    /// Makes one id free again.
    pub(super) fn put(&mut self, id: u32) {
        let (mut start, mut len) = (id, 1);
        if let Some((&before, &before_len)) = self.runs.range(..id).next_back().filter(|(s, l)| **s + **l == id) {
            (start, len) = (before, before_len + 1);
        }
        if let Some(after_len) = self.runs.remove(&(id + 1)) {
            len += after_len;
        }
        self.runs.insert(start, len);
        self.count += 1;
    }

    fn contains(&self, id: u32) -> bool {
        self.runs.range(..=id).next_back().is_some_and(|(start, len)| id < start + len)
    }

    /// Takes up to `n` ids from `id` on, out of the run that contains it.
    fn cut(&mut self, id: u32, n: u32, out: &mut Vec<BlockId>) {
        let (&start, &len) = self.runs.range(..=id).next_back().expect("a run contains the id");
        let taken = n.min(start + len - id);
        self.runs.remove(&start);
        if id > start {
            self.runs.insert(start, id - start);
        }
        if id + taken < start + len {
            self.runs.insert(id + taken, start + len - id - taken);
        }
        self.count -= taken as usize;
        out.extend((id..id + taken).map(BlockId));
    }

    /// Every free id, ascending.
    #[cfg(test)]
    pub(super) fn ids(&self) -> Vec<u32> {
        self.runs.iter().flat_map(|(start, len)| *start..start + len).collect()
    }

    /// Whether no two runs are adjacent, as merging must ensure.
    #[cfg(test)]
    pub(super) fn is_merged(&self) -> bool {
        self.runs.iter().zip(self.runs.iter().skip(1)).all(|((s, l), (next, _))| s + l < *next)
    }
}
