//! A lease: granted, renewed at half the remaining time, given back.

use super::connection::within;
use super::error::EtcdError;
use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Least time for an answer, however little remains of a lease.
const PATIENCE_MIN: Duration = Duration::from_millis(250);

/// A lease, and when it ends unless somebody renews it: etcd may lengthen it, so that only etcd says that it is over.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) id: i64,
    ends: Instant,
}

impl Lease {
    /// Grants a lease of `ttl`, which etcd may lengthen.
    pub(super) async fn grant(client: &Client, ttl: Duration, max: Duration) -> Result<Self, EtcdError> {
        let mut leases = client.lease_client();
        let answer = within(max, "grant a lease", leases.grant(ttl.as_secs() as i64, None)).await?;
        Ok(Self { id: answer.id(), ends: ends_in(answer.ttl()) })
    }

    /// Ends it and removes its keys.
    pub(super) async fn revoke(self, client: &Client, max: Duration) -> Result<(), EtcdError> {
        within(max, "revoke a lease", client.lease_client().revoke(self.id)).await.map(drop)
    }

    /// Longest wait for an answer that the lease depends on, at most `max`: half of what remains, so that time is left to try another
    /// node. Once it should be over, nothing is left to save.
    pub(super) fn patience(self, max: Duration) -> Duration {
        match self.ends.checked_duration_since(Instant::now()) {
            Some(remaining) => (remaining / 2).max(PATIENCE_MIN).min(max),
            None => max,
        }
    }
}

fn ends_in(ttl_s: i64) -> Instant {
    Instant::now() + Duration::from_secs(ttl_s.max(0) as u64)
}

/// Renews a lease.
pub(super) struct Renewal {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    lease: Lease,
    max: Duration,
}

impl Renewal {
    /// Renews at once, which tells whether the lease still exists.
    pub(super) async fn start(client: &Client, lease: Lease, max: Duration) -> Result<Self, EtcdError> {
        let mut leases = client.lease_client();
        let (keeper, answers) = match within(lease.patience(max), "renew a lease", leases.keep_alive(lease.id)).await {
            // The client's word for a time to live of 0.
            Err(EtcdError::Failed(etcd_client::Error::LeaseKeepAliveError(_))) => return Err(EtcdError::LeaseGone),
            other => other?,
        };
        let mut renewal = Self { keeper, answers, lease, max };
        renewal.renew().await?;
        Ok(renewal)
    }

    /// What is known of the lease.
    pub(super) fn lease(&self) -> Lease {
        self.lease
    }

    async fn renew(&mut self) -> Result<(), EtcdError> {
        let asked = async {
            self.keeper.keep_alive().await?;
            self.answers.message().await
        };
        let answer = within(self.lease.patience(self.max), "renew a lease", asked).await?;
        let answer = answer.ok_or(EtcdError::WatchEnded("the lease's stream ended".into()))?;
        if answer.ttl() <= 0 {
            return Err(EtcdError::LeaseGone);
        }
        self.lease.ends = ends_in(answer.ttl());
        Ok(())
    }

    /// Renews until that fails.
    pub(super) async fn keep(&mut self) -> EtcdError {
        loop {
            sleep(self.lease.ends.saturating_duration_since(Instant::now()) / 2).await;
            if let Err(error) = self.renew().await {
                return error;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_renewal_leaves_time_to_try_another_node() {
        let max = Duration::from_secs(2);
        let patience = |ends| Lease { id: 1, ends }.patience(max);
        assert_eq!(patience(Instant::now() + Duration::from_secs(60)), max);
        let half = patience(Instant::now() + Duration::from_secs(3));
        assert!(half <= Duration::from_millis(1_500) && half > PATIENCE_MIN, "{half:?}");
        assert_eq!(patience(Instant::now() + Duration::from_millis(100)), PATIENCE_MIN);
        assert_eq!(patience(Instant::now()), max, "nothing to save");
    }
}
