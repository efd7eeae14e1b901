//! One worker's word on its cache, as it comes on one stream.

use super::{Prefixes, Stream};
use baton_kv_cache::{Applied, CacheChange, CacheUpdate, FEED_NAMES_MAX, JoinError, PrefixHash};
use baton_proto::v1::{self, cache_update::Change};
use baton_types::Party;
use std::sync::Arc;

/// Why a worker counts for nothing until its next snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Forgotten {
    /// Its stream ended, or the worker is gone.
    Ended,
    /// A number is missing.
    Missed,
    /// It sent what is no update.
    Malformed(&'static str),
    /// The index does not take it.
    Refused(JoinError),
}

impl Forgotten {
    /// Names of all, for labels.
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

impl std::fmt::Display for Forgotten {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Ended => f.write_str("its stream ended"),
            Self::Missed => f.write_str("something of what it said is missing"),
            Self::Malformed(what) => f.write_str(what),
            Self::Refused(error) => error.fmt(f),
        }
    }
}

/// What a message says.
pub(super) enum Told {
    Stored(Vec<PrefixHash>),
    Removed(Vec<PrefixHash>),
    Snapshot { part: u32, last: bool, blocks: Vec<PrefixHash> },
}

/// Hears one stream. Once it is dropped, the worker counts for nothing.
pub(crate) struct Follower {
    prefixes: Arc<Prefixes>,
    party: Party,
    block_tokens: u32,
    /// Number of the stream, from the first update on: who sends none is not in the index.
    stream: Option<Stream>,
    ended: Forgotten,
}

impl Follower {
    pub(super) fn new(prefixes: Arc<Prefixes>, party: Party, block_tokens: u32) -> Self {
        Self { prefixes, party, block_tokens, stream: None, ended: Forgotten::Ended }
    }

    /// Takes an update up. After an error nothing more of this stream is of use.
    pub(crate) fn take(&mut self, update: &v1::CacheUpdate) -> Result<(), Forgotten> {
        let result = told(update).and_then(|told| self.apply(update.sequence, &told));
        if let Err(why) = &result {
            self.ended = why.clone();
        }
        result
    }

    fn apply(&mut self, sequence: u64, told: &Told) -> Result<(), Forgotten> {
        let (change, ends_snapshot) = match told {
            Told::Stored(blocks) => (CacheChange::Stored(blocks), false),
            Told::Removed(blocks) => (CacheChange::Removed(blocks), false),
            Told::Snapshot { part, last, blocks } => {
                (CacheChange::Snapshot { part: *part, last: *last, blocks }, *last)
            }
        };
        let (instance, incarnation) = (&self.party.instance, self.party.incarnation);
        let mut state = self.prefixes.state.write();
        let stream = match self.stream {
            Some(stream) => stream,
            None => {
                state.index.leave(instance);
                state.streams.remove(instance);
                state.index.join(instance, incarnation, self.block_tokens).map_err(Forgotten::Refused)?;
                state.opened += 1;
                let stream = Stream { incarnation, number: state.opened };
                state.streams.insert(instance.clone(), stream);
                *self.stream.insert(stream)
            }
        };
        if state.streams.get(instance) != Some(&stream) {
            return Ok(()); // Another stream of this instance began since; it alone counts.
        }
        let applied = state.index.apply(instance, CacheUpdate { incarnation, sequence, change });
        drop(state);
        match applied {
            Applied::Done => {
                let metrics = &self.prefixes.metrics;
                metrics.told(told.name(), told.blocks());
                if ends_snapshot {
                    metrics.snapshot(if sequence == 0 { "start" } else { "behind" });
                }
                Ok(())
            }
            Applied::Stale | Applied::Unknown => Ok(()),
            Applied::SnapshotNeeded => Err(Forgotten::Missed),
        }
    }
}

impl Drop for Follower {
    fn drop(&mut self) {
        let instance = &self.party.instance;
        if self.stream.is_some() || self.ended != Forgotten::Ended {
            self.prefixes.metrics.forgotten(self.ended.name());
        }
        let Some(stream) = self.stream else { return };
        let mut state = self.prefixes.state.write();
        if state.streams.get(instance) == Some(&stream) {
            state.streams.remove(instance);
            state.index.leave(instance);
            drop(state);
            // What is missing says nothing of what is computed there at this moment.
            if self.ended == Forgotten::Ended {
                self.prefixes.pending.lock().left(instance);
            }
        }
    }
}

impl Told {
    const fn name(&self) -> &'static str {
        match self {
            Self::Stored(_) => "stored",
            Self::Removed(_) => "removed",
            Self::Snapshot { .. } => "snapshot",
        }
    }

    fn blocks(&self) -> usize {
        match self {
            Self::Stored(blocks) | Self::Removed(blocks) | Self::Snapshot { blocks, .. } => blocks.len(),
        }
    }
}

/// What a message says, if it is one.
fn told(update: &v1::CacheUpdate) -> Result<Told, Forgotten> {
    match &update.change {
        Some(Change::Stored(blocks)) => Ok(Told::Stored(names(blocks)?)),
        Some(Change::Removed(blocks)) => Ok(Told::Removed(names(blocks)?)),
        Some(Change::Snapshot(snapshot)) => {
            let v1::CacheSnapshot { part, last, names: blocks } = snapshot;
            Ok(Told::Snapshot { part: *part, last: *last, blocks: names(blocks)? })
        }
        None => Err(Forgotten::Malformed("it sent an update of its cache that says nothing known here")),
    }
}

fn names(bytes: &[u8]) -> Result<Vec<PrefixHash>, Forgotten> {
    let (names, rest) = bytes.as_chunks();
    if !rest.is_empty() || names.len() > FEED_NAMES_MAX {
        return Err(Forgotten::Malformed("it sent names of cached blocks that are too many, or not whole"));
    }
    Ok(names.iter().map(|name| PrefixHash(*name)).collect())
}
