//! What a router hears of a worker over its one stream: load, at a pace of its own, and between that what the prefix cache does.
//!
//! A router that is slow is sent the newest load once it takes something, and of the cache what it missed, or a snapshot. Nothing waits
//! for it, and what is held for it is bounded.

use crate::service::WorkerService;
use baton_kv_cache::{CacheFeed, FeedUpdate, SharedPool};
use baton_types::{BlockCounts, LoadReport, Runtime};
use std::time::{Duration, Instant};
use tokio::sync::{mpsc, watch};

/// Shortest time between two load reports.
pub(crate) const PERIOD: Duration = Duration::from_millis(50);
/// Longest time between two load reports, in units of [`PERIOD`]: 1 s.
const QUIET_TICKS_MAX: u32 = 20;
/// After an update of the cache was sent, further changes are gathered for so long. Placement is wrong by no more.
const CACHE_PAUSE: Duration = Duration::from_millis(5);
/// Resolution of the report how long an engine's loop stands still. Steps take less.
const STILL_MS: u64 = 250;

/// What a router hears.
#[derive(Clone, Debug, PartialEq)]
pub enum Report {
    /// The load now.
    Load(LoadReport),
    /// What changed in the cache, or a part of what is in it.
    Cache(FeedUpdate),
}

/// Tells whenever the cache of `pool` changed. To be called once for each pool: what is cloned from it hears the same.
pub fn cache_changes(pool: &SharedPool) -> watch::Receiver<()> {
    let (changed, seen) = watch::channel(());
    pool.on_changed(move || changed.send_replace(()));
    seen
}

/// A time in milliseconds, cut so that it changes no report of an engine that moves.
fn cut(still: Duration) -> u64 {
    let ms = u64::try_from(still.as_millis()).unwrap_or(u64::MAX);
    ms - ms % STILL_MS
}

/// The part of a stream that is about the cache.
struct Cache {
    feed: CacheFeed,
    changed: watch::Receiver<()>,
    /// When it is looked at next; `None` where that is once it changes.
    due: Option<Instant>,
    /// No report before then.
    earliest: Instant,
}

impl Cache {
    fn new(pool: SharedPool, changed: watch::Receiver<()>, now: Instant) -> Self {
        Self { feed: CacheFeed::new(pool), changed, due: Some(now), earliest: now }
    }

    /// Waits until there may be something to tell.
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
                // What changed while this one was sent was not waited for.
                Some(self.earliest)
            }
            None => None,
        };
        update
    }
}

impl WorkerService {
    /// Reports until the router goes or the worker stops.
    pub(crate) async fn report(self, reports: mpsc::Sender<Report>, cache_events: bool) {
        let runtime = &*self.runtime;
        let mut cache = cache_events.then(|| Cache::new(self.engine.pool(), self.cache_changed.clone(), runtime.now()));
        let (mut last, mut quiet, mut tick) = (None, 0, runtime.now() + PERIOD);
        let (mut load_due, mut cache_due) = (true, false);
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
                permit = reports.reserve(), if load_due || cache_due => permit,
                () = runtime.sleep_until(tick) => {
                    tick += PERIOD;
                    quiet += 1;
                    load_due |= quiet >= QUIET_TICKS_MAX || last.as_ref() != Some(&self.load());
                    continue;
                }
                () = look, if !cache_due => {
                    cache_due = true;
                    continue;
                }
            };
            let Ok(permit) = permit else { return };
            if load_due {
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
