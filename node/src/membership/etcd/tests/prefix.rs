//! Whether a prefix is free, over a real etcd.

use super::support::{MAX, MEMBERS_MAX};
use crate::membership::RouterMembership as _;
use crate::membership::WorkerMembership as _;
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker, PrefixError, ensure_free};
use crate::testing::etcd::{EtcdCluster, EtcdServer};
use tokio::time::timeout;

#[tokio::test]
async fn a_prefix_is_taken_while_a_worker_is_registered_under_it() {
    let server = EtcdServer::start().unwrap();
    let config = server.config();
    // A router without workers takes no names.
    let router = EtcdRouter::start(&config, 16);
    ensure_free(&config).await.unwrap();
    let workers: Vec<_> =
        (0..10).map(|i| EtcdWorker::new(&config, MEMBERS_MAX).register(record(&format!("d-{i}"), i))).collect();
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 10)).await.unwrap().unwrap();

    let taken = ensure_free(&config).await.unwrap_err();
    let PrefixError::Taken { workers: named, count: 10, .. } = &taken else { panic!("{taken}") };
    assert_eq!(named[..2], ["d-0", "d-1"]);
    let message = taken.to_string();
    assert!(
        ["/baton/default/", "d-7 and 2 more", "--etcd-prefix"].iter().all(|part| message.contains(part)),
        "{message}"
    );
    // Neither a sibling prefix, nor one with the same beginning.
    for prefix in ["/baton/other/", "/baton/", "/baton/default/instances/"] {
        ensure_free(&EtcdConfig { prefix: prefix.into(), ..config.clone() }).await.unwrap();
    }
    for worker in workers {
        assert!(worker.leave(MAX).await);
    }
    ensure_free(&config).await.unwrap();
}

#[tokio::test]
async fn another_node_is_asked_and_where_none_answers_the_prefix_counts_as_taken() {
    let mut etcd = EtcdCluster::start(3).unwrap();
    let config = etcd.config();
    let leader = etcd.leader().await.unwrap();
    etcd.node((leader + 1) % 3).kill();
    // Whichever node is asked first.
    for _ in 0..6 {
        ensure_free(&config).await.unwrap();
    }
    etcd.kill_all();
    let unknown = ensure_free(&config).await.unwrap_err();
    assert!(matches!(unknown, PrefixError::Unknown { .. }) && unknown.to_string().contains("--etcd"), "{unknown}");
}
