//! What must hold when nothing runs.

use crate::cluster::Cluster;
use anyhow::ensure;
use std::time::{Duration, Instant};

/// The promise: this long after the last request ended, nobody references a block.
pub const QUIET_MAX: Duration = Duration::from_secs(10);

/// Waits until no worker references or quarantines a block, at most [`QUIET_MAX`], and checks that none was lost.
pub async fn until_quiet(cluster: &Cluster) -> anyhow::Result<()> {
    let deadline = Instant::now() + QUIET_MAX;
    loop {
        let counts: Vec<_> = cluster.workers().map(|w| (w.party.instance.clone(), w.loaded.engine.pool().counts())).collect();
        if counts.iter().all(|(_, c)| c.referenced == 0 && c.quarantined == 0) {
            for (name, c) in counts {
                ensure!(c.free + c.cached == c.total, "{name} lost blocks: {c:?}");
            }
            return Ok(());
        }
        ensure!(Instant::now() < deadline, "{QUIET_MAX:?} after the last request: {counts:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}
