//! Sockets of this process and of its system.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream};
use std::time::Duration;

/// Where this process listens for TCP connections.
pub fn listening() -> BTreeSet<SocketAddr> {
    let links = std::fs::read_dir("/proc/self/fd").unwrap().filter_map(|e| std::fs::read_link(e.ok()?.path()).ok());
    let sockets: BTreeSet<String> = links.map(|link| link.to_string_lossy().into_owned()).collect();
    let mut found = BTreeSet::new();
    for table in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        for line in std::fs::read_to_string(table).unwrap_or_default().lines().skip(1) {
            let fields: Vec<&str> = line.split_whitespace().collect();
            let (local, state, inode) = (fields[1], fields[3], fields[9]);
            if state == "0A" && sockets.contains(&format!("socket:[{inode}]")) {
                let (host, port) = local.split_once(':').unwrap();
                found.insert(SocketAddr::new(address(host), u16::from_str_radix(port, 16).unwrap()));
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

/// A port that answers no connection, neither yes nor no, as that of a host whose link is cut: its queue is full, and nobody accepts.
pub struct Mute {
    listener: TcpListener,
    _queue: Vec<TcpStream>,
}

impl Mute {
    pub fn start() -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let (at, mut queue) = (listener.local_addr().unwrap(), Vec::new());
        loop {
            match TcpStream::connect_timeout(&at, Duration::from_millis(300)) {
                Ok(stream) => queue.push(stream),
                Err(error) if error.kind() == ErrorKind::TimedOut => return Self { listener, _queue: queue },
                Err(error) => panic!("its queue is not full after {} connections: {error}", queue.len()),
            }
        }
    }

    pub fn port(&self) -> u16 {
        self.listener.local_addr().unwrap().port()
    }
}
