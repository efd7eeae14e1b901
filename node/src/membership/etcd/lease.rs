//! A lease: granted, renewed at half the remaining time, given back.

use super::connection::within;
use super::error::EtcdError;
use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper};
use std::time::Duration;
use tokio::time::sleep;

/// Grants a lease of `ttl`, which etcd may lengthen.
pub(super) async fn grant(client: &Client, ttl: Duration, max: Duration) -> Result<i64, EtcdError> {
    let mut leases = client.lease_client();
    Ok(within(max, "grant a lease", leases.grant(ttl.as_secs() as i64, None)).await?.id())
}

/// Ends a lease and removes its keys.
pub(super) async fn revoke(client: &Client, lease: i64, max: Duration) -> Result<(), EtcdError> {
    within(max, "revoke a lease", client.lease_client().revoke(lease)).await.map(drop)
}

/// Renews a lease.
pub(super) struct Renewal {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    remaining: Duration,
    max: Duration,
}

impl Renewal {
    /// Renews at once, which tells whether the lease still exists.
    pub(super) async fn start(client: &Client, lease: i64, max: Duration) -> Result<Self, EtcdError> {
        let mut leases = client.lease_client();
        let (keeper, answers) = match within(max, "renew a lease", leases.keep_alive(lease)).await {
            // The client's word for a time to live of 0.
            Err(EtcdError::Failed(etcd_client::Error::LeaseKeepAliveError(_))) => return Err(EtcdError::LeaseGone),
            other => other?,
        };
        let mut renewal = Self { keeper, answers, remaining: Duration::ZERO, max };
        renewal.renew().await?;
        Ok(renewal)
    }

    async fn renew(&mut self) -> Result<(), EtcdError> {
        within(self.max, "renew a lease", self.keeper.keep_alive()).await?;
        let answer = within(self.max, "renew a lease", self.answers.message()).await?;
        let answer = answer.ok_or(EtcdError::WatchEnded("the lease's stream ended".into()))?;
        if answer.ttl() <= 0 {
            return Err(EtcdError::LeaseGone);
        }
        self.remaining = Duration::from_secs(answer.ttl() as u64);
        Ok(())
    }

    /// Renews until that fails.
    pub(super) async fn keep(mut self) -> EtcdError {
        loop {
            sleep(self.remaining / 2).await;
            if let Err(error) = self.renew().await {
                return error;
            }
        }
    }
}
