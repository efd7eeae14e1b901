//! Ports of servers that are to be found where they were, and are started there again.

use std::io;
use std::net::TcpListener;
use std::ops::Range;

/// Below those that Linux gives to outgoing connections: one of these could take a port while its server is away.
const PORTS: Range<u16> = 12_000..32_000;
/// Ports looked at before there are held to be none.
const TRIES_MAX: usize = 1_000;

/// As many ports of `host` on which nothing listens, no two the same.
pub fn free_ports<const N: usize>(host: &str) -> io::Result<[u16; N]> {
    let bound = |_| {
        let port = rand::random_range(PORTS);
        Some((port, TcpListener::bind((host, port)).ok()?))
    };
    // Held together until all are found.
    let held: Vec<(u16, TcpListener)> = (0..TRIES_MAX).filter_map(bound).take(N).collect();
    let ports: Vec<u16> = held.iter().map(|(port, _)| *port).collect();
    ports.try_into().map_err(|_| io::Error::new(io::ErrorKind::AddrInUse, format!("{host} has no free ports")))
}
