//! Injects faults and repairs them.

use super::matrix::{Component, Fault};
use super::network::{LinkFault, Net, Network, Way};
use super::relay::Impairment;
use super::stage::{Node, Stage};
use anyhow::{Context, ensure};
use baton_node::testing::etcd::fill;
use rand::Rng;
use rand::rngs::StdRng;
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};
use tokio::time::{sleep, timeout};

/// How long a process is stopped or a link is down. Mostly shorter than any probe, so that the process continues as before. Sometimes
/// longer than the probes of all connections and than a lease. Rarely longer than the silence after which the data plane counts a peer as
/// gone ([`PATIENCE`]).
const SHORT_MS: Range<u64> = 400..1_800;
const LONG_MS: Range<u64> = 6_500..8_500;
const LONG_SHARE: f64 = 0.25;
const LONGEST_MS: Range<u64> = 10_500..12_500;
const LONGEST_SHARE: f64 = 0.1;
/// `transfer.limits.peer_silent_ms`.
pub const PATIENCE: Duration = Duration::from_secs(10);
/// How long a killed process stays down.
const DEAD_MS: Range<u64> = 0..1_000;
/// How long a link is slow.
const SLOW_MS: Range<u64> = 1_500..3_000;
/// How long a process may fail to start, which is longer than any link is down, and the wait before the next try.
const STARTS_MAX: Duration = Duration::from_secs(30);
const START_PAUSE: Duration = Duration::from_millis(300);
/// Longest time for filling etcd, or for freeing space in it.
const SPACE_MAX: Duration = Duration::from_secs(20);
/// Rate of a narrowed link.
const NARROW: &str = "8mbit";
/// A delayed link, each way.
const DELAYED: Impairment = Impairment { delay: Duration::from_millis(150), loss: 0.0, damage: 0.0 };
/// A lossy link, each way.
const LOSSY: Impairment = Impairment { delay: Duration::ZERO, loss: 0.03, damage: 0.0 };
/// A damaging link, each way: affects every long handoff and some short ones.
const DAMAGED: Impairment = Impairment { delay: Duration::ZERO, loss: 0.0, damage: 0.005 };

/// The part that fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A process.
    Node(Node),
    /// A node of etcd, by number.
    Etcd(usize),
    /// The links of one prefill and one decode worker in one network.
    Links(Net, usize, usize),
    /// One direction of one worker's link in one network.
    OneWay(Net, Node, Way),
    /// The link of one router with etcd.
    RouterRegistry(usize),
    /// All nodes of etcd.
    AllEtcd,
}

impl Target {
    /// Draws one of the parts of this kind that this fault can affect.
    pub fn draw(component: Component, fault: Fault, random: &mut StdRng) -> Self {
        if fault == Fault::OneWay {
            let worker = Node::WORKERS[random.random_range(0..Node::WORKERS.len())];
            let net = match component {
                Component::Data => Net::Data,
                Component::Control => Net::Control,
                _ => Net::Registry,
            };
            return Self::OneWay(net, worker, if random.random_bool(0.5) { Way::To } else { Way::From });
        }
        let mut one = || random.random_range(0..2);
        match component {
            Component::Router => Self::Node(Node::Router(one())),
            Component::Prefill => Self::Node(Node::Prefill(one())),
            Component::Decode => Self::Node(Node::Decode(one())),
            Component::Etcd if fault == Fault::Full => Self::AllEtcd,
            Component::Etcd => Self::Etcd(random.random_range(0..3)),
            Component::Data => Self::Links(Net::Data, one(), one()),
            Component::Control => Self::Links(Net::Control, one(), one()),
            Component::Registry => Self::Links(Net::Registry, one(), one()),
            Component::RouterRegistry => Self::RouterRegistry(one()),
        }
    }

    /// Product processes that it touches.
    pub fn nodes(self) -> Vec<Node> {
        match self {
            Self::Node(node) => vec![node],
            Self::Etcd(_) | Self::AllEtcd => Vec::new(),
            Self::OneWay(_, worker, _) => vec![worker],
            Self::Links(_, prefill, decode) => vec![Node::Prefill(prefill), Node::Decode(decode)],
            Self::RouterRegistry(router) => vec![Node::Router(router)],
        }
    }

    /// The network whose links fail, those of [`Target::nodes`]; `None` if a process fails.
    fn net(self) -> Option<Net> {
        match self {
            Self::Links(net, ..) | Self::OneWay(net, ..) => Some(net),
            Self::RouterRegistry(_) => Some(Net::Registry),
            Self::Node(_) | Self::Etcd(_) | Self::AllEtcd => None,
        }
    }

    /// Calls a function for each failing link, with its network and its host's number and name.
    fn each_link(
        self,
        stage: &Stage,
        act: impl Fn(&Network, Net, (usize, &str)) -> anyhow::Result<()>,
    ) -> anyhow::Result<()> {
        let net = self.net().context("a process has no link to fault")?;
        let network = stage.network().context("links are not faulted without a network")?;
        self.nodes().into_iter().try_for_each(|host| act(network, net, (host.number(), &host.to_string())))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Node(node) => node.fmt(f),
            Self::Etcd(number) => write!(f, "etcd-{number}"),
            Self::Links(net, prefill, decode) => write!(f, "{net:?} links of p-{prefill} and d-{decode}"),
            Self::OneWay(net, worker, Way::To) => write!(f, "{net:?} link to {worker}"),
            Self::OneWay(net, worker, Way::From) => write!(f, "{net:?} link from {worker}"),
            Self::RouterRegistry(router) => write!(f, "Registry link of r-{router}"),
            Self::AllEtcd => f.write_str("etcd"),
        }
    }
}

/// How long a fault lasts, without the time of a restart.
pub fn duration(fault: Fault, random: &mut StdRng) -> Duration {
    let range = match fault {
        Fault::Killed => DEAD_MS,
        Fault::Drained => return Duration::ZERO,
        Fault::Stopped | Fault::Cut | Fault::OneWay => match random.random::<f64>() {
            draw if draw < LONGEST_SHARE => LONGEST_MS,
            draw if draw < LONGEST_SHARE + LONG_SHARE => LONG_MS,
            _ => SHORT_MS,
        },
        Fault::Narrowed | Fault::Delayed | Fault::Lossy | Fault::Damaged | Fault::Full => SLOW_MS,
    };
    Duration::from_millis(random.random_range(range))
}

/// Injects the fault into `target`.
pub async fn inject(stage: &Stage, target: Target, fault: Fault) -> anyhow::Result<()> {
    match target {
        Target::Node(node) => stage.service(node).lock().await.signal(signal(fault)),
        Target::Etcd(number) => {
            let mut etcd = stage.etcd.lock().await;
            if fault == Fault::Killed {
                etcd.node(number).kill();
                return Ok(());
            }
            Ok(etcd.node(number).signal("STOP")?)
        }
        Target::AllEtcd => {
            let mut client = stage.etcd.lock().await.node(0).client().await?;
            ensure!(timeout(SPACE_MAX, fill(&mut client)).await?, "etcd is never full");
            Ok(())
        }
        Target::Links(..) | Target::OneWay(..) | Target::RouterRegistry(_) => {
            target.each_link(stage, |network, net, host| network.impair(net, host, link_fault(target, fault)))
        }
    }
}

/// Repairs the fault and returns when that was done. A restarted process listens by then and has not loaded its model.
pub async fn repair(stage: &Stage, target: Target, fault: Fault) -> anyhow::Result<Instant> {
    match target {
        Target::Node(node) => {
            let mut service = stage.service(node).lock().await;
            if fault == Fault::Stopped {
                service.signal("CONT")?;
                return Ok(Instant::now());
            }
            let status = service.ended().await?;
            ensure!(fault == Fault::Killed || status.success(), "{node} ended with {status} when it was drained");
            *service = service.again()?;
            // It may exit before it listens; `serves` starts it again.
            let _ = service.listening().await;
        }
        Target::Etcd(number) if fault == Fault::Stopped => stage.etcd.lock().await.node(number).signal("CONT")?,
        Target::Etcd(number) => {
            let mut etcd = stage.etcd.lock().await;
            tokio::task::block_in_place(|| etcd.node(number).run())?;
        }
        Target::AllEtcd => timeout(SPACE_MAX, stage.etcd.lock().await.make_space()).await??,
        Target::Links(..) | Target::OneWay(..) | Target::RouterRegistry(_) => {
            target.each_link(stage, |network, net, host| network.heal(net, host, link_fault(target, fault)))?;
        }
    }
    Ok(Instant::now())
}

/// The process that this fault ends.
pub fn restarts(target: Target, fault: Fault) -> Option<Node> {
    match (target, fault) {
        (Target::Node(node), Fault::Killed | Fault::Drained) => Some(node),
        _ => None,
    }
}

/// Waits until it serves. Acts as a supervisor: a process that exits while it starts, because its network is down, is started again.
pub async fn serves(stage: &Stage, restarted: Node) -> anyhow::Result<()> {
    let mut service = stage.service(restarted).lock().await;
    let deadline = Instant::now() + STARTS_MAX;
    loop {
        match service.ready().await {
            Err(_) if Instant::now() < deadline => sleep(START_PAUSE).await,
            ready => return ready,
        }
        *service = service.again()?;
    }
}

fn signal(fault: Fault) -> &'static str {
    match fault {
        Fault::Stopped => "STOP",
        Fault::Drained => "TERM",
        _ => "KILL",
    }
}

fn link_fault(target: Target, fault: Fault) -> LinkFault {
    match fault {
        Fault::OneWay => LinkFault::OneWay(if let Target::OneWay(_, _, way) = target { way } else { Way::To }),
        Fault::Damaged => LinkFault::Relayed(DAMAGED),
        Fault::Narrowed => LinkFault::Narrowed(NARROW),
        Fault::Delayed => LinkFault::Relayed(DELAYED),
        Fault::Lossy => LinkFault::Relayed(LOSSY),
        _ => LinkFault::Cut,
    }
}
