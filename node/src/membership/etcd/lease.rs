//! A lease: granted, renewed at half the remaining time, revoked.

use super::EtcdConfig;
use super::connection::{Node, connect, within};
use super::error::EtcdError;
use etcd_client::{Client, LeaseKeepAliveStream, LeaseKeeper};
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Least wait for an answer, however little of a lease remains.
const PATIENCE_MIN: Duration = Duration::from_millis(250);

/// A lease, and when it ends without renewal. etcd may extend it, so only etcd decides that it has ended.
#[derive(Clone, Copy, Debug)]
pub(super) struct Lease {
    pub(super) id: i64,
    ends: Instant,
}

impl Lease {
    async fn grant(client: &Client, config: &EtcdConfig) -> Result<Self, EtcdError> {
        let mut leases = client.lease_client();
        let ttl = config.lease_ttl().as_secs() as i64;
        let answer = within(config.request_max(), "grant a lease", leases.grant(ttl, None)).await?;
        Ok(Self { id: answer.id(), ends: ends_in(answer.ttl()) })
    }

    /// Time from `now` until it is renewed: half of what remains, so that the other half is left to find another node.
    fn renewed_in(self, now: Instant) -> Duration {
        self.ends.saturating_duration_since(now) / 2
    }

    /// Longest wait for an answer that the lease depends on, at most `max`: half of what remains, so that time is left
    /// to try another node. After the expected end of the lease, `max` applies.
    fn patience(self, max: Duration) -> Duration {
        match self.ends.checked_duration_since(Instant::now()) {
            Some(remaining) => (remaining / 2).max(PATIENCE_MIN).min(max),
            None => max,
        }
    }
}

/// Connects within the time that a held lease allows.
pub(super) async fn connect_for(held: Option<Lease>, config: &EtcdConfig, node: Node) -> Result<Client, EtcdError> {
    let max = config.request_max();
    connect(config, node, held.map_or(max, |lease| lease.patience(max))).await
}

/// Revokes a held lease, which removes its keys; returns whether it did. Else the lease expires.
pub(super) async fn give_back(held: Option<Lease>, config: &EtcdConfig, node: Node) -> bool {
    let (Some(lease), max) = (held, config.request_max()) else { return false };
    let Ok(client) = connect(config, node, max).await else { return false };
    within(max, "revoke a lease", client.lease_client().revoke(lease.id)).await.is_ok()
}

fn ends_in(ttl_s: i64) -> Instant {
    Instant::now() + Duration::from_secs(ttl_s.max(0) as u64)
}

/// Keeps a lease alive, until etcd no longer renews it.
pub(super) struct Renewal {
    keeper: LeaseKeeper,
    answers: LeaseKeepAliveStream,
    lease: Lease,
    max: Duration,
}

impl Renewal {
    /// Renews the held lease at once, which shows whether it still exists, or grants one. etcd may extend it.
    pub(super) async fn start(
        held: &mut Option<Lease>,
        client: &Client,
        config: &EtcdConfig,
    ) -> Result<Self, EtcdError> {
        let max = config.request_max();
        let lease = match *held {
            Some(lease) => lease,
            None => *held.insert(Lease::grant(client, config).await?),
        };
        let mut leases = client.lease_client();
        let (keeper, answers) = match within(lease.patience(max), "renew a lease", leases.keep_alive(lease.id)).await {
            // The client's error for a time to live of 0.
            Err(EtcdError::Failed(etcd_client::Error::LeaseKeepAliveError(_))) => return Err(EtcdError::LeaseGone),
            other => other?,
        };
        let mut renewal = Self { keeper, answers, lease, max };
        renewal.renew().await?;
        Ok(renewal)
    }

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

    /// Renews until a renewal fails.
    pub(super) async fn keep(&mut self) -> EtcdError {
        loop {
            sleep(self.lease.renewed_in(Instant::now())).await;
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
    fn a_lease_is_renewed_at_half_of_what_remains() {
        let now = Instant::now();
        let renewed_in = |remaining_ms| {
            let ends = now + Duration::from_millis(remaining_ms);
            Lease { id: 1, ends }.renewed_in(now).as_millis()
        };
        assert_eq!([10_000, 2_000, 1_000, 0].map(renewed_in), [5_000, 1_000, 500, 0]);
        let over = Lease { id: 1, ends: now };
        assert_eq!(over.renewed_in(now + Duration::from_secs(1)), Duration::ZERO);
    }

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
