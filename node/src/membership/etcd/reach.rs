//! Whether each etcd node can be used, and its latency: for preparing a host.

use super::EtcdConfig;
use super::connection::{Node, connect, within};
use super::error::EtcdError;
use super::keys::Keys;
use std::time::{Duration, Instant};

/// Number of timed reads; the median counts.
const READS: usize = 5;

/// A node that answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reached {
    /// Its version, e.g. `3.5.17`.
    pub version: String,
    /// Latency of a linearizable read through the cluster's leader: the median of a few.
    pub read: Duration,
}

/// Asks each node separately, with this process's prefix and credentials. Each call takes at most `request_ms_max`.
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
