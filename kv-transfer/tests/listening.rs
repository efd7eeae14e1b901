//! A transfer service listens where it is bound, and nowhere else. A process of its own, so that every socket here is of this test.

mod common;

use baton_kv_transfer::*;
use common::{NodeConfig, small};
use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

/// Addresses at which this process listens for TCP connections.
fn listening() -> BTreeSet<IpAddr> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| std::fs::read_link(e.ok()?.path()).ok());
    let sockets: BTreeSet<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let mut found = BTreeSet::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            if state == "0A" && sockets.contains(&format!("socket:[{inode}]")) {
                found.insert(address(local.split(':').next().unwrap()));
            }
        }
    }
    found
}

/// The kernel prints each 32-bit word of an address as it lies in memory.
fn address(hex: &str) -> IpAddr {
    let word = |i: usize| u32::from_str_radix(&hex[i..i + 8], 16).unwrap().to_ne_bytes();
    let bytes: Vec<u8> = (0..hex.len()).step_by(8).flat_map(word).collect();
    match <[u8; 4]>::try_from(&bytes[..]) {
        Ok(v4) => Ipv4Addr::from(v4).into(),
        Err(_) => Ipv6Addr::from(<[u8; 16]>::try_from(&bytes[..]).unwrap()).into(),
    }
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
