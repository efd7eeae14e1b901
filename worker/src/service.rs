//! What every worker does for routers beside its role: reports its load, drains, says what it registers and serves its model's bundle.

use crate::drain::{Drain, DrainPhase, DrainState};
use crate::report::Report;
use baton_engine::EngineHandle;
use baton_kv_transfer::KvTransfer;
use baton_types::{Digest, InstanceRecord, Party, Runtime};
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

/// Reports that wait for a slow router.
const REPORTS_MAX: usize = 2;
/// Longest drain that can be asked for, as for `drain.drain_ms_max`.
const DRAIN_MAX: Duration = Duration::from_secs(3_600);

/// What is claimed and not adopted yet; only a decode worker has any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claimed {
    /// Sequences, which will come.
    pub sequences: usize,
    /// Tokens of their prompts.
    pub tokens: u64,
}

/// Tells what is claimed now.
pub type Claims = Arc<dyn Fn() -> Claimed + Send + Sync>;

/// What every worker serves to routers.
#[derive(Clone)]
pub struct WorkerService {
    /// Who reports.
    pub party: Party,
    /// What it registers.
    pub record: InstanceRecord,
    /// Whose load.
    pub engine: EngineHandle,
    /// How its KV travels.
    pub transfer: KvTransfer,
    /// Digest and bytes of the bundle.
    pub bundle: Option<(Digest, Bytes)>,
    /// See [`Claimed`].
    pub claimed: Claims,
    /// See [`crate::report::cache_changes`].
    pub cache_changed: watch::Receiver<()>,
    pub drain: Drain,
    /// Bound of a drain that states none.
    pub drain_max: Duration,
    /// Ends reports.
    pub stop: CancellationToken,
    /// Runs what it does.
    pub runtime: Arc<dyn Runtime>,
}

impl WorkerService {
    /// Reports to a router until either goes; with what changes in the cache where `cache_events` asks for it.
    pub fn reports(&self, cache_events: bool) -> mpsc::Receiver<Report> {
        let (reports, receiver) = mpsc::channel(REPORTS_MAX);
        self.runtime.spawn(Box::pin(self.clone().report(reports, cache_events)));
        receiver
    }

    /// Drains this start of the worker, `meant`, for at most `bound`; how that goes on.
    ///
    /// # Errors
    /// Why it does not, for the operator: it drains already, or another start was meant.
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
