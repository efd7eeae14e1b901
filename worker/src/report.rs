//! The reports that a worker sends to a router over one stream: its load, at regular intervals, and changes of its prefix cache in
//! between.
//!
//! A slow router receives the newest load once it reads again, and the cache changes that it missed, or a snapshot. The worker never
//! waits for a router, and what it holds for one is bounded.

use crate::service::WorkerService;
use baton_kv_cache::{CacheFeed, FeedUpdate, SharedPool};
use baton_types::{AdapterCard, BlockCounts, LoadReport, Runtime};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Shortest time between two load reports.
pub(crate) const PERIOD: Duration = Duration::from_millis(50);
/// Longest time between two load reports, in units of [`PERIOD`]: 1 s.
const QUIET_TICKS_MAX: u32 = 20;
/// Pause after an update of the cache, in which further changes are collected. A router's view of the cache is late by at most this long.
const CACHE_PAUSE: Duration = Duration::from_millis(5);
/// Resolution of the time for which an engine's loop has made no progress. Steps take less.
const STILL_MS: u64 = 250;

/// One report to a router.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    Load(LoadReport),
    /// What changed in the cache, or a part of its contents.
    Cache(FeedUpdate),
    /// All adapters, where they changed.
    Adapters(Arc<[AdapterCard]>),
}

/// What a router wants reported besides the load.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Wanted {
    /// Changes of the prefix cache.
    pub cache: bool,
    /// Adapters.
    pub adapters: bool,
}

/// A receiver that is notified of every change of the cache of `pool`. Call it once per pool and clone the receiver.
pub fn cache_changes(pool: &SharedPool) -> watch::Receiver<()> {
    let (changed, seen) = watch::channel(());
    pool.on_changed(move || changed.send_replace(()));
    seen
}

/// A time in milliseconds, rounded down so that it does not change the reports of an engine that makes progress.
fn cut(still: Duration) -> u64 {
    let ms = u64::try_from(still.as_millis()).unwrap_or(u64::MAX);
    ms - ms % STILL_MS
}

/// The cache reports of a stream.
struct Cache {
    feed: CacheFeed,
    changed: watch::Receiver<()>,
    /// When to look at the cache next; `None` means when it changes.
    due: Option<Instant>,
    /// No cache report before this time.
    earliest: Instant,
}

impl Cache {
    fn new(pool: SharedPool, changed: watch::Receiver<()>, now: Instant) -> Self {
        Self { feed: CacheFeed::new(pool), changed, due: Some(now), earliest: now }
    }

    /// Waits until there may be something to report.
    async fn due(&mut self, runtime: &dyn Runtime) {
        if self.due.is_none() {
            if self.changed.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
            self.due = Some(self.earliest);
        }
        if let Some(due) = self.due {
            runtime.sleep_until(due).await;
        }
    }

    fn update(&mut self, now: Instant) -> Option<FeedUpdate> {
        let update = self.feed.next_update();
        self.due = match &update {
            Some(_) if self.feed.has_more() => Some(now),
            Some(_) => {
                self.earliest = now + CACHE_PAUSE;
                // Changes made while this report was sent were not waited for.
                Some(self.earliest)
            }
            None => None,
        };
        update
    }
}

/// Waits until the adapters are others.
async fn changed(adapters: &mut Option<watch::Receiver<Arc<[AdapterCard]>>>) {
    if let Some(adapters) = adapters
        && adapters.changed().await.is_ok()
    {
        return;
    }
    std::future::pending().await
}

impl WorkerService {
    /// Reports until the router disconnects or the worker stops.
    pub(crate) async fn report(self, reports: mpsc::Sender<Report>, wanted: Wanted) {
        let runtime = &*self.runtime;
        let mut cache = wanted.cache.then(|| Cache::new(self.engine.pool(), self.cache_changed.clone(), runtime.now()));
        let (mut last, mut quiet, mut tick) = (None, 0, runtime.now() + PERIOD);
        let (mut load_due, mut cache_due) = (true, false);
        let mut adapters = self.adapters.clone().filter(|_| wanted.adapters);
        // Before the load: a router that takes requests for this worker knows what it has.
        let mut adapters_due = adapters.is_some();
        loop {
            let look = async {
                match &mut cache {
                    Some(cache) => cache.due(runtime).await,
                    None => std::future::pending().await,
                }
            };
            let permit = tokio::select! {
                biased;
                () = self.stop.cancelled() => return,
                () = reports.closed() => return,
                permit = reports.reserve(), if load_due || cache_due || adapters_due => permit,
                () = runtime.sleep_until(tick) => {
                    tick += PERIOD;
                    quiet += 1;
                    load_due |= quiet >= QUIET_TICKS_MAX || last.as_ref() != Some(&self.load());
                    continue;
                }
                () = changed(&mut adapters), if !adapters_due => {
                    adapters_due = true;
                    continue;
                }
                () = look, if !cache_due => {
                    cache_due = true;
                    continue;
                }
            };
            let Ok(permit) = permit else { return };
            if let Some(cards) = adapters.as_mut().filter(|_| std::mem::take(&mut adapters_due)) {
                permit.send(Report::Adapters(cards.borrow_and_update().clone()));
            } else if load_due {
                let load = self.load();
                last = Some(load.clone());
                permit.send(Report::Load(load));
                (load_due, quiet) = (false, 0);
            } else {
                if let Some(update) = cache.as_mut().and_then(|cache| cache.update(runtime.now())) {
                    permit.send(Report::Cache(update));
                }
                cache_due = false;
            }
        }
    }

    fn load(&self) -> LoadReport {
        let (load, claimed) = (self.engine.load(), (self.claimed)());
        let (blocks, moved) = (load.blocks, self.transfer.stats().total);
        LoadReport {
            waiting: (load.waiting + claimed.sequences) as u32,
            waiting_tokens: load.waiting_tokens as u64,
            running: load.running as u32,
            running_tokens: load.running_tokens as u64,
            blocks: Some(BlockCounts {
                total: blocks.total as u64,
                free: blocks.free as u64,
                referenced: blocks.referenced as u64,
                cached: blocks.cached as u64,
                quarantined: blocks.quarantined as u64,
            }),
            prefill_tokens_per_s: load.prefill_tokens_per_s,
            decode_steps_per_s: load.decode_steps_per_s,
            claimed_tokens: claimed.tokens,
            healthy: self.engine.healthy() && self.transfer.healthy(),
            draining: self.drain.has_begun(),
            steps: load.steps,
            generated_tokens: Some(load.generated_tokens),
            prefilled_tokens: Some(load.prefill_rows),
            kv_bytes: Some(moved.bytes_put + moved.bytes_adopted),
            still_ms: Some(cut(self.engine.still())),
            lacks_blocks: Some(self.engine.lacks_blocks()),
        }
    }
}
