//! What every worker does for routers besides its role: reports its load, drains, returns its instance record and serves its model's
//! bundle.

use crate::drain::{Drain, DrainPhase, DrainState};
use crate::report::{Report, Wanted};
use baton_engine::EngineHandle;
use baton_kv_transfer::KvTransfer;
use baton_types::{AdapterCard, Digest, InstanceRecord, Party, Runtime};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Reports that wait for a slow router.
const REPORTS_MAX: usize = 2;
/// Longest drain that may be requested, as for `drain.drain_ms_max`.
const DRAIN_MAX: Duration = Duration::from_secs(3_600);

/// Claims that are not adopted yet; only a decode worker has any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Number of claimed sequences.
    pub sequences: usize,
    /// Tokens of those prompts that hold no blocks yet.
    pub tokens: u64,
}

/// Returns the current claims.
pub type Claims = Arc<dyn Fn() -> Claimed + Send + Sync>;

/// The service of every worker for routers.
#[derive(Clone)]
pub struct WorkerService {
    /// The worker that reports.
    pub party: Party,
    /// The record that it registers.
    pub record: InstanceRecord,
    /// The engine whose load is reported.
    pub engine: EngineHandle,
    /// The transfer that moves its KV.
    pub transfer: KvTransfer,
    /// Digest and bytes of the bundle.
    pub bundle: Option<(Digest, Bytes)>,
    /// Capacity that claims have taken, see [`Claimed`].
    pub claimed: Claims,
    /// Notified of cache changes, see [`crate::report::cache_changes`].
    pub cache_changed: watch::Receiver<()>,
    /// Its LoRA adapters, where it serves any.
    pub adapters: Option<watch::Receiver<Arc<[AdapterCard]>>>,
    pub drain: Drain,
    /// Bound of a drain that states none.
    pub drain_max: Duration,
    /// Ends the report streams.
    pub stop: CancellationToken,
    /// Runs the tasks of report streams.
    pub runtime: Arc<dyn Runtime>,
}

impl WorkerService {
    /// Reports to a router until either side ends the stream.
    pub fn reports(&self, wanted: Wanted) -> mpsc::Receiver<Report> {
        let (reports, receiver) = mpsc::channel(REPORTS_MAX);
        self.runtime.spawn(Box::pin(self.clone().report(reports, wanted)));
        receiver
    }

    /// Drains this worker for at most `bound`, if it is the start `meant`. Returns the drain's progress.
    ///
    /// # Errors
    /// The reason for the operator: it drains already, or another start was meant.
    pub fn start_drain(&self, meant: &Party, bound: Option<Duration>) -> Result<watch::Receiver<DrainState>, String> {
        if *meant != self.party {
            return Err(format!("{} is another start than the one that was to drain", self.party));
        }
        let bound = bound.map_or(self.drain_max, |bound| bound.min(DRAIN_MAX));
        if !self.drain.start(self.runtime.sleep_until(self.runtime.now() + bound)) {
            let DrainState { phase, running, .. } = *self.drain.state().borrow();
            let name = &self.party.instance;
            return Err(match phase {
                DrainPhase::Drained { .. } => format!("{name} is drained already; restart it to serve again"),
                _ => format!("{name} drains already; {running} requests run there"),
            });
        }
        Ok(self.drain.state())
    }
}
