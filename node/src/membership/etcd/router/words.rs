//! What a router says of workers: its words in etcd, on a lease of its own.

use super::super::EtcdConfig;
use super::super::connection::within;
use super::super::error::EtcdError;
use super::super::lease::{Lease, Renewal};
use super::Shared;
use crate::backoff::Backoff;
use crate::membership::state::Word;
use baton_proto::convert::stored::encode_word;
use baton_types::Party;
use etcd_client::{Client, PutOptions};
use std::collections::BTreeMap;
use std::convert::Infallible;

/// Words and their lease, both of which outlive sessions.
pub(super) struct Words {
    lease: Option<Lease>,
    /// What stands in etcd on that lease, by key; `None` where that is not certain.
    written: BTreeMap<String, Option<Word>>,
    /// Waits after a refusal.
    refused: Backoff<String>,
}

impl Words {
    pub(super) fn new(config: &EtcdConfig) -> Self {
        Self { lease: None, written: BTreeMap::new(), refused: config.backoff() }
    }

    pub(super) fn lease(&self) -> Option<Lease> {
        self.lease
    }

    /// The lease is over, and every word with it.
    pub(super) fn lost(&mut self) {
        (self.lease, self.written) = (None, BTreeMap::new());
    }

    /// The lease may have outlived words on it that a backup does not know.
    pub(super) fn doubt(&mut self) {
        self.written.values_mut().for_each(|word| *word = None);
    }

    /// A session ended that renewed the lease so, if at all.
    pub(super) fn ended(&mut self, renewal: Option<Renewal>) {
        self.lease = renewal.map(|renewal| renewal.lease()).or(self.lease);
    }

    /// Keeps the lease in `renewal`, and the words as they are to be. What etcd refuses is said again later: who is registered can be
    /// followed all the same.
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
        let wanted: BTreeMap<String, Word> = {
            let inner = shared.inner.lock();
            let entry = |(party, word): &(Party, Word)| (shared.keys.word(party, &shared.name), word.clone());
            inner.words.values().map(entry).collect()
        };
        let stale: Vec<_> = self.written.keys().filter(|k| !wanted.contains_key(*k)).cloned().collect();
        for key in stale {
            within(max, "take a word back", kv.delete(key.clone(), None)).await?;
            self.written.remove(&key);
        }
        for (key, word) in wanted {
            if self.written.get(&key).and_then(Option::as_ref) != Some(&word) {
                let options = PutOptions::new().with_lease(lease);
                within(max, "say a word", kv.put(key.clone(), encode_word(&word), Some(options))).await?;
                self.written.insert(key, Some(word));
            }
        }
        Ok(())
    }

    /// Says the refusal once, and waits until it is worth to ask again.
    async fn pause(&mut self, error: EtcdError) {
        let problem = error.to_string();
        if self.refused.is_news(problem.clone()) {
            tracing::warn!(problem, "cannot tell workers through etcd what it says of them; tries again");
        }
        tokio::time::sleep(self.refused.wait()).await;
    }
}
