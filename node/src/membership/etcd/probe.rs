//! Asking a worker itself whether it lives.

use crate::grpc::{ChannelConfig, channel};
use crate::identity::{Identity, Role};
use baton_proto::v1::{self, WatchRequest, worker_client::WorkerClient};
use baton_types::InstanceRecord;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

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
    fn record(&self, _address: SocketAddr) -> BoxFuture<'static, Option<v1::InstanceRecord>> {
        Box::pin(std::future::ready(None))
    }
}

/// Asks for a load report.
#[derive(Clone, Debug)]
pub struct WatchProbe {
    /// Longest wait.
    pub max: Duration,
    /// Who asks.
    pub identity: Identity,
}

impl Probe for WatchProbe {
    fn ask(&self, record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict> {
        let Self { max, identity } = self.clone();
        Box::pin(async move {
            match timeout(max, is_alive(&record, &identity)).await {
                Ok(true) => Verdict::Alive,
                Ok(false) | Err(_) => Verdict::Gone,
            }
        })
    }

    fn record(&self, address: SocketAddr) -> BoxFuture<'static, Option<v1::InstanceRecord>> {
        let (max, identity) = (self.max, self.identity.clone());
        Box::pin(async move {
            let asked = async {
                let channel = channel(&address.to_string(), &ChannelConfig::default(), &identity, Role::Worker).ok()?;
                Some(WorkerClient::new(channel).record(v1::RecordRequest {}).await.ok()?.into_inner())
            };
            timeout(max, asked).await.ok().flatten()
        })
    }
}

/// Asks nobody: whoever is doubted has so long to register again.
#[derive(Clone, Copy, Debug)]
pub(super) struct Patience(pub(super) Duration);

impl Probe for Patience {
    fn ask(&self, _record: Arc<InstanceRecord>) -> BoxFuture<'static, Verdict> {
        let wait = tokio::time::sleep(self.0);
        Box::pin(async move {
            wait.await;
            Verdict::Gone
        })
    }
}

async fn is_alive(record: &InstanceRecord, identity: &Identity) -> bool {
    let channel = channel(&record.endpoint, &ChannelConfig::default(), identity, Role::Worker);
    let Ok(channel) = channel else { return false };
    let request = WatchRequest { router: "probe".into(), cache_events: false };
    let Ok(reports) = WorkerClient::new(channel).watch(request).await else { return false };
    match reports.into_inner().message().await {
        Ok(Some(report)) => report.party == Some(record.party.clone().into()) && report.healthy && !report.draining,
        _ => false,
    }
}
