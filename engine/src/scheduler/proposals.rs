//! Rows and blocks for proposed tokens, which a step may or may not sample.

use super::memory::has;
use super::{Scheduler, Segment};
use crate::scheduler::SequenceKey;
use baton_types::seeded;
use std::time::Instant;

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
        let missing: Vec<usize> = lease.missing(end + drafts).iter().zip(kept).map(|(n, kept)| n + kept).collect();
        let fits = has(&self.pool.available(), &missing) && lease.hold(computed..end + drafts);
        let drafts = if fits { drafts } else { drafts.min((lease.blocks_end() * size).saturating_sub(end)) };
        segment.rows += drafts;
        segment.drafts += drafts;
    }

    /// Records that of the proposals in a finished step so many were not sampled. The KV of their rows counts for nothing, the next steps
    /// store it again; blocks that were taken for them alone are returned.
    pub fn rejected(&mut self, key: SequenceKey, drafts: usize, now: Instant) {
        let size = self.config.block_tokens;
        let Some(entry) = self.entries.get_mut(&key).filter(|_| drafts > 0) else { return };
        entry.launched_rows = entry.launched_rows.saturating_sub(drafts);
        entry.launched_tokens = entry.launched_tokens.saturating_sub(drafts);
        if seeded!(RejectedKvCached) {
            entry.computed += 1;
            entry.share(size, now);
            entry.computed -= 1;
        }
        if let Some(lease) = &mut entry.lease {
            lease.give_back_after(entry.len);
        }
    }
}
