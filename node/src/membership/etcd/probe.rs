//! Asking a worker itself whether it lives.

use baton_types::InstanceRecord;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

/// What a worker's answer says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// This very start answers, and takes work.
    Alive,
    /// Nobody answers, another start does, or it drains.
    Gone,
}

/// Asks.
pub trait Probe: Send + Sync {
    /// Ends within a bound of its own.
    fn ask(&self, record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict>;

    /// The record of whoever listens there. Ends within a bound of its own.
    fn record(&self, _address: SocketAddr) -> BoxFuture<'static, Option<InstanceRecord>> {
        Box::pin(std::future::ready(None))
    }
}

/// Asks nobody: whoever is doubted has so long to register again.
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
