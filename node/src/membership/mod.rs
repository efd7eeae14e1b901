//! Membership: workers register their record and keep it registered; routers watch the view and admit or evict workers.
//!
//! Two sides, each a trait, so that backends are interchangeable ([`embedded`] and [`etcd`]; every backend passes the
//! suite `conformance`). An *incarnation* is one process start. A *registration* adds a revision; only that changes
//! when the same incarnation registers again. Readiness of a worker means *admitted by a router*. It is sticky: losing
//! routers does not clear it, an eviction does.

mod backend;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod conformance;
pub mod embedded;
pub mod etcd;
mod lease_table;
mod members;
mod state;
mod store;
#[cfg(test)]
mod tests;
mod view;

pub use backend::{Backend, RouterBackend, worker};
pub use lease_table::{JoinError, LeaseTable};
pub use members::Members;
pub use state::{RouterReport, WorkerState, aggregate};
pub use store::StoreState;
pub use view::{Member, MembershipView, Registration};

use baton_types::{InstanceRecord, Party};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// The side of a worker.
pub trait WorkerMembership: Send + Sync {
    /// Registers the record and keeps it registered, under the same incarnation, until the handle leaves or is dropped.
    /// Returns at once; must be called within a tokio runtime.
    fn register(&self, record: InstanceRecord) -> RegistrationHandle;

    /// Other registered workers, as far as this worker knows. Empty until it has registered itself; the last view is
    /// kept while no source can be reached.
    fn members(&self) -> Members;
}

/// The side of a router.
pub trait RouterMembership: Send + Sync {
    /// The registered members, and every change of them.
    fn view(&self) -> watch::Receiver<Arc<MembershipView>>;

    /// Notifies the worker that this router can reach it and would place requests on it. `false` if this incarnation is
    /// not registered.
    fn admit(&self, party: &Party) -> bool;

    /// Notifies the worker that this router no longer places requests on it. It stays registered. `false` as for
    /// [`RouterMembership::admit`].
    fn evict(&self, party: &Party, reason: &str) -> bool;
}

/// Keeps one registration. Dropping it leaves without waiting.
#[derive(Debug)]
pub struct RegistrationHandle {
    state: watch::Receiver<WorkerState>,
    leave: CancellationToken,
    task: Option<JoinHandle<()>>,
}

impl RegistrationHandle {
    /// For backends: `task` ends soon after `leave` is cancelled, and publishes the state until then.
    pub fn new(state: watch::Receiver<WorkerState>, leave: CancellationToken, task: JoinHandle<()>) -> Self {
        Self { state, leave, task: Some(task) }
    }

    /// The state of this worker, and every change of it.
    pub fn state(&self) -> watch::Receiver<WorkerState> {
        self.state.clone()
    }

    /// Whether this worker was admitted and not evicted since.
    pub fn is_ready(&self) -> bool {
        self.state.borrow().is_ready()
    }

    /// Leaves, so that routers place no more requests here; `false` if not all routers could be notified `within` that
    /// time (their leases then end by themselves).
    pub async fn leave(mut self, within: Duration) -> bool {
        self.leave.cancel();
        match self.task.take() {
            Some(mut task) => {
                let left = tokio::time::timeout(within, &mut task).await.is_ok();
                if !left {
                    task.abort();
                }
                left
            }
            None => true,
        }
    }
}

impl Drop for RegistrationHandle {
    fn drop(&mut self) {
        self.leave.cancel();
    }
}
