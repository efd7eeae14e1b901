//! A worker's drain. From its start the worker accepts no new calls. Running calls may end within a bound; the rest are cut off, so that
//! routers continue them on other workers. Then the worker deregisters. Routers learn of the drain from the worker's load reports, with
//! any kind of membership.

use baton_node::membership::RegistrationHandle;
use baton_types::{ErrorKind, RequestError, Runtime};
use parking_lot::Mutex;
use std::fmt;
use std::future::Future;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// Time that calls have to send their error once they are cut off.
const CUT_MAX: Duration = Duration::from_secs(1);
/// Shortest time from the start of a drain to the removal of the worker's record. Its load reports announce the drain first, so that no
/// router counts it as lost: changes are reported within 50 ms.
const TELL: Duration = Duration::from_millis(200);
/// Longest wait for routers, or etcd, to receive the deregistration.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// The state of a drain.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DrainPhase {
    /// The worker accepts calls.
    #[default]
    Serving,
    /// It accepts no calls, and some may still run.
    Draining,
    /// All calls have ended.
    Drained {
        /// Whether its registration is known to be removed; otherwise its lease will expire.
        deregistered: bool,
    },
}

/// The state of a drain with counts of the worker's calls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainState {
    /// The phase of the drain.
    pub phase: DrainPhase,
    pub running: u32,
    /// Calls that ended normally since the drain began.
    pub finished: u32,
    /// Calls that were cut off.
    pub cut_off: u32,
}

/// Counts a worker's calls, and drains it, once. Cloning shares it.
#[derive(Clone)]
pub struct Drain(Arc<Shared>);

struct Shared {
    runtime: Arc<dyn Runtime>,
    state: watch::Sender<DrainState>,
    cut: CancellationToken,
    registration: Mutex<Option<RegistrationHandle>>,
    drained: OnceLock<Instant>,
}

impl fmt::Debug for Drain {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Drain").field(&*self.0.state.borrow()).finish()
    }
}

impl Drain {
    /// For a worker that accepts calls.
    pub fn new(runtime: Arc<dyn Runtime>) -> Self {
        let (state, cut) = Default::default();
        Self(Arc::new(Shared { runtime, state, cut, registration: Mutex::default(), drained: OnceLock::new() }))
    }

    /// Counts a new call; `Err` from the start of a drain on.
    pub fn enter(&self) -> Result<RunningCall, RequestError> {
        let taken = self.0.state.send_if_modified(|state| {
            let serves = state.phase == DrainPhase::Serving;
            state.running += u32::from(serves);
            serves
        });
        let refused = || RequestError::new(ErrorKind::Unavailable, "it drains; send the request to another worker");
        taken.then(|| RunningCall(self.clone())).ok_or_else(refused)
    }

    /// Sets the registration to remove at the end of the drain.
    pub fn registered(&self, registration: RegistrationHandle) {
        *self.0.registration.lock() = Some(registration);
    }

    /// The current state, and every change of it.
    pub fn state(&self) -> watch::Receiver<DrainState> {
        self.0.state.subscribe()
    }

    /// Whether it no longer accepts calls.
    pub fn has_begun(&self) -> bool {
        self.0.state.borrow().phase != DrainPhase::Serving
    }

    /// Starts to drain; calls still running when `bound` ends are cut off. `false` if a drain was started before.
    pub fn start(&self, bound: impl Future<Output = ()> + Send + 'static) -> bool {
        let started = self.0.state.send_if_modified(|state| {
            let serves = state.phase == DrainPhase::Serving;
            if serves {
                state.phase = DrainPhase::Draining;
            }
            serves
        });
        if started {
            self.0.runtime.spawn(Box::pin(self.clone().run(bound)));
        }
        started
    }

    /// Cuts off all running calls now.
    pub fn cut_off(&self) {
        self.0.cut.cancel();
    }

    /// Waits until the worker is drained.
    pub async fn drained(&self) {
        // The sender lives as long as `self`.
        let _ = self.state().wait_for(|state| matches!(state.phase, DrainPhase::Drained { .. })).await;
    }

    /// How long the worker has been drained; `None` if it is not.
    pub fn drained_for(&self) -> Option<Duration> {
        self.0.drained.get().map(|since| self.0.runtime.now().saturating_duration_since(*since))
    }

    async fn run(self, bound: impl Future<Output = ()>) {
        let (runtime, running) = (&self.0.runtime, self.0.state.borrow().running);
        tracing::info!(running, "drains");
        let mut state = self.state();
        let leaves_at = runtime.now() + TELL;
        tokio::select! {
            biased;
            _ = state.wait_for(|state| state.running == 0) => {}
            () = self.0.cut.cancelled() => {}
            () = bound => self.cut_off(),
        }
        let ended = runtime.until(runtime.now() + CUT_MAX, state.wait_for(|state| state.running == 0)).await.is_some();
        if !ended {
            let running = self.0.state.borrow().running;
            tracing::warn!(running, "leaves calls behind that do not end");
        }
        let registration = self.0.registration.lock().take();
        let deregistered = match registration {
            Some(registration) => {
                runtime.sleep_until(leaves_at).await;
                registration.leave(LEAVE_MAX).await
            }
            None => true,
        };
        let _ = self.0.drained.set(runtime.now());
        self.0.state.send_modify(|state| state.phase = DrainPhase::Drained { deregistered });
        let DrainState { finished, cut_off, .. } = *self.0.state.borrow();
        tracing::info!(finished, cut_off, deregistered, "is drained");
    }
}

/// One running call; counted until it is dropped.
#[derive(Debug)]
pub struct RunningCall(Drain);

impl RunningCall {
    /// Waits until the call has to end unfinished, and returns the error for its router.
    pub fn cut_off(&self) -> impl Future<Output = RequestError> + Send + 'static {
        let cut = self.0.0.cut.clone();
        async move {
            cut.cancelled().await;
            let message = "it drained before the request was finished; send it to another worker";
            RequestError::new(ErrorKind::Unavailable, message)
        }
    }
}

impl Drop for RunningCall {
    fn drop(&mut self) {
        let was_cut = self.0.0.cut.is_cancelled();
        self.0.0.state.send_modify(|state| {
            state.running -= 1;
            match (state.phase, was_cut) {
                (DrainPhase::Serving, _) => {}
                (_, true) => state.cut_off += 1,
                (_, false) => state.finished += 1,
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_node::TokioRuntime;
    use std::future::{pending, ready};

    fn drain() -> Drain {
        Drain::new(Arc::new(TokioRuntime::current()))
    }

    #[tokio::test(start_paused = true)]
    async fn calls_end_by_themselves_before_the_worker_is_drained() {
        let drain = drain();
        let (first, second) = (drain.enter().unwrap(), drain.enter().unwrap());
        drop(drain.enter().unwrap());
        assert!(drain.start(pending()) && !drain.start(pending()));
        assert_eq!(drain.enter().unwrap_err().kind, ErrorKind::Unavailable);
        drop(first);
        tokio::time::sleep(Duration::from_secs(1_000)).await;
        let state = DrainState { phase: DrainPhase::Draining, running: 1, finished: 1, cut_off: 0 };
        assert_eq!(*drain.state().borrow(), state);
        drop(second);
        drain.drained().await;
        let phase = DrainPhase::Drained { deregistered: true };
        assert_eq!(*drain.state().borrow(), DrainState { phase, running: 0, finished: 2, cut_off: 0 });
        assert!(drain.enter().is_err() && !drain.start(ready(())));
    }

    #[tokio::test(start_paused = true)]
    async fn calls_that_outlast_the_bound_are_cut_off() {
        let drain = drain();
        let (call, hangs) = (drain.enter().unwrap(), drain.enter().unwrap());
        assert!(drain.start(tokio::time::sleep(Duration::from_secs(5))));
        let ended = tokio::spawn(async move { call.cut_off().await });
        drain.drained().await;
        assert_eq!(ended.await.unwrap().kind, ErrorKind::Unavailable);
        let state = *drain.state().borrow();
        assert_eq!((state.running, state.finished, state.cut_off), (1, 0, 1), "one does not listen");
        drop(hangs);
        assert_eq!(drain.state().borrow().running, 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_worker_that_nobody_uses_is_drained_at_once() {
        let drain = drain();
        assert!(drain.start(pending()) && drain.drained_for().is_none());
        drain.drained().await;
        assert_eq!(drain.drained_for(), Some(Duration::ZERO));
    }
}
