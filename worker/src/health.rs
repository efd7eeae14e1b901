//! The answers to a worker's probes.

use crate::drain::{Drain, DrainPhase};
use baton_engine::EngineHandle;
use baton_kv_transfer::KvTransfer;
use baton_node::admin::Health;
use baton_node::announce::{Announcement, Announcer};
use baton_node::membership::RegistrationHandle;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

/// A worker whose step takes longer than this is not ready meanwhile. Operators who look at pods see it long before `engine.step_ms_max`,
/// after which the worker counts as hung. Routers do not use this probe: they place and move requests by what they observe themselves.
const STILL_MAX: Duration = Duration::from_secs(4);

type Ready = Box<dyn Fn() -> Result<(), String> + Send + Sync>;

/// Inputs of the answers. Each exists only from some point of the start on.
#[derive(Default)]
pub(crate) struct Vitals {
    works: OnceLock<(EngineHandle, KvTransfer)>,
    ready: OnceLock<Ready>,
    left: OnceLock<Left>,
}

/// A drained worker that waits for its restart.
struct Left {
    drain: Drain,
    max: Duration,
}

impl Left {
    fn is_live(&self) -> Result<(), String> {
        match self.drain.drained_for().filter(|since| !self.max.is_zero() && *since >= self.max) {
            Some(since) => Err(format!("it was drained {} s ago, and it has not been restarted", since.as_secs())),
            None => Ok(()),
        }
    }
}

impl Vitals {
    /// Called when the model is loaded and its threads run.
    pub(crate) fn works(&self, engine: &EngineHandle, transfer: &KvTransfer) {
        let _ = self.works.set((engine.clone(), transfer.clone()));
    }

    /// Called when it registers. The first admission by a router is logged and announced. Once the worker is drained, the supervisor has
    /// `drained_max` to restart it; after that the probe fails. Zero waits forever.
    pub(crate) fn registered(
        &self,
        registration: &RegistrationHandle,
        drain: &Drain,
        drained_max: Duration,
        announcer: Announcer,
    ) {
        let _ = self.left.set(Left { drain: drain.clone(), max: drained_max });
        let mut state = registration.state();
        let seen = registration.state();
        let drain = drain.state();
        let _ = self.ready.set(Box::new(move || match (drain.borrow().phase, &*seen.borrow()) {
            (DrainPhase::Draining, _) => Err("it drains".into()),
            (DrainPhase::Drained { .. }, _) => Err("it is drained; restart it to serve again".into()),
            (DrainPhase::Serving, state) if state.is_ready() => Ok(()),
            (DrainPhase::Serving, state) => Err(format!("no router has admitted this worker: {state:?}")),
        }));
        tokio::spawn(async move {
            if state.wait_for(|s| s.is_ready()).await.is_ok() {
                announcer.say(&Announcement::Ready);
            }
        });
    }

    /// Whether the worker's threads make progress; if one does not, only a restart helps. Loading counts as live: the startup probe
    /// bounds it, not this one.
    fn is_live(&self) -> Result<(), String> {
        match self.works.get().map(|(engine, transfer)| (engine.healthy(), transfer.healthy())) {
            Some((false, _)) => Err("the engine's loop does not move".into()),
            Some((_, false)) => Err("a thread of the data plane panicked".into()),
            Some((true, true)) | None => self.left.get().map_or(Ok(()), Left::is_live),
        }
    }

    /// Whether the model is loaded and its threads run. Admission is not required: a restart does not help a worker whose routers are
    /// down.
    fn is_started(&self) -> Result<(), String> {
        self.works.get().map(drop).ok_or_else(|| "loads the model".into())
    }

    /// Whether routers would send it work, and it would do that work.
    pub(crate) fn is_ready(&self) -> Result<(), String> {
        self.is_live()?;
        let still = self.works.get().map_or(Duration::ZERO, |(engine, _)| engine.still());
        if still >= STILL_MAX {
            return Err(format!("the engine's loop has not moved for {} s", still.as_secs()));
        }
        self.ready.get().map_or_else(|| Err("loads the model".into()), |ready| ready())
    }

    pub(crate) fn health(self: &Arc<Self>) -> Health {
        let (live, ready) = (self.clone(), self.clone());
        let started = self.clone();
        Health::new(move || live.is_live(), move || ready.is_ready()).once(move || started.is_started())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_that_loads_is_alive_and_has_not_started() {
        let vitals = Vitals::default();
        assert_eq!(vitals.is_live(), Ok(()));
        assert_eq!(vitals.is_started(), Err("loads the model".into()));
        assert_eq!(vitals.is_ready(), Err("loads the model".into()));
    }

    #[tokio::test(start_paused = true)]
    async fn a_drained_worker_that_nobody_restarts_is_not_alive_after_a_bound() {
        for (max, alive_after_a_day) in [(Duration::from_secs(600), false), (Duration::ZERO, true)] {
            let (vitals, drain) = (Vitals::default(), Drain::new(Arc::new(baton_node::TokioRuntime::current())));
            let _ = vitals.left.set(Left { drain: drain.clone(), max });
            drain.start(std::future::pending());
            drain.drained().await;
            tokio::time::sleep(Duration::from_secs(599)).await;
            assert_eq!(vitals.is_live(), Ok(()));
            tokio::time::sleep(Duration::from_secs(24 * 3600)).await;
            assert_eq!(vitals.is_live().is_ok(), alive_after_a_day, "{:?}", vitals.is_live());
        }
    }
}
