//! Asks a worker over gRPC whether it is alive.

use super::{ChannelConfig, channel};
use crate::identity::{Identity, Role};
use crate::membership::etcd::{Probe, Verdict};
use baton_proto::v1::{self, WatchRequest, worker_client::WorkerClient};
use baton_types::InstanceRecord;
use futures::future::BoxFuture;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// Requests a load report.
#[derive(Clone, Debug)]
pub struct WatchProbe {
    pub max: Duration,
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

    fn record(&self, address: SocketAddr) -> BoxFuture<'static, Option<InstanceRecord>> {
        let (max, identity) = (self.max, self.identity.clone());
        Box::pin(async move {
            let asked = async {
                let channel = channel(&address.to_string(), &ChannelConfig::default(), &identity, Role::Worker).ok()?;
                let record = WorkerClient::new(channel).record(v1::RecordRequest {}).await.ok()?.into_inner();
                InstanceRecord::try_from(record).ok()
            };
            timeout(max, asked).await.ok().flatten()
        })
    }
}

async fn is_alive(record: &InstanceRecord, identity: &Identity) -> bool {
    let channel = channel(&record.endpoint, &ChannelConfig::default(), identity, Role::Worker);
    let Ok(channel) = channel else { return false };
    let request = WatchRequest { router: "probe".into(), ..Default::default() };
    let Ok(reports) = WorkerClient::new(channel).watch(request).await else { return false };
    match reports.into_inner().message().await {
        Ok(Some(report)) => report.party == Some(record.party.clone().into()) && report.healthy && !report.draining,
        _ => false,
    }
}
