//! Strikes, and repairs.

use super::matrix::{Component, Fault};
use super::network::{Ill, Net, Network};
use super::relay::Manner;
use super::stage::{Node, Stage};
use anyhow::{Context, ensure};
use rand::Rng;
use rand::rngs::StdRng;
use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// How long a process stands still or a link is down: mostly shorter than any probe, so that it goes on as if nothing was, and now and
/// then longer than the probes of all connections and than a lease.
const SHORT_MS: Range<u64> = 400..1_800;
const LONG_MS: Range<u64> = 6_500..8_500;
const LONG_SHARE: f64 = 0.3;
/// How long a killed process stays away.
const DEAD_MS: Range<u64> = 0..1_000;
/// How long a link is slow.
const SLOW_MS: Range<u64> = 1_500..3_000;
/// How long a process may fail to start, which is longer than any link is down, and the wait before it tries again.
const STARTS_MAX: Duration = Duration::from_secs(30);
const START_PAUSE: Duration = Duration::from_millis(300);
/// A narrowed link.
const NARROW: &str = "8mbit";
/// A delayed link, each way.
const DELAYED: Manner = Manner { delay: Duration::from_millis(150), loss: 0.0 };
/// A lossy link, each way.
const LOSSY: Manner = Manner { delay: Duration::ZERO, loss: 0.03 };

/// Which of them fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    /// A process.
    Node(Node),
    /// A node of etcd, by number.
    Etcd(usize),
    /// The links of one prefill and one decode worker in one network.
    Links(Net, usize, usize),
    /// The link of one router with etcd.
    RouterRegistry(usize),
}

impl Target {
    /// Draws one of the parts of this kind.
    pub fn draw(component: Component, random: &mut StdRng) -> Self {
        let mut one = || random.random_range(0..2);
        match component {
            Component::Router => Self::Node(Node::Router(one())),
            Component::Prefill => Self::Node(Node::Prefill(one())),
            Component::Decode => Self::Node(Node::Decode(one())),
            Component::Etcd => Self::Etcd(random.random_range(0..3)),
            Component::Data => Self::Links(Net::Data, one(), one()),
            Component::Control => Self::Links(Net::Control, one(), one()),
            Component::Registry => Self::Links(Net::Registry, one(), one()),
            Component::RouterRegistry => Self::RouterRegistry(one()),
        }
    }

    /// Serving processes that it touches.
    pub fn nodes(self) -> Vec<Node> {
        match self {
            Self::Node(node) => vec![node],
            Self::Etcd(_) => Vec::new(),
            Self::Links(_, prefill, decode) => vec![Node::Prefill(prefill), Node::Decode(decode)],
            Self::RouterRegistry(router) => vec![Node::Router(router)],
        }
    }

    /// The network whose links fail, those of [`Target::nodes`]; `None` where a process does.
    fn net(self) -> Option<Net> {
        match self {
            Self::Links(net, ..) => Some(net),
            Self::RouterRegistry(_) => Some(Net::Registry),
            Self::Node(_) | Self::Etcd(_) => None,
        }
    }

    /// Does something to each link that fails: its network, and its host by number and name.
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
            Self::RouterRegistry(router) => write!(f, "Registry link of r-{router}"),
        }
    }
}

/// How long a fault lasts, besides the time that a restart takes.
pub fn duration(fault: Fault, random: &mut StdRng) -> Duration {
    let range = match fault {
        Fault::Killed => DEAD_MS,
        Fault::Drained => return Duration::ZERO,
        Fault::Stopped | Fault::Cut if random.random_bool(LONG_SHARE) => LONG_MS,
        Fault::Stopped | Fault::Cut => SHORT_MS,
        Fault::Narrowed | Fault::Delayed | Fault::Lossy => SLOW_MS,
    };
    Duration::from_millis(random.random_range(range))
}

/// Makes `target` fail.
pub async fn strike(stage: &Stage, target: Target, fault: Fault) -> anyhow::Result<()> {
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
        Target::Links(..) | Target::RouterRegistry(_) => {
            target.each_link(stage, |network, net, host| network.harm(net, host, ill(fault)))
        }
    }
}

/// Undoes it. The moment from which promises count: what was restarted says that it listens, before it loads its model.
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
            // The clock runs, too, where it ends before it listens; `serves` starts it once more.
            let _ = service.listening().await;
        }
        Target::Etcd(number) if fault == Fault::Stopped => stage.etcd.lock().await.node(number).signal("CONT")?,
        Target::Etcd(number) => {
            let mut etcd = stage.etcd.lock().await;
            tokio::task::block_in_place(|| etcd.node(number).run())?;
        }
        Target::Links(..) | Target::RouterRegistry(_) => {
            target.each_link(stage, |network, net, host| network.heal(net, host, ill(fault)))?;
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

/// Waits until it serves. As a supervisor does: what ends while it starts, because its network is down, is started once more.
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

fn ill(fault: Fault) -> Ill {
    match fault {
        Fault::Narrowed => Ill::Narrowed(NARROW),
        Fault::Delayed => Ill::Relayed(DELAYED),
        Fault::Lossy => Ill::Relayed(LOSSY),
        _ => Ill::Cut,
    }
}
