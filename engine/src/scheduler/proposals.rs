//! Rows and blocks for proposed tokens, which a step may or may not sample.

use super::memory::has;
use super::{Scheduler, Segment};
use crate::scheduler::SequenceKey;
use baton_kv_cache::StateBefore;
use baton_types::seeded;
use std::time::Instant;

/// What becomes of the other rows that a step has of a sequence.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rest {
    /// There are none, or they were recorded before.
    Nothing,
    /// Proposals that were sampled are recorded next.
    Accepted,
    /// Some are of proposals that were not sampled.
    Rejected,
}

impl Scheduler {
    /// Adds rows for up to `drafts` proposals to a decode row of the last plan: those that fit into the sequence's blocks, or into free ones
    /// above what is kept for reservations and for growth. Nothing is preempted for them. No step with the sequence may be launched.
    pub fn propose(&mut self, segment: &mut Segment, drafts: usize) {
        let kept = self.kept(self.awaited);
        let (size, chunk) = (self.config.block_tokens, self.chunk());
        let Some(entry) = self.entries.get_mut(&segment.key) else { return };
        let (computed, end) = (entry.computed, segment.position + segment.rows);
        let Some(lease) = &mut entry.lease else { return };
        // Windows have room for as many positions at once.
        let drafts = drafts.min(chunk - segment.rows.min(chunk));
        let (positions, state) = (computed..end + drafts, StateBefore::Kept);
        let missing = lease.missing(positions.clone(), state).into_iter().zip(kept).map(|(n, kept)| n + kept);
        let fits = has(&self.pool.available(), &missing.collect::<Vec<_>>()) && lease.hold(positions, state);
        let drafts = match fits {
            true => drafts,
            false if self.has_states => 0,
            false => drafts.min((lease.blocks_end() * size).saturating_sub(end)),
        };
        segment.rows += drafts;
        segment.drafts += drafts;
    }

    /// Returns the blocks that were taken for proposals of a plan that are not launched.
    pub fn withdrawn(&mut self, key: SequenceKey) {
        let lease = self.entries.get_mut(&key).and_then(|entry| Some((entry.len, entry.lease.as_mut()?)));
        if let Some((len, lease)) = lease {
            lease.give_back_after(len);
        }
    }

    /// Records that of the proposals in a finished step so many were not sampled. The KV of their rows counts for nothing, the next steps
    /// store it again; blocks that were taken for them alone are returned. A state has taken in all of them: the next step computes what was
    /// sampled again, from the state before.
    pub fn rejected(&mut self, key: SequenceKey, drafts: usize, now: Instant) {
        let (size, has_states) = (self.config.block_tokens, self.has_states);
        let Some(entry) = self.entries.get_mut(&key).filter(|_| drafts > 0) else { return };
        entry.launched_rows = entry.launched_rows.saturating_sub(drafts);
        entry.launched_tokens = entry.launched_tokens.saturating_sub(drafts);
        if has_states {
            entry.go_back();
        }
        if seeded!(RejectedKvCached) {
            entry.computed += 1;
            entry.share(size, now);
            entry.computed -= 1;
        }
        self.withdrawn(key);
    }
}
