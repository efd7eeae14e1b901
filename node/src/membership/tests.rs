//! The embedded backend, over in-memory pipes and under paused time.

use super::embedded::{Connect, EmbeddedRouter, EmbeddedWorker, JoinConfig, LeaseConfig};
use super::*;
use crate::grpc::{ChannelConfig, Stream, channel_over};
use crate::testing::relay::carry;
use baton_proto::v1::membership_client::MembershipClient;
use baton_proto::v1::{self, join_request};
use conformance::{Fixture, record};
use futures::future::BoxFuture;
use http::uri::Authority;
use std::collections::BTreeMap;
use std::io;
use tokio::io::DuplexStream;
use tokio::sync::mpsc;
use tonic::Code;

const LEASE_MS: u64 = 1_000;

/// The network: addresses map to running routers; bytes can be held back.
#[derive(Clone, Default)]
struct Network {
    routers: Arc<parking_lot::Mutex<BTreeMap<String, RunningRouter>>>,
    silent: watch::Sender<bool>,
}

#[derive(Clone)]
struct RunningRouter {
    membership: EmbeddedRouter,
    connections: mpsc::Sender<io::Result<DuplexStream>>,
    dead: CancellationToken,
}

impl Network {
    /// Starts a router at `address`, after killing the one that runs there.
    fn start_router(&self, address: &str, config: &LeaseConfig) {
        if let Some(old) = self.routers.lock().remove(address) {
            old.dead.cancel();
        }
        let membership = EmbeddedRouter::new(config);
        let (connections, incoming) = mpsc::channel(16);
        let incoming = tokio_stream::wrappers::ReceiverStream::new(incoming);
        let server =
            tonic::transport::Server::builder().add_service(membership.service()).serve_with_incoming(incoming);
        let dead = CancellationToken::new();
        tokio::spawn({
            let dead = dead.clone();
            async move {
                tokio::select! {
                    served = server => served.unwrap(),
                    () = dead.cancelled() => {}
                }
            }
        });
        self.routers.lock().insert(address.into(), RunningRouter { membership, connections, dead });
    }

    fn router(&self, address: &str) -> EmbeddedRouter {
        self.routers.lock()[address].membership.clone()
    }

    async fn dial(self, address: String) -> io::Result<DuplexStream> {
        let refused = || io::Error::from(io::ErrorKind::ConnectionRefused);
        let router = self.routers.lock().get(&address).cloned().ok_or_else(refused)?;
        let (near, near_end) = tokio::io::duplex(1 << 16);
        let (far, far_end) = tokio::io::duplex(1 << 16);
        router.connections.send(Ok(far)).await.map_err(|_| refused())?;
        let ((near_read, near_write), (far_read, far_write)) = (tokio::io::split(near_end), tokio::io::split(far_end));
        let link = |from, to| carry(from, to, self.silent.subscribe());
        let (there, back) = (link(near_read, far_write), link(far_read, near_write));
        tokio::spawn(async move {
            // A dead router's connections are reset; either end closing closes both.
            tokio::select! {
                _ = there => {}
                _ = back => {}
                () = router.dead.cancelled() => {}
            }
        });
        Ok(near)
    }

    fn connect(&self) -> Connect {
        let network = self.clone();
        Arc::new(move |address| {
            let (network, address) = (network.clone(), address.to_owned());
            let dial = move || -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
                let dial = network.clone().dial(address.clone());
                Box::pin(async move { Ok(Box::new(dial.await?) as Box<dyn Stream>) })
            };
            Ok(channel_over(Arc::new(dial), Authority::from_static("router"), &ChannelConfig::default()))
        })
    }

    fn worker(&self, routers: &[&str]) -> EmbeddedWorker {
        let routers = routers.iter().map(|r| r.to_string()).collect();
        EmbeddedWorker::with_connect(
            &JoinConfig { routers, connect_ms_max: 500, ..JoinConfig::default() },
            self.connect(),
        )
    }
}

struct Embedded(Network);

fn lease_config() -> LeaseConfig {
    LeaseConfig { lease_ms: LEASE_MS, members_max: 4, ..LeaseConfig::default() }
}

async fn embedded() -> Embedded {
    let network = Network::default();
    network.start_router("r", &lease_config());
    Embedded(network)
}

impl Fixture for Embedded {
    fn lease(&self) -> Duration {
        Duration::from_millis(LEASE_MS)
    }
    fn router(&self) -> Arc<dyn RouterMembership> {
        Arc::new(self.0.router("r"))
    }
    fn worker(&self) -> Box<dyn WorkerMembership> {
        Box::new(self.0.worker(&["r"]))
    }
    fn set_silent(&self, silent: bool) {
        self.0.silent.send_replace(silent);
    }
    fn restart_router(&mut self) {
        // Revisions start at the system clock, which does not pause.
        std::thread::sleep(Duration::from_millis(20));
        self.0.start_router("r", &lease_config());
    }
}

#[tokio::test(start_paused = true)]
async fn embedded_conforms() {
    conformance::all(embedded).await;
}

async fn until_state(worker: &RegistrationHandle, expected: WorkerState) {
    let mut state = worker.state();
    let reached = tokio::time::timeout(Duration::from_secs(600), state.wait_for(|s| *s == expected)).await;
    assert!(reached.is_ok_and(|r| r.is_ok()), "{:?} never became {expected:?}", worker.state().borrow());
}

#[tokio::test(start_paused = true)]
async fn one_of_two_routers_is_enough() {
    let network = Network::default();
    network.start_router("a", &lease_config());
    let worker = network.worker(&["a", "b"]).register(record("d-0", 1));
    until_state(&worker, WorkerState::Registered).await;
    let party = record("d-0", 1).party;
    assert!(network.router("a").admit(&party));
    until_state(&worker, WorkerState::Admitted).await;

    // A second router starts, the worker registers with it, and its verdict differs: one admission is enough while the
    // first is reachable.
    network.start_router("b", &lease_config());
    let mut seen = network.router("b").view();
    seen.wait_for(|view| view.get(&party).is_some()).await.unwrap();
    assert!(network.router("b").evict(&party, "unreachable from b"));
    tokio::time::sleep(Duration::from_secs(5)).await;
    assert!(worker.is_ready());
    network.routers.lock().remove("a").unwrap().dead.cancel();
    until_state(&worker, WorkerState::Evicted("unreachable from b".into())).await;
    assert!(worker.leave(Duration::from_secs(60)).await);
}

#[tokio::test(start_paused = true)]
async fn a_closed_router_ends_its_sessions_and_takes_no_new_ones() {
    let network = Network::default();
    network.start_router("r", &lease_config());
    let worker = network.worker(&["r"]).register(record("d-0", 1));
    until_state(&worker, WorkerState::Registered).await;
    let router = network.router("r");
    router.close();
    router.view().wait_for(|view| view.members.is_empty()).await.unwrap();
    until_state(&worker, WorkerState::Unregistered).await;
    tokio::time::sleep(Duration::from_secs(60)).await;
    assert!(router.view().borrow().members.is_empty());
}

/// Registers by hand with these first messages; returns code and text of the refusal.
async fn refusal(network: &Network, first: Vec<join_request::Message>) -> (Code, String) {
    let channel = (network.connect())("r").unwrap();
    let requests = first.into_iter().map(|m| v1::JoinRequest { message: Some(m) });
    let stream = futures::StreamExt::chain(tokio_stream::iter(requests.collect::<Vec<_>>()), tokio_stream::pending());
    let status = MembershipClient::new(channel).join(stream).await.map(drop).unwrap_err();
    (status.code(), status.message().to_owned())
}

#[tokio::test(start_paused = true)]
async fn bad_joins_are_refused_and_say_why() {
    let network = Network::default();
    network.start_router("r", &lease_config());
    let good = || v1::InstanceRecord::from(record("x", 9));
    let check = async |first: Vec<join_request::Message>, code: Code, text: &str| {
        let (got, message) = refusal(&network, first).await;
        assert!(got == code && message.contains(text), "{got:?} {message}");
    };
    use join_request::Message::{Heartbeat, Record};
    check(vec![Heartbeat(v1::Heartbeat {})], Code::InvalidArgument, "first message").await;
    check(vec![Record(v1::InstanceRecord { pool: String::new(), ..good() })], Code::InvalidArgument, "record.pool")
        .await;
    let future = Some(v1::ProtocolRange { min: 90, max: 91 });
    check(vec![Record(v1::InstanceRecord { protocol: future, ..good() })], Code::InvalidArgument, "protocols 90 to 91")
        .await;
    check(vec![], Code::DeadlineExceeded, "no record").await;

    let workers: Vec<_> = (0..4).map(|i| network.worker(&["r"]).register(record(&format!("d-{i}"), i))).collect();
    for worker in &workers {
        until_state(worker, WorkerState::Registered).await;
    }
    check(vec![Record(good())], Code::ResourceExhausted, "members_max").await;
    let clone = v1::InstanceRecord { endpoint: "127.0.0.1:7".into(), ..record("d-0", 0).into() };
    check(vec![Record(clone)], Code::AlreadyExists, "belongs to one process start").await;
}
