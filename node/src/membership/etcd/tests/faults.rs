//! Failures of etcd: it stops, dies, loses all data, or loses its latest changes. Workers and routers keep working
//! through all of them.

use super::support::{Cluster, LONG, MAX, MEMBERS_MAX, becomes};
use crate::membership::conformance::record;
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{MembershipView, RouterMembership as _, WorkerMembership as _, WorkerState};
use crate::testing::etcd::EtcdServer;
use crate::testing::relay::Relay;
use baton_types::InstanceRecord;
use etcd_client::{Client, CompactionOptions, DeleteOptions, Permission};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

/// With a grace in which everyone registers again on any busy machine.
fn patient(config: EtcdConfig) -> EtcdConfig {
    EtcdConfig { view_grace_ms: 10_000, ..config }
}

#[tokio::test]
async fn a_stopped_etcd_ends_nothing() {
    let server = EtcdServer::start().unwrap();
    let mut cluster = Cluster::start(server.config()).await;
    server.signal("STOP").unwrap();
    cluster.stays_whole("stopped", LONG).await;
    server.signal("CONT").unwrap();
    // Leases may have expired in etcd's view; all workers answer, so none leaves the view.
    cluster.sees("nobody is doubted", |_| cluster.router.doubted() == 0).await;
    cluster.is_live().await;
}

#[tokio::test]
async fn an_etcd_that_dies_and_returns_with_its_data_ends_nothing() {
    let mut server = EtcdServer::start().unwrap();
    // Long enough to be renewed after the return, on any busy machine.
    let mut cluster = Cluster::start(EtcdConfig { lease_ttl_s: 6, ..server.config() }).await;
    let before = cluster.router.view().borrow().clone();
    assert!(cluster.router.store().reachable);
    server.kill();
    cluster.stays_whole("dead", LONG).await;
    let store = cluster.router.store();
    assert!(!store.reachable && store.since.elapsed() > LONG / 2, "{store:?}");
    server.run().unwrap();
    cluster.stays_whole("back", LONG).await;
    assert!(cluster.router.store().reachable);
    let after = cluster.router.view().borrow().clone();
    assert_eq!(before.members, after.members, "the leases live on, so nobody registered again");
    cluster.is_live().await;
}

#[tokio::test]
async fn everyone_registers_again_in_a_wiped_etcd() {
    let mut server = EtcdServer::start().unwrap();
    let mut cluster = Cluster::start(patient(server.config())).await;
    let before = cluster.router.view().borrow().clone();
    // No worker answers the router: only the grace can preserve the view.
    cluster.alive.0.lock().clear();
    server.kill();
    server.wipe().unwrap();
    cluster.stays_whole("dead", Duration::from_secs(1)).await;
    server.run().unwrap();
    cluster.stays_whole("empty", LONG).await;
    assert_eq!(cluster.router.doubted(), 0);
    let after = cluster.router.view().borrow().clone();
    for record in &cluster.records {
        let (old, new) = (before.get(&record.party).unwrap(), after.get(&record.party).unwrap());
        assert_ne!(old.registration.revision, new.registration.revision, "another registration");
        assert_eq!(old.registration.incarnation, new.registration.incarnation);
    }
    cluster.is_live().await;
}

#[tokio::test]
async fn a_restored_etcd_is_brought_up_to_date() {
    let mut server = EtcdServer::start().unwrap();
    let mut cluster = Cluster::start(server.config()).await;
    server.kill();
    server.back_up().unwrap();
    server.run().unwrap();
    // Changes after the backup: one worker left, and another incarnation of d-0 replaced the first.
    let gone = cluster.workers.pop().unwrap();
    let gone_party = cluster.records.pop().unwrap().party;
    cluster.alive.0.lock().remove(&gone_party);
    assert!(gone.leave(MAX).await);
    cluster.sees("it left", |view| view.get(&gone_party).is_none()).await;
    let new = record("d-0", 11);
    cluster.alive.0.lock().insert(new.party.clone());
    cluster.workers[0] = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(new.clone());
    cluster.sees("it is replaced", |view| view.get(&new.party).is_some()).await;
    assert!(cluster.router.admit(&new.party));
    becomes(&cluster.workers[0], &WorkerState::Admitted).await;
    cluster.records[0] = new;

    server.kill();
    server.restore().unwrap();
    server.run().unwrap();
    // Live workers never leave the view. The record of the one that left returns, until its lease ends.
    let end = tokio::time::Instant::now() + LONG * 2;
    while tokio::time::Instant::now() < end {
        let view = cluster.router.view();
        assert!(cluster.records.iter().all(|r| view.borrow().get(&r.party).is_some()), "{:?}", view.borrow());
        sleep(Duration::from_millis(10)).await;
    }
    assert!(cluster.router.view().borrow().get(&gone_party).is_none());
    assert!(cluster.router.admit(&cluster.records[0].party));
    becomes(&cluster.workers[0], &WorkerState::Admitted).await;
    cluster.is_live().await;
}

#[tokio::test]
async fn a_router_that_is_cut_off_through_a_compaction_lists_again() {
    let server = EtcdServer::start().unwrap();
    let relay = Relay::start(server.address()).await.unwrap();
    let behind = EtcdConfig { endpoints: vec![format!("http://{}", relay.address())], ..server.config() };
    let router = EtcdRouter::start(&behind, 16);
    let (kept, leaver) = (record("d-0", 1), record("d-1", 2));
    let _kept = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(kept.clone());
    let leaving = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(leaver.clone());
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 2)).await.unwrap().unwrap();

    relay.set_silent(true);
    assert!(leaving.leave(MAX).await);
    let comer = record("p-0", 3);
    let _comer = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(comer.clone());
    let mut client = Client::connect([server.url()], None).await.unwrap();
    let revision = loop {
        let answer = client.get("/baton/default/instances/p-0", None).await.unwrap();
        if !answer.kvs().is_empty() {
            break answer.header().unwrap().revision();
        }
        sleep(Duration::from_millis(10)).await;
    };
    let physical = CompactionOptions::new().with_physical();
    client.compact(revision, Some(physical)).await.unwrap();
    // Long enough for the router to close the silent connection.
    sleep(LONG).await;
    assert!(router.view().borrow().get(&leaver.party).is_some(), "it cannot know");
    relay.set_silent(false);
    let right = |v: &Arc<MembershipView>| v.get(&leaver.party).is_none() && v.get(&comer.party).is_some();
    timeout(MAX, view.wait_for(right)).await.unwrap().unwrap();
    assert!(router.view().borrow().get(&kept.party).is_some());
}

#[tokio::test]
async fn a_watch_that_goes_on_behind_a_compaction_lists_again() {
    let server = EtcdServer::start().unwrap();
    let relay = Relay::start(server.address()).await.unwrap();
    // Its lease needs no renewal before the keepalive of the connection notices the silence.
    let (endpoints, lease_ttl_s) = (vec![format!("http://{}", relay.address())], 60);
    let router = EtcdRouter::start(&EtcdConfig { endpoints, lease_ttl_s, ..server.config() }, MEMBERS_MAX);
    let (kept, leaver, comer) = (record("d-0", 1), record("d-1", 2), record("p-0", 3));
    let _kept = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(kept.clone());
    let leaving = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(leaver.clone());
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 2)).await.unwrap().unwrap();

    // The connection hangs, and the next one succeeds at once. The router resumes its watch from its revision, which is
    // compacted away.
    relay.freeze();
    assert!(leaving.leave(MAX).await);
    let _comer = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(comer.clone());
    let mut client = Client::connect([server.url()], None).await.unwrap();
    let revision = loop {
        let answer = client.get("/baton/default/instances/p-0", None).await.unwrap();
        if !answer.kvs().is_empty() {
            break answer.header().unwrap().revision();
        }
        sleep(Duration::from_millis(10)).await;
    };
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    assert!(relay.accepted() == 1 && router.view().borrow().get(&leaver.party).is_some(), "it knows nothing yet");
    let right = |v: &Arc<MembershipView>| v.get(&leaver.party).is_none() && v.get(&comer.party).is_some();
    timeout(MAX, view.wait_for(right)).await.expect("who left behind the watch is gone").unwrap();
    assert!(router.view().borrow().get(&kept.party).is_some());
    assert_eq!(relay.accepted(), 2, "the watch was begun again, and then the list was read, on one connection");
}

#[tokio::test]
async fn a_lease_that_ended_under_a_stopped_worker_is_believed_and_it_returns() {
    let server = EtcdServer::start().unwrap();
    let cluster = Cluster::start(server.config()).await;
    let relay = Relay::start(server.address()).await.unwrap();
    let config = EtcdConfig { endpoints: vec![format!("http://{}", relay.address())], ..server.config() };
    let stopped = record("d-5", 5);
    let worker = EtcdWorker::new(&config, MEMBERS_MAX).register(stopped.clone());
    let first = cluster.sees("joins", |view| view.get(&stopped.party).is_some()).await;
    assert!(cluster.router.admit(&stopped.party));
    becomes(&worker, &WorkerState::Admitted).await;
    relay.set_silent(true);
    cluster.sees("its lease ends", |view| view.get(&stopped.party).is_none()).await;
    assert!(worker.is_ready() && cluster.whole());
    relay.set_silent(false);
    let again = cluster.sees("it returns", |view| view.get(&stopped.party).is_some()).await;
    let revision = |view: &MembershipView| view.get(&stopped.party).unwrap().registration.revision;
    assert!(revision(&again) > revision(&first));
}

#[tokio::test]
async fn records_that_vanish_together_are_doubted_until_the_workers_are_asked() {
    let server = EtcdServer::start().unwrap();
    let cluster = Cluster::start(server.config()).await;
    let before = cluster.router.view().borrow().clone();
    // One of the three does not answer: only that one is gone, until it registers again.
    cluster.alive.0.lock().remove(&cluster.records[2].party);
    let options = DeleteOptions::new().with_prefix();
    Client::connect([server.url()], None)
        .await
        .unwrap()
        .delete("/baton/default/instances/", Some(options))
        .await
        .unwrap();
    let answered = |v: &MembershipView| cluster.records[..2].iter().all(|r| v.get(&r.party).is_some());
    let all_again = |v: &MembershipView| {
        let newer = |r: &InstanceRecord| {
            let revision = |v: &MembershipView| v.get(&r.party).map(|m| m.registration.revision);
            revision(v) > revision(&before)
        };
        cluster.records.iter().all(newer)
    };
    let mut view = cluster.router.view();
    let end = tokio::time::Instant::now() + MAX;
    while !all_again(&view.borrow_and_update()) {
        assert!(answered(&view.borrow()), "{:?}", view.borrow());
        assert!(tokio::time::timeout_at(end, view.changed()).await.is_ok(), "they do not register again");
    }
}

/// etcd closes a connection at the third probe that comes too soon; three take 18 s.
#[tokio::test]
async fn a_quiet_session_lives_on_through_its_own_probes() {
    let server = EtcdServer::start().unwrap();
    let relay = Relay::start(server.address()).await.unwrap();
    let endpoints = vec![format!("http://{}", relay.address())];
    // Long enough that no renewal is due meanwhile.
    let config = EtcdConfig { endpoints, lease_ttl_s: 120, ..server.config() };
    let cluster = Cluster::start(config).await;
    let sessions = relay.accepted();
    cluster.stays_whole("quiet", Duration::from_secs(20)).await;
    assert_eq!(relay.accepted(), sessions);
}

#[tokio::test]
async fn clusters_share_an_etcd_under_prefixes_and_a_password() {
    let server = EtcdServer::start().unwrap();
    let mut root = Client::connect([server.url()], None).await.unwrap();
    for (user, password) in [("root", "secret"), ("baton", "quiet")] {
        root.user_add(user, password, None).await.unwrap();
        root.role_add(user).await.unwrap();
        root.user_grant_role(user, user).await.unwrap();
    }
    let ours = Permission::read_write("/ours/").with_range_end("/ours0");
    root.role_grant_permission("baton", ours).await.unwrap();
    root.auth_enable().await.unwrap();

    let folder = tempfile::tempdir().unwrap();
    let password = folder.path().join("password");
    std::fs::write(&password, "wrong\n").unwrap();
    let config = EtcdConfig {
        prefix: "/ours/".into(),
        user: Some("baton".into()),
        password_file: Some(password.clone()),
        ..server.config()
    };
    let router = EtcdRouter::start(&config, 16);
    let worker = EtcdWorker::new(&config, MEMBERS_MAX).register(record("d-0", 1));
    sleep(Duration::from_millis(500)).await;
    assert!(router.view().borrow().members.is_empty(), "the password is wrong");
    // Corrected in place, without a restart.
    std::fs::write(&password, "quiet\n").unwrap();
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 1)).await.unwrap().unwrap();
    assert!(router.admit(&record("d-0", 1).party));
    becomes(&worker, &WorkerState::Admitted).await;

    // Another prefix, which this user may not read.
    let elsewhere = EtcdRouter::start(&EtcdConfig { prefix: "/theirs/".into(), ..config }, 16);
    sleep(Duration::from_millis(500)).await;
    assert!(elsewhere.view().borrow().members.is_empty());
}

/// The watch fails at one node and resumes at another, from its revision, which is compacted away meanwhile.
#[tokio::test]
async fn a_watch_that_resumes_behind_a_compaction_lists_again() {
    let etcd = crate::testing::etcd::EtcdCluster::start(3).unwrap();
    let direct = etcd.config();
    etcd.leader().await.unwrap();
    let mut relays = Vec::new();
    for address in &etcd.addresses()[..2] {
        relays.push(Relay::start(address.clone()).await.unwrap());
    }
    relays[1].set_silent(true);
    let endpoints = relays.iter().map(|relay| format!("http://{}", relay.address())).collect();
    let router = EtcdRouter::start(&EtcdConfig { endpoints, ..direct.clone() }, 16);
    let (stays, leaves, comes) = (record("d-0", 1), record("d-1", 2), record("p-0", 3));
    let _staying = EtcdWorker::new(&direct, MEMBERS_MAX).register(stays.clone());
    let leaving = EtcdWorker::new(&direct, MEMBERS_MAX).register(leaves.clone());
    let mut view = router.view();
    timeout(MAX, view.wait_for(|v| v.members.len() == 2)).await.unwrap().unwrap();

    relays[1].set_silent(false);
    relays[0].set_silent(true);
    assert!(leaving.leave(MAX).await);
    let _coming = EtcdWorker::new(&direct, MEMBERS_MAX).register(comes.clone());
    let mut client = Client::connect(&direct.endpoints, None).await.unwrap();
    let registered = async {
        loop {
            let answer = client.get(format!("{}instances/p-0", direct.prefix), None).await.unwrap();
            if !answer.kvs().is_empty() {
                return answer.header().unwrap().revision();
            }
            sleep(Duration::from_millis(10)).await;
        }
    };
    let revision = timeout(MAX, registered).await.unwrap();
    client.compact(revision, Some(CompactionOptions::new().with_physical())).await.unwrap();
    assert!(view.borrow().get(&leaves.party).is_some(), "it heard of the change before it was compacted away");
    let right = |v: &Arc<MembershipView>| v.get(&leaves.party).is_none() && v.get(&comes.party).is_some();
    timeout(MAX, view.wait_for(right)).await.expect("it lists again").unwrap();
    assert!(router.view().borrow().get(&stays.party).is_some());
}
