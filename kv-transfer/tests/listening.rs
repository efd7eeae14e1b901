//! A transfer service listens where it is bound, and nowhere else. A process of its own, so that every socket here is of this test.

mod common;

use baton_kv_transfer::*;
use common::{NodeConfig, small, sockets};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

/// Addresses at which this process does.
fn listening() -> BTreeSet<IpAddr> {
    sockets::listening().iter().map(SocketAddr::ip).collect()
}

#[test]
fn a_service_on_loopback_listens_on_loopback_only() {
    let choices = [
        TransportChoice::Tcp { bind: Ipv4Addr::LOCALHOST.into(), port: 0 },
        TransportChoice::ucx(Ipv4Addr::LOCALHOST.into()),
    ];
    for choice in choices {
        let node = NodeConfig::new("here", small(16), 24).start(choice.clone());
        let found = listening();
        assert!(!found.is_empty(), "{choice:?} listens somewhere");
        assert!(found.iter().all(IpAddr::is_loopback), "{choice:?} listens at {found:?}");
        node.stop();
    }
    // What the bind is against: with every device, UCX is there for whoever reaches one of them.
    let routes = std::fs::read_to_string("/proc/self/net/route").unwrap_or_default();
    if routes.lines().skip(1).any(|route| !route.starts_with("lo")) {
        let everywhere = TransportChoice::ucx(Ipv4Addr::UNSPECIFIED.into());
        let node = NodeConfig::new("here", small(16), 24).start(everywhere);
        let found = listening();
        assert!(found.iter().any(|at| !at.is_loopback()), "listens at {found:?}");
        node.stop();
    }
}

/// As where its network device is down: UCX leaves that out and has a lane to itself alone.
#[test]
#[should_panic(expected = "no lane to any other process")]
fn a_service_that_reaches_nobody_does_not_start() {
    let (tls, bind) = (Some("self".into()), Ipv4Addr::LOCALHOST.into());
    let alone = TransportChoice::Ucx { tls, bind, devices: None, writes: UcxWrites::ByLanes };
    NodeConfig::new("alone", small(16), 24).start(alone);
}
