//! Ports for servers that must be reachable at the same port after a restart.

use std::collections::BTreeSet;
use std::io;
use std::net::TcpListener;
use std::ops::Range;
use std::sync::{Mutex, PoisonError};

/// Below the range that Linux uses for outgoing connections, which could otherwise take a port while its server is
/// down.
const PORTS: Range<u16> = 12_000..32_000;
/// Ports tried before giving up.
const TRIES_MAX: usize = 1_000;

/// `N` distinct ports of `host` on which nothing listens, none of which this process was given before: its server may
/// not listen yet, or be down.
pub fn free_ports<const N: usize>(host: &str) -> io::Result<[u16; N]> {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    let mut given = GIVEN.lock().unwrap_or_else(PoisonError::into_inner);
    let free = |_| {
        let port = rand::random_range(PORTS);
        (!given.contains(&port) && TcpListener::bind((host, port)).is_ok() && given.insert(port)).then_some(port)
    };
    let ports: Vec<u16> = (0..TRIES_MAX).filter_map(free).take(N).collect();
    ports.try_into().map_err(|_| io::Error::new(io::ErrorKind::AddrInUse, format!("{host} has no free ports")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_port_is_given_twice() {
        let given: Vec<u16> = (0..500).flat_map(|_| free_ports::<4>("127.0.0.1").unwrap()).collect();
        assert_eq!(given.iter().collect::<BTreeSet<_>>().len(), 2_000);
    }
}
