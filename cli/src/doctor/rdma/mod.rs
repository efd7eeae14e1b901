//! Checks RDMA ports: which exist, which this process can use, and which were requested.

use super::finding::{Finding, Verdict};
use super::net_devices::{NetDevices, covers};
use super::sysfs::{Node, line, names, node};
use std::path::Path;

/// A port of an RDMA device of this host.
struct Port {
    /// As UCX names it, e.g. `mlx5_0:1`.
    name: String,
    /// `4: ACTIVE`, `200 Gb/sec (4X HDR)`, `InfiniBand`.
    tells: [String; 3],
    /// Device node of the device, e.g. `uverbs0`; `None` if the kernel has none.
    verbs: Option<(String, Node)>,
}

/// The problem of a port.
enum Trouble {
    /// This process was not given the device, or cannot open it.
    Closed { found: String, remedy: &'static str },
    /// It is not active.
    Down,
}

/// Why a port is checked.
#[derive(Clone, Copy, PartialEq)]
enum Selection {
    ByName,
    /// No device was named, or only others were excluded.
    WithAll,
    Not,
}

/// Checks every port and every named device. Also returns whether any port can be used.
pub(super) fn look(root: &Path, wanted: bool, devices: &NetDevices) -> (Vec<Finding>, bool) {
    let ports = ports(root);
    let usable = ports.iter().any(|port| devices.takes(&port.name) && port.trouble().is_none());
    let mut findings: Vec<Finding> = ports.iter().map(|port| port.judge(wanted, devices, usable)).collect();
    findings.extend(devices.named().iter().filter_map(|name| other(root, name, &ports)));
    findings.extend(choice(&ports, wanted, devices, usable));
    (findings, usable)
}

/// A port that this process can use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct UsablePort {
    /// `mlx5_0`.
    pub(super) device: String,
    /// `mlx5_0:1`.
    pub(super) name: String,
}

/// Ports among `devices` that this process can use.
pub(super) fn usable(root: &Path, devices: &NetDevices) -> Vec<UsablePort> {
    let ports = ports(root).into_iter().filter(|port| devices.takes(&port.name) && port.trouble().is_none());
    let usable =
        ports.filter_map(|port| Some(UsablePort { device: port.name.split_once(':')?.0.to_owned(), name: port.name }));
    usable.collect()
}

/// Whether an RDMA port of this host is among the named devices.
pub(super) fn is_among(root: &Path, devices: &NetDevices) -> bool {
    devices.given().is_some() && ports(root).iter().any(|port| devices.takes(&port.name))
}

fn ports(root: &Path) -> Vec<Port> {
    let class = root.join("sys/class/infiniband");
    let mut found = Vec::new();
    for device in names(&class) {
        let (ports, verbs) = (class.join(&device).join("ports"), verbs(root, &device));
        for number in names(&ports) {
            let tells = ["state", "rate", "link_layer"]
                .map(|file| line(&ports.join(&number).join(file)).unwrap_or_else(|| "unknown".into()));
            found.push(Port { name: format!("{device}:{number}"), tells, verbs: verbs.clone() });
        }
    }
    found
}

/// The node through which processes use a device; the kernel states which node belongs to which device.
fn verbs(root: &Path, device: &str) -> Option<(String, Node)> {
    let class = root.join("sys/class/infiniband_verbs");
    let of = |name: &String| line(&class.join(name).join("ibdev")).is_some_and(|of| of == device);
    let name = names(&class).into_iter().find(of)?;
    let node = node(&root.join("dev/infiniband").join(&name));
    Some((name, node))
}

impl Port {
    fn trouble(&self) -> Option<Trouble> {
        let closed = |found, remedy| Some(Trouble::Closed { found, remedy });
        match &self.verbs {
            None => {
                closed("no verbs for it".into(), "load the module ib_uverbs on this host (in Kubernetes on the node)")
            }
            Some((name, Node::Missing)) => closed(
                format!("no /dev/infiniband/{name}"),
                "the port is the host's and was not given to this container: ask for the device plugin's resource (rdma.resource of the \
                 chart, rdma/... in the pod's limits)",
            ),
            Some((name, Node::Closed(why))) => closed(
                format!("/dev/infiniband/{name}: {why}"),
                "the node is there and may not be opened: a volume alone gives no right to a device, so ask for the device plugin's \
                 resource (rdma/...); where this is not root, it needs mode 0666 on the host (rdma-core's udev rules)",
            ),
            Some((_, Node::Opens)) => (!self.tells[0].ends_with("ACTIVE")).then_some(Trouble::Down),
        }
    }

    /// `others` says whether another port can be used.
    fn judge(&self, wanted: bool, devices: &NetDevices, others: bool) -> Finding {
        let asked = if !devices.takes(&self.name) {
            Selection::Not
        } else if devices.named().is_empty() {
            Selection::WithAll
        } else {
            Selection::ByName
        };
        let (check, tells) = (format!("rdma {}", self.name), self.tells.join(", "));
        match self.trouble() {
            None => Finding::ok(check, tells),
            Some(Trouble::Closed { found, remedy }) => {
                let fails = asked == Selection::ByName || (asked == Selection::WithAll && wanted && !others);
                Finding::new(check, Verdict::Failure.if_wanted(fails), format!("{tells}; {found}"), remedy)
            }
            Some(Trouble::Down) => {
                let (verdict, remedy) = match asked {
                    Selection::Not => (Verdict::Absent, DOWN),
                    Selection::WithAll if others => (Verdict::Warning, IDLE),
                    Selection::WithAll if !wanted => (Verdict::Warning, DOWN),
                    _ => (Verdict::Failure, DOWN),
                };
                Finding::new(check, verdict, tells, remedy)
            }
        }
    }
}

const DOWN: &str =
    "the port carries nothing: look at cable, switch port, `ip link` (RoCE) and the subnet manager (InfiniBand)";
const IDLE: &str = "UCX passes the port over, and others are up: where it should carry KV, look at cable, switch and subnet manager; where \
                    not, name those that do: transfer.ucx_net_devices (rdma.devices of the chart), and --ucx-net-devices here";

/// The problem of a named device that is none of these ports; it may be a network device.
fn other(root: &Path, name: &str, ports: &[Port]) -> Option<Finding> {
    if ports.iter().any(|port| covers(name, &port.name)) {
        return None;
    }
    let class = root.join("sys/class/net");
    match line(&class.join(name).join("operstate")) {
        Some(state) if state == "down" => {
            let remedy =
                "UCX leaves out a device that is down when it starts: `ip link set DEVICE up`, or name another";
            Some(Finding::new(format!("device {name}"), Verdict::Failure, state, remedy))
        }
        Some(_) => None,
        None => {
            let others = names(&class).into_iter().filter(|name| class.join(name).join("operstate").exists());
            let here: Vec<String> = ports.iter().map(|port| port.name.clone()).chain(others).collect();
            let remedy = format!(
                "it is named in transfer.ucx_net_devices (rdma.devices of the chart) or --ucx-net-devices; here there are: {}",
                here.join(" ")
            );
            Some(Finding::new(format!("device {name}"), Verdict::Failure, "not here", remedy))
        }
    }
}

/// The problem with the choice of ports, regardless of their state.
fn choice(ports: &[Port], wanted: bool, devices: &NetDevices, usable: bool) -> Option<Finding> {
    if ports.is_empty() {
        let remedy = "no RDMA device is seen here: load the NIC's driver on this host (in Kubernetes on the node); where each network \
                      namespace has devices of its own (`rdma system`: exclusive), have this container given one";
        return Some(Finding::new("rdma", Verdict::Failure.if_wanted(wanted), "no device", remedy));
    }
    if !wanted {
        return None;
    }
    let Some(list) = devices.given() else {
        let remedy = "a worker looks for lanes at the network device of its address, where RDMA has none: name the port in \
                      transfer.ucx_net_devices (rdma.devices of the chart), and in --ucx-net-devices here";
        return usable.then(|| Finding::new("rdma", Verdict::Warning, "no port is named", remedy));
    };
    if ports.iter().any(|port| devices.takes(&port.name)) {
        return None;
    }
    let all: Vec<&str> = ports.iter().map(|port| port.name.as_str()).collect();
    let remedy = format!("name one of {} in transfer.ucx_net_devices (rdma.devices of the chart)", all.join(" "));
    Some(Finding::new("rdma", Verdict::Failure, format!("no port among {list}"), remedy))
}

#[cfg(test)]
mod tests;
