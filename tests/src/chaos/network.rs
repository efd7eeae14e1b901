//! A separate host for each process: network namespaces, connected by a hub in which the run itself is.
//!
//! ```text
//! namespace p-0 ── control0, data0, registry0, admin0 ──┐
//! namespace d-0 ── control2, data2, registry2, admin2 ──┼── hub: forwards, cuts, narrows; holds etcd and the run
//!       ...                                             │      └── relay: a device that delays and loses packets
//! ```
//!
//! Everything is inside namespaces that `unshare` created for the run, and disappears with its last process.

use super::relay::{Impairment, Relay};
use anyhow::{Context, ensure};
use rand::rngs::StdRng;
use std::process::{Command, Stdio};

/// One of a host's networks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Net {
    /// Routers call workers.
    Control = 1,
    /// Workers transfer KV.
    Data = 2,
    /// Workers and routers connect to etcd.
    Registry = 3,
    /// Clients, and this run's own checks. Never faulted.
    Admin = 4,
}

impl Net {
    const ALL: [Self; 4] = [Self::Control, Self::Data, Self::Registry, Self::Admin];

    /// Name of the device in a host; the hub's end has the host's number appended.
    const fn device(self) -> &'static str {
        match self {
            Self::Control => "control",
            Self::Data => "data",
            Self::Registry => "registry",
            Self::Admin => "admin",
        }
    }

    /// Rate of a healthy link, if it is limited: on loopback a transfer would end before a fault can hit it.
    const fn rate(self) -> Option<&'static str> {
        match self {
            Self::Data => Some("120mbit"),
            _ => None,
        }
    }
}

/// The fault of a link.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LinkFault {
    /// All packets are dropped silently.
    Cut,
    /// A rate in the syntax of `tc`.
    Narrowed(&'static str),
    /// Packets to the host, or those from it, are dropped.
    OneWay(Way),
    /// Packets pass through the relay.
    Relayed(Impairment),
}

/// Direction, as seen from a host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Packets to the host.
    To,
    /// Packets from the host.
    From,
}

/// Address of etcd, in the hub.
pub const HUB: &str = "10.3.0.1";
/// Name of the relay's device.
const RELAY: &str = "relay";
/// Routing table that leads to the relay.
const RELAYED: &str = "101";

/// The hosts' network. It needs namespaces of its own: see [`inside`].
pub struct Network {
    relay: Relay,
}

impl Network {
    /// Creates the namespaces `hosts` and all links. `seed` selects which packets are lost.
    pub async fn start(hosts: &[String], seed: u64) -> anyhow::Result<Self> {
        ensure!(std::process::id() == 1, "it would change this machine: run it by `inside`");
        run("mount", &["-t", "tmpfs", "tmpfs", "/run"])?;
        for (file, value) in [("ip_forward", "1"), ("conf/all/rp_filter", "0"), ("conf/default/rp_filter", "0")] {
            std::fs::write(format!("/proc/sys/net/ipv4/{file}"), value).with_context(|| file.to_owned())?;
        }
        ip("link set lo up")?;
        ip(&format!("addr add {HUB}/32 dev lo"))?;
        // Packets of a cut link are dropped without an error.
        ip("route add blackhole 10.0.0.0/8 metric 999")?;
        let relay = Relay::start(RELAY, seed).await?;
        ip(&format!("route add default dev {RELAY} table {RELAYED}"))?;
        ip(&format!("rule add pref 50 iif {RELAY} lookup main"))?;
        for (number, host) in hosts.iter().enumerate() {
            ip(&format!("netns add {host}"))?;
            ip(&format!("-n {host} link set lo up"))?;
            for net in Net::ALL {
                let (device, hub, n) = (net.device(), hub_end(net, number), net as u8);
                ip(&format!("link add {hub} type veth peer name {device} netns {host}"))?;
                ip(&format!("addr add 10.{n}.{}.1/24 dev {hub}", number + 1))?;
                ip(&format!("link set {hub} up"))?;
                ip(&format!("-n {host} addr add {}/24 dev {device}", address(net, number)))?;
                ip(&format!("-n {host} link set {device} up"))?;
                ip(&format!("-n {host} route add 10.{n}.0.0/16 via 10.{n}.{}.1 dev {device}", number + 1))?;
                if let Some(rate) = net.rate() {
                    narrow(net, number, host, rate)?;
                }
            }
        }
        Ok(Self { relay })
    }

    /// Injects a fault into the link of host `number`, called `host`.
    pub fn impair(&self, net: Net, (number, host): (usize, &str), link_fault: LinkFault) -> anyhow::Result<()> {
        match link_fault {
            LinkFault::Cut => ip(&format!("link set {} down", hub_end(net, number))),
            LinkFault::Narrowed(rate) => narrow(net, number, host, rate),
            LinkFault::OneWay(way) => ip(&format!("rule add {}", one_way(net, number, way))),
            LinkFault::Relayed(impairment) => {
                self.relay.set(net as u8, impairment);
                relayed(net, number).iter().try_for_each(|rule| ip(&format!("rule add {rule}")))
            }
        }
    }

    /// Recently recorded bytes from one of the links through the relay.
    pub fn overheard(&self, random: &mut StdRng) -> Option<Vec<u8>> {
        self.relay.overheard(random)
    }

    /// Undoes [`Network::impair`].
    pub fn heal(&self, net: Net, (number, host): (usize, &str), link_fault: LinkFault) -> anyhow::Result<()> {
        match (link_fault, net.rate()) {
            (LinkFault::Cut, _) => ip(&format!("link set {} up", hub_end(net, number))),
            (LinkFault::Narrowed(_), Some(rate)) => narrow(net, number, host, rate),
            (LinkFault::Narrowed(_), None) => {
                run("tc", &["qdisc", "del", "dev", &hub_end(net, number), "root"])?;
                run("tc", &["-n", host, "qdisc", "del", "dev", net.device(), "root"])
            }
            (LinkFault::OneWay(way), _) => ip(&format!("rule del {}", one_way(net, number, way))),
            (LinkFault::Relayed(_), _) => {
                relayed(net, number).iter().try_for_each(|rule| ip(&format!("rule del {rule}")))
            }
        }
    }
}

/// Address of host `number` in `net`.
pub fn address(net: Net, number: usize) -> String {
    format!("10.{}.{}.2", net as u8, number + 1)
}

/// Command prefix that runs a program in the namespace `host`, in the same process.
pub fn enter(host: &str) -> Vec<String> {
    // Not nsenter: UCX looks for devices below /sys, which has to be that of the namespace.
    ["ip", "netns", "exec", host].map(str::to_owned).to_vec()
}

/// A command that runs a program in its own namespaces, which end with it however it ends. An error says why that is impossible.
pub fn inside() -> anyhow::Result<Command> {
    let mut command = Command::new("unshare");
    command.args(["--net", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc"]);
    let mut probe = Command::new("unshare");
    probe.args(command.get_args()).args([
        "sh",
        "-c",
        "mount -t tmpfs tmpfs /run && ip tuntap add probe mode tun && tc -V",
    ]);
    let output = probe.stdin(Stdio::null()).output().context("unshare")?;
    ensure!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr).trim());
    Ok(command)
}

fn hub_end(net: Net, number: usize) -> String {
    format!("{}{number}", net.device())
}

/// In both directions.
fn narrow(net: Net, number: usize, host: &str, rate: &str) -> anyhow::Result<()> {
    let shape = ["root", "tbf", "rate", rate, "burst", "64kb", "latency", "100ms"];
    run("tc", &[&["qdisc", "replace", "dev", &hub_end(net, number)], &shape[..]].concat())?;
    run("tc", &[&["-n", host, "qdisc", "replace", "dev", net.device()], &shape[..]].concat())
}

/// In both directions; packets that leave the relay are routed normally.
fn relayed(net: Net, number: usize) -> [String; 2] {
    let (to, from) = (address(net, number), hub_end(net, number));
    [format!("pref 60 to {to}/32 lookup {RELAYED}"), format!("pref 61 iif {from} lookup {RELAYED}")]
}

/// A rule that drops packets of one direction.
fn one_way(net: Net, number: usize, way: Way) -> String {
    match way {
        Way::To => format!("pref 55 to {}/32 blackhole", address(net, number)),
        Way::From => format!("pref 56 iif {} blackhole", hub_end(net, number)),
    }
}

fn ip(words: &str) -> anyhow::Result<()> {
    run("ip", &words.split(' ').collect::<Vec<_>>())
}

fn run(program: &str, arguments: &[&str]) -> anyhow::Result<()> {
    let output = Command::new(program).args(arguments).stdin(Stdio::null()).output().context(program.to_owned())?;
    let error = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{program} {}: {}", arguments.join(" "), error.trim());
    Ok(())
}
