//! Asking a worker itself whether it lives.

use crate::grpc::{ChannelConfig, channel};
use crate::identity::{Identity, Role};
use baton_proto::v1::{WatchRequest, worker_client::WorkerClient};
use baton_types::InstanceRecord;
use futures::future::BoxFuture;
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
