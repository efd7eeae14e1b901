//! Effects on a Baton cluster when nodes of a replicated etcd fail.

use super::support::{Cluster, LONG};
use crate::membership::RouterMembership as _;
use crate::membership::etcd::EtcdConfig;
use crate::testing::etcd::EtcdCluster;
use baton_types::InstanceRecord;
use std::time::Duration;

/// Longer than an election.
const ELECTION: Duration = Duration::from_secs(3);

#[tokio::test]
async fn nodes_of_etcd_may_fail_and_lose_everything() {
    let mut etcd = EtcdCluster::start(3).unwrap();
    // Half of it is for noticing that a node hangs, on any busy machine, and for renewing at another.
    let mut cluster = Cluster::start(EtcdConfig { lease_ttl_s: 6, ..etcd.config() }).await;

    // etcd before 3.4.31 or 3.5.13 may end all leases when a leader that was replaced meanwhile resumes (its issue
    // 15247). No process may notice.
    let hangs = etcd.leader().await.unwrap();
    etcd.node(hangs).signal("STOP").unwrap();
    cluster.stays_whole("the leader hangs for longer than a lease", LONG).await;
    etcd.node(hangs).signal("CONT").unwrap();
    cluster.stays_whole("the leader goes on", ELECTION).await;
    cluster.is_live().await;

    let before = cluster.router.view().borrow().clone();
    let hangs = (etcd.leader().await.unwrap() + 1) % 3;
    etcd.node(hangs).signal("STOP").unwrap();
    cluster.stays_whole("a follower hangs for longer than a lease", LONG).await;
    etcd.node(hangs).signal("CONT").unwrap();
    cluster.is_live().await;
    assert_eq!(before.members, cluster.router.view().borrow().members, "nobody registered again");

    let leader = etcd.leader().await.unwrap();
    etcd.node(leader).kill();
    cluster.stays_whole("leader killed", ELECTION).await;
    etcd.leader().await.unwrap();
    cluster.is_live().await;
    etcd.run_all().unwrap();
    cluster.stays_whole("leader back", Duration::from_secs(1)).await;

    let leader = etcd.leader().await.unwrap();
    etcd.node(leader).kill();
    etcd.node((leader + 1) % 3).kill();
    assert!(cluster.router.store().reachable);
    cluster.stays_whole("quorum lost for longer than a lease", LONG).await;
    assert!(!cluster.router.store().reachable, "a view of before must not pass for one of now");
    etcd.run_all().unwrap();
    etcd.leader().await.unwrap();
    cluster.stays_whole("quorum back", ELECTION).await;
    assert_eq!(cluster.router.doubted(), 0);
    let after = cluster.router.view().borrow().clone();
    assert_eq!(before.members, after.members, "a new leader lengthens leases, so nobody registered again");
    cluster.is_live().await;
    assert!(cluster.router.store().reachable);

    // No worker answers the router: only the grace can preserve the view.
    cluster.alive.0.lock().clear();
    etcd.kill_all();
    etcd.wipe_all().unwrap();
    cluster.stays_whole("dead", Duration::from_secs(1)).await;
    etcd.run_all().unwrap();
    cluster
        .sees("everyone registers again", |view| {
            let newer = |r: &InstanceRecord| {
                view.get(&r.party).is_some_and(|m| m.registration != after.get(&r.party).unwrap().registration)
            };
            cluster.records.iter().all(newer)
        })
        .await;
    cluster.stays_whole("empty", ELECTION).await;
    assert_eq!(cluster.router.doubted(), 0);
    cluster.is_live().await;
}
