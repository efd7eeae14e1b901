//! An etcd without space serves reads and renews leases, and refuses all else.

use super::support::{Cluster, MAX, MEMBERS_MAX, becomes};
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{RouterMembership as _, WorkerMembership as _, WorkerState};
use crate::testing::etcd::{EtcdServer, fill, make_space};
use crate::testing::relay::Relay;
use std::time::Duration;
use tokio::time::timeout;

#[tokio::test]
async fn routers_follow_an_etcd_that_is_out_of_space() {
    let server = EtcdServer::start_with(&["--quota-backend-bytes=4194304"]).unwrap();
    let cluster = Cluster::start(server.config()).await;
    let comer = record("d-5", 5);
    let worker = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(comer.clone());
    cluster.sees("it joins", |view| view.get(&comer.party).is_some()).await;
    let relay = Relay::start(server.address()).await.unwrap();
    let behind = EtcdConfig { endpoints: vec![format!("http://{}", relay.address())], ..server.config() };
    let running = EtcdRouter::start(&behind, 16);
    let all = |router: &EtcdRouter| {
        let mut view = router.view();
        async move { timeout(MAX, view.wait_for(|v| v.members.len() == 4)).await.expect("sees all").unwrap().clone() }
    };
    all(&running).await;

    let mut client = server.client().await.unwrap();
    assert!(fill(&mut client).await, "it is never full");
    assert!(running.admit(&comer.party));
    let started = EtcdRouter::start(&behind, 16);
    all(&started).await;
    cluster.stays_whole("full", Duration::from_secs(3)).await;
    assert_eq!(relay.accepted(), 2, "one session for each router");
    assert!(!worker.is_ready(), "no verdict can be said");

    make_space(&[&server]).await.unwrap();
    becomes(&worker, &WorkerState::Admitted).await;
    assert!(started.evict(&cluster.records[0].party, "a test"));
    let key = format!("{}verdicts/", server.config().prefix);
    let said = async {
        let prefix = etcd_client::GetOptions::new().with_prefix().with_count_only();
        while client.get(key.clone(), Some(prefix.clone())).await.unwrap().count() < 5 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(MAX, said).await.expect("the router that started meanwhile has a lease, and its verdict stands");
}
