//! The suite of all backends.

use crate::membership::conformance::{self, Fixture};
use crate::membership::etcd::{EtcdConfig, EtcdRouter, EtcdWorker};
use crate::membership::{RouterMembership, WorkerMembership};
use crate::testing::etcd::EtcdServer;
use crate::testing::relay::Relay;
use std::sync::Arc;
use std::time::Duration;

const MEMBERS_MAX: usize = 4;

/// Workers reach etcd through a relay. A router that could not hear etcd would keep its view, so only workers fall silent.
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
        Box::new(EtcdWorker::new(&EtcdConfig { endpoints, ..self.server.config() }))
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
