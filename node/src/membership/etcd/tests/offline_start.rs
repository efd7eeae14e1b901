//! A router that starts while etcd is unreachable.

use super::support::{Answers, Cluster, LONG, MAX, MEMBERS_MAX};
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker, OfflineSources};
use crate::membership::{MembershipView, RouterMembership as _, WorkerMembership as _};
use crate::testing::etcd::EtcdServer;
use baton_types::InstanceRecord;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::time::{sleep, timeout};

async fn sees(router: &EtcdRouter, what: &str, done: impl Fn(&MembershipView) -> bool) -> Arc<MembershipView> {
    let mut view = router.view();
    match timeout(MAX, view.wait_for(|v| done(v))).await {
        Ok(seen) => seen.unwrap().clone(),
        Err(_) => panic!("{what}: never; now {:?}", router.view().borrow()),
    }
}

fn cache(folder: &Path) -> OfflineSources {
    OfflineSources { cache_dir: Some(folder.into()), seeds: vec![] }
}

/// Whether the cache names all of these. A file of another name is still being written, and not read at a start.
fn names_all(folder: &Path, records: &[InstanceRecord]) -> bool {
    let bytes = std::fs::read(folder.join("members")).unwrap_or_default();
    let text = String::from_utf8_lossy(&bytes).into_owned();
    records.iter().all(|record| text.contains(record.party.instance.as_str()))
}

/// A cluster of three whose router has cached its view.
async fn remembered(server: &EtcdServer) -> (Cluster, TempDir) {
    let folder = tempfile::tempdir().unwrap();
    let cluster = Cluster::start_offline(server.config(), cache(folder.path())).await;
    // Changes are collected before a write.
    let written = async {
        while !names_all(folder.path(), &cluster.records) {
            sleep(Duration::from_millis(20)).await;
        }
    };
    timeout(MAX, written).await.expect("the view is cached");
    (cluster, folder)
}

#[tokio::test]
async fn a_router_goes_by_the_workers_that_it_remembers_until_etcd_is_back() {
    let mut server = EtcdServer::start().unwrap();
    let (mut cluster, folder) = remembered(&server).await;
    let before = cluster.router.view().borrow().clone();
    server.kill();
    // One ended meanwhile: a worker that does not answer is not a member.
    let (gone, leaver) = (cluster.records.pop().unwrap(), cluster.workers.pop().unwrap());
    cluster.alive.0.lock().remove(&gone.party);
    drop(leaver);
    let start =
        |offline| EtcdRouter::start_with(&server.config(), MEMBERS_MAX, Box::new(cluster.alive.clone()), offline);
    let (blind, router) = (start(OfflineSources::default()), start(cache(folder.path())));
    sees(&router, "who answers is there", |view| view.members.len() == 2).await;
    sleep(Duration::from_secs(2)).await;
    assert_eq!((router.unconfirmed(), router.store().reachable), (Some(2), false), "and says so");
    assert_eq!((blind.unconfirmed(), blind.view().borrow().members.len()), (Some(0), 0), "the hazard");
    let recalled = router.view().borrow().clone();
    assert!(cluster.records.iter().all(|r| recalled.get(&r.party) == before.get(&r.party)), "{recalled:?}");
    assert!(router.admit(&cluster.records[0].party), "its verdict waits for etcd");

    server.run().unwrap();
    sees(&blind, "etcd is back", |view| view.members.len() >= 2).await;
    let settled = async {
        while router.unconfirmed().is_some() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(MAX, settled).await.expect("it follows etcd");
    sleep(LONG).await;
    let after = router.view().borrow().clone();
    assert_eq!((after.members.len(), router.doubted()), (2, 0), "{after:?}");
    assert!(cluster.records.iter().all(|r| after.get(&r.party) == before.get(&r.party)), "nobody registered again");
    cluster.router = router;
    cluster.is_live().await;
}

#[tokio::test]
async fn a_router_that_ends_remembers_what_it_has_not_written_yet() {
    let mut server = EtcdServer::start().unwrap();
    let (mut cluster, folder) = remembered(&server).await;
    let more = record("d-9", 9);
    let _registered = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(more.clone());
    cluster.sees("a new one", |view| view.get(&more.party).is_some()).await;
    server.kill();
    // Changes are still collected for the next write.
    cluster.router.close();
    timeout(MAX, cluster.router.remembered()).await.expect("the last view is cached");
    cluster.records.push(more);
    assert!(names_all(folder.path(), &cluster.records));
}

#[tokio::test]
async fn a_wiped_etcd_takes_nobody_from_a_router_that_remembers() {
    let mut server = EtcdServer::start().unwrap();
    let (mut cluster, folder) = remembered(&server).await;
    server.kill();
    server.wipe().unwrap();
    let probe = Box::new(cluster.alive.clone());
    // A grace in which everyone registers again on any busy machine.
    let config = EtcdConfig { view_grace_ms: 10_000, ..server.config() };
    cluster.router = EtcdRouter::start_with(&config, MEMBERS_MAX, probe, cache(folder.path()));
    sees(&cluster.router, "all are remembered", |view| view.members.len() == 3).await;
    // No worker answers the router: only the grace can preserve the view.
    cluster.alive.0.lock().clear();
    server.run().unwrap();
    cluster.stays_whole("empty", LONG).await;
    assert_eq!((cluster.router.unconfirmed(), cluster.router.doubted()), (None, 0));
    cluster.is_live().await;
}

#[tokio::test]
async fn workers_are_found_by_their_addresses() {
    let mut server = EtcdServer::start().unwrap();
    server.kill();
    let alive = Answers::default();
    let (known, silent) = (record("d-0", 1), record("d-1", 2));
    alive.0.lock().insert(known.party.clone());
    for (port, record) in [(7001, &known), (7002, &silent)] {
        alive.1.lock().insert(port, record.clone());
    }
    let seeds = ["localhost:7001", "127.0.0.1:7002", "127.0.0.1:7003", "nowhere.invalid:7001"].map(String::from).into();
    let offline = OfflineSources { cache_dir: None, seeds };
    let router = EtcdRouter::start_with(&server.config(), MEMBERS_MAX, Box::new(alive.clone()), offline);
    let view = sees(&router, "who answers is found", |view| !view.members.is_empty()).await;
    assert_eq!(*view.get(&known.party).unwrap().record, known);
    // A worker that restarts is found with its new incarnation.
    let again = record("d-0", 9);
    alive.0.lock().insert(again.party.clone());
    alive.1.lock().insert(7001, again.clone());
    sees(&router, "its next start", |view| view.get(&again.party).is_some()).await;
    assert_eq!(router.unconfirmed(), Some(1));
}
