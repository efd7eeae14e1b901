//! A router's verdicts on workers, stored in etcd on the router's own lease.

use super::super::EtcdConfig;
use super::super::connection::within;
use super::super::error::EtcdError;
use super::super::lease::{Lease, Renewal};
use super::Shared;
use crate::backoff::Backoff;
use crate::membership::state::RouterVerdict;
use baton_proto::convert::stored::encode_verdict;
use baton_types::Party;
use etcd_client::{Client, PutOptions};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Verdicts and their lease; both outlive sessions.
pub(super) struct StoredVerdicts {
    lease: Option<Lease>,
    /// The verdicts in etcd on that lease, by key; `None` if unknown.
    written: BTreeMap<String, Option<RouterVerdict>>,
    /// Waits after a refusal.
    refused: Backoff<String>,
}

impl StoredVerdicts {
    pub(super) fn new(config: &EtcdConfig) -> Self {
        Self { lease: None, written: BTreeMap::new(), refused: config.backoff() }
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        self.lease
    }

    /// The lease has ended, and all its verdicts are gone.
    pub(super) fn lost(&mut self) {
        (self.lease, self.written) = (None, BTreeMap::new());
    }

    /// After a restore from a backup the lease may exist without some of its verdicts.
    pub(super) fn doubt(&mut self) {
        self.written.values_mut().for_each(|verdict| *verdict = None);
    }

    /// A session ended, with this state of the renewal, if any.
    pub(super) fn ended(&mut self, renewal: Option<Renewal>) {
        self.lease = renewal.map(|renewal| renewal.lease()).or(self.lease);
    }

    /// Keeps the lease in `renewal`, and the verdicts up to date. A write that etcd refuses is tried again later: the
    /// records can still be followed.
    pub(super) async fn keep(
        &mut self,
        shared: &Shared,
        client: &Client,
        renewal: &mut Option<Renewal>,
    ) -> Result<Infallible, EtcdError> {
        let renewal = loop {
            match Renewal::start(&mut self.lease, client, &shared.config).await {
                Err(error) if error.is_refusal() => self.pause(error).await,
                started => break renewal.insert(started?),
            }
        };
        let lease = renewal.lease().id;
        tokio::select! {
            error = renewal.keep() => Err(error),
            end = self.write(shared, client, lease) => end,
        }
    }

    async fn write(&mut self, shared: &Shared, client: &Client, lease: i64) -> Result<Infallible, EtcdError> {
        loop {
            match self.say(shared, client, lease).await {
                Ok(()) => {
                    self.refused.reset();
                    shared.wake.notified().await;
                }
                Err(error) if error.is_refusal() => self.pause(error).await,
                Err(error) => return Err(error),
            }
        }
    }

    async fn say(&mut self, shared: &Shared, client: &Client, lease: i64) -> Result<(), EtcdError> {
        let (max, mut kv) = (shared.config.request_max(), client.kv_client());
        let wanted: BTreeMap<String, RouterVerdict> = {
            let inner = shared.inner.lock();
            let entry =
                |(party, verdict): &(Party, RouterVerdict)| (shared.keys.verdict(party, &shared.name), verdict.clone());
            inner.verdicts.values().map(entry).collect()
        };
        let stale: Vec<_> = self.written.keys().filter(|k| !wanted.contains_key(*k)).cloned().collect();
        for key in stale {
            within(max, "remove a verdict", kv.delete(key.clone(), None)).await?;
            self.written.remove(&key);
        }
        for (key, verdict) in wanted {
            if self.written.get(&key).and_then(Option::as_ref) != Some(&verdict) {
                let options = PutOptions::new().with_lease(lease);
                within(max, "write a verdict", kv.put(key.clone(), encode_verdict(&verdict), Some(options))).await?;
                self.written.insert(key, Some(verdict));
            }
        }
        Ok(())
    }

    /// Logs the refusal once, and waits before the next attempt.
    async fn pause(&mut self, error: EtcdError) {
        let problem = error.to_string();
        if self.refused.is_news(problem.clone()) {
            tracing::warn!(problem, "cannot tell workers through etcd what it says of them; tries again");
        }
        tokio::time::sleep(self.refused.wait()).await;
    }
}
