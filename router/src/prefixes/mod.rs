//! What workers have cached, as far as this router knows: blocks that they report, and prompts that were placed on them
//! recently.
//!
//! ```text
//! worker's stream ──> Follower ──> index ──┐
//!                                          ├──> lookup, fill ──> placement ──> PrefixInProgress
//!               prefixes being computed ───┘                                     │
//!                          ^─────────────────────────────────────────────────────┘
//! ```
//!
//! A worker's blocks count while its stream is open and complete. Every request reads the index and every event writes
//! it, so a writer holds the lock for one message at most: [`FEED_HASHES_MAX`] blocks.

mod follower;
#[cfg(test)]
mod tests;

pub(crate) use follower::{Dropped, Follower};

use crate::metrics::PrefixMetrics;
use crate::placement::{PendingPrefixes, Worker};
use baton_kv_cache::{FEED_HASHES_MAX, HASH_TOKENS, IndexCounts, PrefixHash, PrefixIndex};
use baton_types::{Clock, Incarnation, InstanceId, InstanceRecord, Party, Runtime};
use parking_lot::{Mutex, RwLock};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio_util::sync::CancellationToken;

/// Most prefixes in progress that are remembered: those of 1,024 requests with 8,192 tokens each.
const PENDING_MAX: usize = 1024 * 8192 / HASH_TOKENS;
/// How often blocks without holders are swept if no events do it.
const SWEEP_EVERY: Duration = Duration::from_millis(100);
/// Entries per sweep: well under a millisecond.
const SWEEP_MAX: usize = 32 * FEED_HASHES_MAX;

/// Where prefixes are cached.
pub(crate) struct Prefixes {
    state: RwLock<State>,
    pending: Mutex<PendingPrefixes>,
    metrics: PrefixMetrics,
}

struct State {
    index: PrefixIndex,
    /// The current stream of each instance: of its incarnations, the one whose stream began last.
    streams: HashMap<InstanceId, Stream>,
    /// Number of streams opened so far.
    opened: u64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
struct Stream {
    incarnation: Incarnation,
    number: u64,
}

/// How many tokens of one prompt each worker has.
#[derive(Debug, Default)]
pub(crate) struct Found(HashMap<Party, usize>);

impl Found {
    /// Tokens from the start of the prompt that a worker reported.
    pub(crate) fn tokens(&self, worker: &Party) -> usize {
        self.0.get(worker).copied().unwrap_or(0)
    }

    /// All workers, in no order.
    pub(crate) fn all(&self) -> impl Iterator<Item = (&Party, usize)> {
        self.0.iter().map(|(party, tokens)| (party, *tokens))
    }
}

impl Prefixes {
    /// An empty index of at most `blocks_max` blocks, keyed with a secret of two random numbers.
    pub(crate) fn new(blocks_max: usize, secret: [u64; 2], metrics: PrefixMetrics) -> Self {
        let state = State { index: PrefixIndex::new(blocks_max, secret), streams: HashMap::new(), opened: 0 };
        Self { state: RwLock::new(state), pending: Mutex::new(PendingPrefixes::new(PENDING_MAX)), metrics }
    }

    /// Follows a worker on a stream that has just begun.
    pub(crate) fn follow(self: &Arc<Self>, record: &InstanceRecord) -> Follower {
        Follower::new(self.clone(), record)
    }

    /// How much of a prompt with these hashes each worker has; without hashes nothing is looked up.
    pub(crate) fn lookup(&self, hashes: &[PrefixHash], clock: &dyn Clock) -> Found {
        if hashes.is_empty() {
            return Found::default();
        }
        let begun = clock.now();
        let state = self.state.read();
        let party = |instance: &InstanceId| {
            let incarnation = state.streams.get(instance)?.incarnation;
            Some(Party { instance: instance.clone(), incarnation })
        };
        let found = state.index.lookup(hashes).into_iter();
        let found = found.filter_map(|cached| Some((party(cached.worker)?, cached.tokens))).collect();
        drop(state);
        self.metrics.looked_up(clock.now().saturating_duration_since(begun));
        Found(found)
    }

    /// Fills in how much of the prompt each worker of the view has, or will have in time.
    pub(crate) fn fill(&self, hashes: &[PrefixHash], found: &Found, view: &mut [Worker], now: Instant) {
        if hashes.is_empty() {
            return;
        }
        let pending = self.pending.lock();
        for worker in view {
            let (party, block_tokens) = (&worker.record.party, worker.record.layout.block_tokens() as usize);
            let tokens = pending.tokens(&party.instance, hashes, found.tokens(party), block_tokens, now);
            worker.cached_tokens = tokens as u64;
        }
    }

    /// A prompt with these hashes is being computed on `worker` from now on, expected to end before `until`. `None` if
    /// none of it will be cached, or the worker reports no cache.
    pub(crate) fn coming(
        self: &Arc<Self>,
        worker: &Party,
        hashes: &Arc<[PrefixHash]>,
        until: Instant,
    ) -> Option<PrefixInProgress> {
        let stream = self.state.read().streams.get(&worker.instance).copied();
        if hashes.is_empty() || stream.is_none_or(|stream| stream.incarnation != worker.incarnation) {
            return None;
        }
        self.pending.lock().placed(&worker.instance, hashes, until);
        Some(PrefixInProgress { prefixes: self.clone(), worker: worker.instance.clone(), hashes: hashes.clone() })
    }

    /// Prefixes in progress.
    pub(crate) fn in_progress(&self) -> usize {
        self.pending.lock().len()
    }

    /// Sizes of the index.
    pub(crate) fn counts(&self) -> IndexCounts {
        self.state.read().index.counts()
    }

    /// Sweeps blocks without holders until `stop` is cancelled.
    pub(crate) async fn sweep(self: Arc<Self>, runtime: Arc<dyn Runtime>, stop: CancellationToken) {
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = runtime.sleep(SWEEP_EVERY) => {
                    self.state.write().index.sweep(SWEEP_MAX);
                }
            }
        }
    }
}

impl std::fmt::Debug for Prefixes {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_tuple("Prefixes").field(&self.counts()).finish()
    }
}

/// A prefix in progress: once this is dropped, only the worker's own reports count.
pub(crate) struct PrefixInProgress {
    prefixes: Arc<Prefixes>,
    worker: InstanceId,
    hashes: Arc<[PrefixHash]>,
}

impl Drop for PrefixInProgress {
    fn drop(&mut self) {
        self.prefixes.pending.lock().ended(&self.worker, &self.hashes);
    }
}

impl std::fmt::Debug for PrefixInProgress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("PrefixInProgress").field("worker", &self.worker).field("hashes", &self.hashes.len()).finish()
    }
}
