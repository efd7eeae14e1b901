//! An etcd cluster that grows, and one that was extended wrongly.

use super::support::{Cluster, LONG, MAX, MEMBERS_MAX};
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{RouterMembership as _, WorkerMembership as _};
use crate::testing::etcd::{EtcdServer, Growing, fill};
use etcd_client::Client;
use std::collections::BTreeSet;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

/// Ids of the clusters of these nodes.
async fn clusters(urls: &[String]) -> BTreeSet<u64> {
    let mut ids = BTreeSet::new();
    for url in urls {
        let mut client = Client::connect([url], None).await.unwrap();
        ids.insert(client.status().await.unwrap().header().unwrap().cluster_id());
    }
    ids
}

/// The hazard of a flag with all nodes: two nodes without data are a majority of three, and form a new cluster while
/// the first is away.
#[tokio::test]
async fn nodes_that_are_told_a_longer_list_split_the_cluster() {
    let mut growing = Growing::prepare(3).unwrap();
    growing.run_with_flags(0, 1).unwrap();
    growing.kill(0);
    growing.spawn_with_flags(&[1, 2], 3).unwrap();
    growing.run_with_flags(0, 3).unwrap();
    assert_eq!(clusters(&growing.urls()).await.len(), 2, "all three serve, and are two clusters");
}

#[tokio::test]
async fn a_cluster_grows_although_its_first_node_is_away() {
    let mut growing = Growing::prepare(3).unwrap();
    growing.run_joined(0, 1).await.unwrap();
    let before = clusters(&growing.urls()[..1]).await;
    // Long enough to be renewed after the return, on any busy machine.
    let mut cluster = Cluster::start(EtcdConfig { lease_ttl_s: 6, ..growing.config(1) }).await;
    let view = cluster.router.view().borrow().clone();
    growing.kill(0);
    let (first, second) = (growing.start_of(1, 3), growing.start_of(2, 3));
    let joining = tokio::spawn(async move { tokio::join!(first, second) });
    sleep(Duration::from_secs(3)).await;
    assert!(!joining.is_finished(), "nobody may begin a second cluster");
    joining.abort();
    let _ = joining.await;
    growing.run_joined(0, 3).await.unwrap();
    growing.run_joined(1, 3).await.unwrap();
    growing.run_joined(2, 3).await.unwrap();
    assert_eq!(clusters(&growing.urls()).await, before);
    assert_eq!(view.members, cluster.router.view().borrow().members, "nobody registered again");
    cluster.is_live().await;

    // A node that lost its data joins again as a new member, also if it is the first node.
    growing.kill(0);
    growing.wipe(0).unwrap();
    growing.run_joined(0, 3).await.unwrap();
    assert_eq!(clusters(&growing.urls()).await, before);
    let members = Client::connect([&growing.urls()[1]], None).await.unwrap().member_list().await.unwrap();
    assert_eq!(members.members().len(), 3);
}

#[tokio::test]
async fn the_first_node_begins_nothing_while_the_others_may_be_a_cluster() {
    let mut growing = Growing::prepare(3).unwrap();
    growing.run_joined(0, 1).await.unwrap();
    growing.run_joined(1, 3).await.unwrap();
    growing.run_joined(2, 3).await.unwrap();
    for node in 0..3 {
        growing.kill(node);
    }
    growing.wipe(0).unwrap();
    let begins = timeout(Duration::from_secs(4), growing.start_of(0, 3)).await;
    assert!(begins.is_err(), "two of three are away, and may come back: {begins:?}");
}

#[tokio::test]
async fn three_nodes_without_data_become_one_cluster() {
    let mut growing = Growing::prepare(3).unwrap();
    let (first, second) = (growing.start_of(1, 3), growing.start_of(2, 3));
    let waiting = tokio::spawn(async move { tokio::join!(first, second) });
    growing.run_joined(0, 3).await.unwrap();
    sleep(Duration::from_secs(2)).await;
    // One of the two was added; in Kubernetes it would start now, and the other after it.
    waiting.abort();
    let _ = waiting.await;
    let added = Client::connect([&growing.urls()[0]], None).await.unwrap().member_list().await.unwrap();
    let first = usize::from(added.members().iter().any(|m| m.peer_urls() == [growing.peer(2)])) + 1;
    growing.run_joined(first, 3).await.unwrap();
    growing.run_joined(3 - first, 3).await.unwrap();
    assert_eq!(clusters(&growing.urls()).await.len(), 1);
}

#[tokio::test]
async fn nodes_of_another_cluster_are_refused_and_told() {
    let (one, two) =
        (EtcdServer::start().unwrap(), EtcdServer::start_with(&["--initial-cluster-token=other"]).unwrap());
    // Two separate clusters: workers and routers may use either.
    let of = |endpoints: Vec<String>| EtcdConfig { endpoints, ..one.config() };
    let cluster = Cluster::start(of(vec![one.url()])).await;
    let both = of(vec![one.url(), two.url()]);
    let router = EtcdRouter::start(&both, 16);
    let worker = EtcdWorker::new(&both, MEMBERS_MAX).register(record("d-5", 5));
    let end = Instant::now() + MAX;
    while router.nodes().clusters() < 2 && Instant::now() < end {
        sleep(Duration::from_millis(20)).await;
    }
    let told = router.nodes().division().unwrap();
    assert!(told.contains(&one.url()) && told.contains(&two.url()), "{told}");
    sleep(LONG).await;
    assert!(!router.store().reachable && router.view().borrow().members.is_empty(), "it takes neither for the truth");
    assert!(!worker.is_ready());
    for url in [one.url(), two.url()] {
        let mut client = Client::connect([url], None).await.unwrap();
        let found = client.get(format!("{}instances/d-5", both.prefix), None).await.unwrap();
        assert!(found.kvs().is_empty(), "it registered with one of them");
    }
    assert!(cluster.whole());
}

#[tokio::test]
async fn an_alarm_of_etcd_is_told() {
    let server = EtcdServer::start_with(&["--quota-backend-bytes=4194304"]).unwrap();
    let mut client = Client::connect([server.url()], None).await.unwrap();
    assert!(fill(&mut client).await, "it is never full");
    let router = EtcdRouter::start(&server.config(), 16);
    let end = Instant::now() + MAX;
    while router.nodes().complaints().next().is_none() && Instant::now() < end {
        sleep(Duration::from_millis(20)).await;
    }
    let told: Vec<String> = router.nodes().complaints().map(str::to_owned).collect();
    assert!(told.iter().any(|complaint| complaint.contains("NOSPACE")), "{told:?}");
}
