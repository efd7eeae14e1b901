//! Whether each node of etcd can be used, and how fast it answers: for whoever prepares a host.

use super::EtcdConfig;
use super::connection::{Node, connect, within};
use super::error::EtcdError;
use super::keys::Keys;
use std::time::{Duration, Instant};

/// Reads that are timed; the median counts.
const READS: usize = 5;

/// A node that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Its version, e.g. `3.5.17`.
    pub version: String,
    /// How long a linearizable read takes, through the cluster's leader: the median of a few.
    pub read: Duration,
}

/// Asks every node for itself, as this process would use it, under its prefix and with its credentials. Each call takes at most
/// `request_ms_max`.
pub async fn reach(config: &EtcdConfig) -> Vec<(String, Result<Reached, String>)> {
    let mut found = Vec::new();
    for (node, endpoint) in Node::all(config) {
        found.push((endpoint, reach_one(config, node).await.map_err(|e| e.to_string())));
    }
    found
}

async fn reach_one(config: &EtcdConfig, node: Node) -> Result<Reached, EtcdError> {
    let max = config.request_max();
    let mut client = connect(config, node, max).await?;
    let version = within(max, "status", client.status()).await?.version().to_owned();
    let (mut took, epoch) = (Vec::new(), Keys(config.prefix.clone()).epoch());
    for _ in 0..READS {
        let began = Instant::now();
        within(max, "read", client.get(epoch.clone(), None)).await?;
        took.push(began.elapsed());
    }
    took.sort();
    Ok(Reached { version, read: took[READS / 2] })
}
