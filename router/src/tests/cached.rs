//! Workers' cache reports, over real streams.

use crate::prefixes::Prefixes;
use crate::testing::cluster::Cluster;
use crate::testing::fake::Fake;
use baton_kv_cache::{PrefixHash, PrefixHasher};
use baton_proto::v1::{CacheSnapshot, CacheUpdate, cache_update::Change};
use baton_types::{Digest, Incarnation, Role, SystemClock};
use std::sync::Arc;
use std::time::{Duration, Instant};

const WAIT_MAX: Duration = Duration::from_secs(20);

fn prompt() -> Vec<PrefixHash> {
    PrefixHasher::new(&Digest([1; 32]), b"salt").prompt(&(0..160).collect::<Vec<_>>(), &[])
}

fn snapshot(hashes: &[PrefixHash]) -> CacheUpdate {
    let hashes = hashes.iter().flat_map(|name| name.0).collect();
    CacheUpdate { sequence: 0, change: Some(Change::Snapshot(CacheSnapshot { part: 0, last: true, hashes })) }
}

fn stored(sequence: u64, hashes: &[PrefixHash]) -> CacheUpdate {
    let hashes = hashes.iter().flat_map(|name| name.0).collect();
    CacheUpdate { sequence, change: Some(Change::Stored(hashes)) }
}

/// Workers that the router places requests on.
fn ready(cluster: &Cluster) -> usize {
    cluster.router.core().workers.ready(Instant::now()).len()
}

/// Waits until the router counts this many tokens of the prompt as cached on a worker.
async fn has(prefixes: &Arc<Prefixes>, worker: &Fake, tokens: usize) {
    let (prompt, party) = (prompt(), &worker.record.party);
    let wait = async {
        while prefixes.lookup(&prompt, &SystemClock).tokens(party) != tokens {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    let found = || prefixes.lookup(&prompt, &SystemClock).tokens(party);
    tokio::time::timeout(WAIT_MAX, wait).await.unwrap_or_else(|_| panic!("{party} has {} tokens", found()));
}

#[tokio::test]
async fn a_lost_event_hides_a_worker_until_its_next_snapshot() {
    let cluster = Cluster::start(|_| ()).await;
    let (p, prefixes, prompt) = (cluster.worker(Role::Prefill, "p").await, &cluster.router.core().prefixes, prompt());
    p.tell(0, snapshot(&prompt[..2])).await;
    has(prefixes, &p, 32).await;
    p.tell(0, stored(1, &prompt[2..5])).await;
    has(prefixes, &p, 80).await;
    let begun = Instant::now();
    // Number 2 is lost: it might have been a removal.
    p.tell(0, stored(3, &prompt[5..])).await;
    has(prefixes, &p, 0).await;
    p.tell(1, snapshot(&prompt[..4])).await;
    has(prefixes, &p, 64).await;
    assert_eq!(ready(&cluster), 1, "its load counts all the while");
    p.tell(1, stored(1, &prompt[4..])).await;
    has(prefixes, &p, 160).await;
    // A stream that repeatedly loses reports is not reopened in a loop.
    p.tell(1, stored(9, &prompt[..1])).await;
    p.tell(2, snapshot(&prompt[..1])).await;
    has(prefixes, &p, 16).await;
    assert!(begun.elapsed() >= Duration::from_secs(1));
}

#[tokio::test]
async fn nothing_of_a_worker_outlives_its_start() {
    let cluster = Cluster::start(|_| ()).await;
    let (prefixes, prompt) = (&cluster.router.core().prefixes, prompt());
    let old = cluster.worker(Role::Decode, "d").await;
    let other = cluster.worker(Role::Prefill, "p").await;
    old.tell(0, snapshot(&prompt)).await;
    other.tell(0, snapshot(&prompt[..3])).await;
    has(prefixes, &old, 160).await;
    let next = |record: &mut baton_types::InstanceRecord| record.party.incarnation = Incarnation(8);
    let new = cluster.worker_with(Role::Decode, "d", next).await;
    new.tell(0, snapshot(&prompt[..1])).await;
    has(prefixes, &new, 16).await;
    has(prefixes, &old, 0).await;
    has(prefixes, &other, 48).await;
    drop(new);
    drop(other);
    let wait = async {
        while prefixes.counts().workers > 0 {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(WAIT_MAX, wait).await.expect("the streams end, and with them what came over them");
}

#[tokio::test]
async fn a_router_without_an_index_asks_for_no_events() {
    let cluster = Cluster::start(|config| config.cache.index_blocks_max = 0).await;
    let p = cluster.worker(Role::Prefill, "p").await;
    assert_eq!((p.streams_with_cache(), ready(&cluster)), (0, 1));
    let cluster = Cluster::start(|_| ()).await;
    let p = cluster.worker(Role::Prefill, "p").await;
    assert_eq!(
        (p.streams_with_cache(), cluster.router.core().prefixes.counts().workers),
        (1, 0),
        "it told nothing yet"
    );
}
