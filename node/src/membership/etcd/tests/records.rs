//! Records under a worker's name that it did not write: garbage, and those of other incarnations.

use super::support::{Cluster, MAX, MEMBERS_MAX, becomes};
use crate::membership::conformance::record;
use crate::membership::etcd::EtcdWorker;
use crate::membership::{
    MembershipView, RegistrationHandle, RouterMembership as _, WorkerMembership as _, WorkerState,
};
use crate::testing::etcd::EtcdServer;
use baton_proto::convert::stored::encode_record;
use baton_types::{InstanceRecord, ProtocolRange};
use etcd_client::{Client, PutOptions};
use std::time::Duration;
use tokio::time::{sleep, timeout};

const KEY: &str = "/baton/default/instances/d-0";
const GARBAGE: &[u8] = b"\x01\x02garbage";

async fn client(server: &EtcdServer) -> Client {
    Client::connect([server.url()], None).await.unwrap()
}

/// Puts `value` under the name of d-0, on a lease of the test, which lasts a minute.
async fn put_on_a_lease(client: &mut Client, value: Vec<u8>) -> i64 {
    let lease = client.lease_grant(60, None).await.unwrap().id();
    client.put(KEY, value, Some(PutOptions::new().with_lease(lease))).await.unwrap();
    lease
}

async fn is_refused(worker: &RegistrationHandle, why: &str) {
    let mut state = worker.state();
    let refused = state.wait_for(|s| matches!(s, WorkerState::Evicted(reason) if reason.contains(why)));
    assert!(timeout(MAX, refused).await.is_ok_and(|r| r.is_ok()), "{:?}", worker.state().borrow());
}

#[tokio::test]
async fn a_worker_replaces_garbage_under_its_name() {
    let server = EtcdServer::start().unwrap();
    let mut client = client(&server).await;
    // The garbage is there before the first start.
    put_on_a_lease(&mut client, GARBAGE.into()).await;
    let cluster = Cluster::start(server.config()).await;
    // And again while the worker is registered.
    let party = &cluster.records[0].party;
    let registered = |view: &MembershipView| view.get(party).map(|m| m.registration.revision);
    let before = registered(&cluster.router.view().borrow());
    client.put(KEY, GARBAGE, None).await.unwrap();
    cluster.sees("it registers again", |view| registered(view) > before).await;
    sleep(Duration::from_secs(1)).await;
    let found = client.get(KEY, None).await.unwrap();
    assert_eq!(found.kvs()[0].value(), encode_record(&cluster.records[0]));
    assert_ne!(found.kvs()[0].lease(), 0);
    assert_eq!(found.kvs()[0].version(), 4, "one write each time mended it");
    assert!(cluster.whole());
}

#[tokio::test]
async fn a_worker_whose_name_is_on_another_lease_waits_for_its_end() {
    let server = EtcdServer::start().unwrap();
    let mut client = client(&server).await;
    let cluster = Cluster::start(server.config()).await;
    let (worker, party) = (&cluster.workers[0], &cluster.records[0].party);
    // It was replaced: a probe of it gets no answer.
    cluster.alive.0.lock().remove(party);
    let foreign = InstanceRecord { protocol: ProtocolRange { min: 98, max: 99 }, ..record("d-0", 11) };
    for (value, why) in [(GARBAGE.to_vec(), "cannot be read"), (encode_record(&foreign), "newer start")] {
        let lease = put_on_a_lease(&mut client, value.clone()).await;
        is_refused(worker, why).await;
        cluster.sees("the replaced start goes", |view| view.get(party).is_none()).await;
        assert_eq!(client.get(KEY, None).await.unwrap().kvs()[0].value(), value, "it is another's");
        client.lease_revoke(lease).await.unwrap();
        cluster.sees("it returns", |view| view.get(party).is_some()).await;
        assert!(cluster.router.admit(party));
        becomes(worker, &WorkerState::Admitted).await;
    }
}

#[tokio::test]
async fn a_start_takes_its_name_over_from_one_of_another_protocol() {
    let server = EtcdServer::start().unwrap();
    let older = InstanceRecord { protocol: ProtocolRange { min: 98, max: 99 }, ..record("d-5", 1) };
    let cluster = Cluster::start(server.config()).await;
    let first = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(older);
    becomes(&first, &WorkerState::Registered).await;
    let newer = record("d-5", 2);
    let _second = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(newer.clone());
    cluster.sees("it takes over", |view| view.get(&newer.party).is_some()).await;
    is_refused(&first, "newer start").await;
}
