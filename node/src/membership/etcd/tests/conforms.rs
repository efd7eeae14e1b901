//! Runs the conformance suite of all backends.

use super::support::MAX;
use crate::membership::conformance::{self, Fixture, record};
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{RouterMembership, WorkerMembership};
use crate::testing::etcd::EtcdServer;
use crate::testing::relay::Relay;
use baton_types::Party;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{sleep, timeout};

const MEMBERS_MAX: usize = 4;

/// Workers reach etcd through a relay. A router that cannot reach etcd would keep its view, so only workers are
/// silenced.
struct Etcd {
    server: EtcdServer,
    relay: Relay,
    router: EtcdRouter,
}

async fn etcd() -> Etcd {
    let server = EtcdServer::start().unwrap();
    let relay = Relay::start(server.address()).await.unwrap();
    let router = EtcdRouter::start(&server.config(), MEMBERS_MAX);
    Etcd { server, relay, router }
}

impl Fixture for Etcd {
    fn lease(&self) -> Duration {
        Duration::from_secs(self.server.config().lease_ttl_s.into())
    }
    fn router(&self) -> Arc<dyn RouterMembership> {
        Arc::new(self.router.clone())
    }
    fn worker(&self) -> Box<dyn WorkerMembership> {
        let endpoints = vec![format!("http://{}", self.relay.address())];
        Box::new(EtcdWorker::new(&EtcdConfig { endpoints, ..self.server.config() }, MEMBERS_MAX))
    }
    fn set_silent(&self, silent: bool) {
        self.relay.set_silent(silent);
    }
    fn restart_router(&mut self) {
        self.router.close();
        // Revisions start at the clock.
        std::thread::sleep(Duration::from_millis(20));
        self.router = EtcdRouter::start(&self.server.config(), MEMBERS_MAX);
    }
}

#[tokio::test]
async fn who_finds_no_room_is_seen_once_there_is() {
    let server = EtcdServer::start().unwrap();
    let router = EtcdRouter::start(&server.config(), 1);
    let sees = async |party: &Party| {
        let mut view = router.view();
        let seen = view.wait_for(|view| view.members.len() == 1 && view.get(party).is_some());
        assert!(timeout(MAX, seen).await.is_ok(), "{party} is never seen: {:?}", router.view().borrow());
    };
    let records = [record("d-0", 1), record("d-1", 2)];
    let first = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(records[0].clone());
    sees(&records[0].party).await;
    let _second = EtcdWorker::new(&server.config(), MEMBERS_MAX).register(records[1].clone());
    timeout(MAX, async {
        while router.left_out() == 0 {
            sleep(Duration::from_millis(5)).await;
        }
    })
    .await
    .expect("the router hears of the second");
    assert!(first.leave(MAX).await);
    sees(&records[1].party).await;
}

#[tokio::test]
async fn joins_and_is_admitted() {
    conformance::joins_and_is_admitted(&mut etcd().await).await;
}

#[tokio::test]
async fn silence_ends_the_lease_and_the_worker_returns() {
    conformance::silence_ends_the_lease_and_the_worker_returns(&mut etcd().await).await;
}

#[tokio::test]
async fn a_new_incarnation_replaces_the_old() {
    conformance::a_new_incarnation_replaces_the_old(&mut etcd().await).await;
}

#[tokio::test]
async fn workers_return_to_a_restarted_router() {
    conformance::workers_return_to_a_restarted_router(&mut etcd().await).await;
}

#[tokio::test]
async fn eviction_and_readmission() {
    conformance::eviction_and_readmission(&mut etcd().await).await;
}

#[tokio::test]
async fn leaving_is_prompt() {
    conformance::leaving_is_prompt(&mut etcd().await).await;
}

#[tokio::test]
async fn workers_know_each_other() {
    conformance::workers_know_each_other(&mut etcd().await).await;
}
