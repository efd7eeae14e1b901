//! Applies one worker's cache reports from one stream.

use super::{Prefixes, Stream};
use crate::port::{CacheReport, CacheReportChange};
use baton_kv_cache::{Applied, CacheChange, CacheUpdate, JoinError};
use baton_types::{InstanceRecord, Party};
use std::sync::Arc;

/// Why a worker's blocks are ignored until its next snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// Its stream ended, or the worker is gone.
    Ended,
    /// A sequence number is missing.
    Missed,
    /// It sent an update that is not valid.
    Malformed(&'static str),
    /// The index refused it.
    Refused(JoinError),
}

impl Dropped {
    /// All names, for labels.
    pub(crate) const NAMES: [&'static str; 4] = ["ended", "missed", "malformed", "refused"];

    /// Its name, for labels.
    pub(crate) const fn name(&self) -> &'static str {
        match self {
            Self::Ended => "ended",
            Self::Missed => "missed",
            Self::Malformed(_) => "malformed",
            Self::Refused(_) => "refused",
        }
    }
}

impl std::fmt::Display for Dropped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended => f.write_str("its stream ended"),
            Self::Missed => f.write_str("something of what it said is missing"),
            Self::Malformed(what) => f.write_str(what),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

/// Follows one stream. Once it is dropped, the worker's blocks are ignored.
pub(crate) struct Follower {
    prefixes: Arc<Prefixes>,
    party: Party,
    block_tokens: u32,
    /// Blocks of its pool. Workers report removed blocks before those that took their place, so they never report more.
    blocks_max: u64,
    /// Number of the stream, set by the first update: a worker that sends none is not in the index.
    stream: Option<Stream>,
    ended: Dropped,
}

impl Follower {
    pub(super) fn new(prefixes: Arc<Prefixes>, record: &InstanceRecord) -> Self {
        let (party, block_tokens) = (record.party.clone(), record.layout.block_tokens());
        let blocks_max = record.capacity_tokens.div_ceil(u64::from(block_tokens));
        Self { prefixes, party, block_tokens, blocks_max, stream: None, ended: Dropped::Ended }
    }

    /// Applies a report. After an error the rest of this stream must not be used.
    pub(crate) fn take(&mut self, report: &Result<CacheReport, &'static str>) -> Result<(), Dropped> {
        let result = match report {
            Ok(report) => self.apply(report),
            Err(what) => Err(Dropped::Malformed(what)),
        };
        if let Err(why) = &result {
            self.ended = why.clone();
        }
        result
    }

    fn apply(&mut self, report: &CacheReport) -> Result<(), Dropped> {
        let CacheReport { sequence, change, blocks } = report;
        let (name, change, ends_snapshot) = match *change {
            CacheReportChange::Stored => ("stored", CacheChange::Stored(blocks), false),
            CacheReportChange::Removed => ("removed", CacheChange::Removed(blocks), false),
            CacheReportChange::Snapshot { part, last } => {
                ("snapshot", CacheChange::Snapshot { part, last, blocks }, last)
            }
        };
        let (instance, incarnation) = (&self.party.instance, self.party.incarnation);
        let mut state = self.prefixes.state.write();
        let stream = match self.stream {
            Some(stream) => stream,
            None => {
                state.index.leave(instance);
                state.streams.remove(instance);
                state.index.join(instance, incarnation, self.block_tokens).map_err(Dropped::Refused)?;
                state.opened += 1;
                let stream = Stream { incarnation, number: state.opened };
                state.streams.insert(instance.clone(), stream);
                *self.stream.insert(stream)
            }
        };
        if state.streams.get(instance) != Some(&stream) {
            return Ok(()); // A newer stream of this instance has begun; only that one counts.
        }
        let applied = state.index.apply(instance, CacheUpdate { incarnation, sequence: *sequence, change });
        let held = state.index.blocks_of(instance) as u64;
        drop(state);
        if held > self.blocks_max {
            return Err(Dropped::Malformed("it reports more cached blocks than its pool has"));
        }
        match applied {
            Applied::Done => {
                let metrics = &self.prefixes.metrics;
                metrics.count_blocks(name, blocks.len());
                if ends_snapshot {
                    metrics.snapshot(if *sequence == 0 { "start" } else { "behind" });
                }
                Ok(())
            }
            Applied::Stale | Applied::Unknown => Ok(()),
            Applied::SnapshotNeeded => Err(Dropped::Missed),
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let instance = &self.party.instance;
        if self.stream.is_some() || self.ended != Dropped::Ended {
            self.prefixes.metrics.forgotten(self.ended.name());
        }
        let Some(stream) = self.stream else { return };
        let mut state = self.prefixes.state.write();
        if state.streams.get(instance) == Some(&stream) {
            state.streams.remove(instance);
            state.index.leave(instance);
            drop(state);
            // Missing reports do not affect prefixes that are being computed there now.
            if self.ended == Dropped::Ended {
                self.prefixes.pending.lock().left(instance);
            }
        }
    }
}
