//! Asks a worker directly whether it is alive.

use baton_types::InstanceRecord;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// The result of a probe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This incarnation answers, and accepts work.
    Alive,
    /// No process answers, another incarnation does, or it drains.
    Gone,
}

/// Asks workers directly whether they are alive.
pub trait Probe: Send + Sync {
    /// Ends within its own time limit.
    fn ask(&self, record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict>;

    /// The record of the process that listens there. Ends within its own time limit.
    fn record(&self, _address: SocketAddr) -> BoxFuture<'static, Option<InstanceRecord>> {
        Box::pin(std::future::ready(None))
    }
}

/// Never answers: a suspected worker has the whole grace to register again.
#[derive(Clone, Copy, Debug)]
pub(super) struct WaitForReregistration(pub(super) Duration);

impl Probe for WaitForReregistration {
    fn ask(&self, _record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict> {
        let wait = tokio::time::sleep(self.0);
        Box::pin(async move {
            wait.await;
            Verdict::Gone
        })
    }
}
