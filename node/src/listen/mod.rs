//! Listening: every connection that a Baton process accepts, for gRPC and HTTP.
//!
//! Useless connections are closed. A peer must authenticate (if required) and show its protocol within [`HELLO_MAX`]. A
//! connection ends after [`PEER_GONE_MAX`] if its peer is gone or reads nothing. The number of connections is limited.
//! After the first bytes the protocol handles silence: HTTP/2 sends probes, HTTP/1 waits a bounded time for a complete
//! request head.

mod connection;
mod handshakes;
mod http;
mod incoming;
mod socket;
#[cfg(test)]
mod tests;

pub use connection::{Connection, Peer};
pub use http::{serve_http, serve_probes};
pub use incoming::Callers;
pub(crate) use incoming::Incoming;

use socket2::{SockRef, TcpKeepalive};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::sleep;

/// Time from the start of a connection until its protocol is known.
pub const HELLO_MAX: Duration = Duration::from_secs(10);
/// A peer that neither acknowledges nor reads anything for this long is gone: a host without power, a broken link, or a
/// reader that stopped long enough to fill all buffers in between. Its requests are cancelled within ten seconds.
pub const PEER_GONE_MAX: Duration = Duration::from_secs(8);
/// An idle connection is probed after this time, and at this interval until [`PEER_GONE_MAX`].
const PROBED_EVERY: Duration = Duration::from_secs(2);
/// Calls that the peer reset before this side accepted them, on one HTTP/2 connection. A client that cancels a burst of
/// requests is not an attacker: hyper's own limit of 20 would end its connection and every other call on it. The heads
/// of these calls are stored, but not charged.
pub(crate) const RESET_STREAMS_MAX: usize = 512;
/// Calls that this side reset, over the life of one connection: for example an upload that continues after its refusal.
pub(crate) const LOCAL_RESETS_MAX: usize = 4_096;
/// If no connection can be accepted, mostly for lack of file descriptors, connections that close make room.
const WITHOUT_ROOM: Duration = Duration::from_millis(100);

/// Why a process cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}{}", hint(.source))]
pub struct BindError {
    pub address: SocketAddr,
    pub source: std::io::Error,
}

fn hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::AddrInUse => ": another process has this port; stop it or choose another port",
        std::io::ErrorKind::AddrNotAvailable => ": this host does not have that address",
        std::io::ErrorKind::PermissionDenied => ": ports below 1024 need privileges",
        _ => "",
    }
}

/// A socket that accepts a limited number of connections; further ones wait in the kernel's queue.
#[derive(Debug)]
pub struct Listener {
    socket: TcpListener,
    address: SocketAddr,
    room: Arc<Semaphore>,
    connections_max: usize,
    pub(crate) hello_max: Duration,
    peer_gone_max: Duration,
}

impl Listener {
    /// Listens for at most `connections_max` connections at once. If the port is taken, the error says what to do.
    pub async fn bind(address: SocketAddr, connections_max: u32) -> Result<Self, BindError> {
        let error = |source| BindError { address, source };
        let socket = TcpListener::bind(address).await.map_err(error)?;
        let address = socket.local_addr().map_err(error)?;
        let connections_max = usize::try_from(connections_max).unwrap_or(Semaphore::MAX_PERMITS);
        let room = Arc::new(Semaphore::new(connections_max));
        Ok(Self { socket, address, room, connections_max, hello_max: HELLO_MAX, peer_gone_max: PEER_GONE_MAX })
    }

    /// The listen address, with the actual port if 0 was requested.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections it accepts at once.
    pub(crate) const fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// The next connection. Errors of single connections do not end a listener.
    pub async fn accept(&self) -> Connection {
        loop {
            // Never closed.
            let Ok(room) = self.room.clone().acquire_owned().await else { return std::future::pending().await };
            match self.socket.accept().await {
                Ok((stream, _)) if prepare(&stream, self.peer_gone_max).is_ok() => {
                    return Connection::new(stream, room, self.hello_max);
                }
                Ok(_) => {} // Already closed.
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(address = %self.address, %error, "takes no connection");
                    sleep(WITHOUT_ROOM).await;
                }
            }
        }
    }
}

/// Tokens are small, and each must be sent at once. The kernel must report a peer that is gone.
fn prepare(stream: &TcpStream, peer_gone_max: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBED_EVERY).with_interval(PROBED_EVERY))?;
    // Bounds the probes of idle peers, of peers that read nothing, and sent data without acknowledgement.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(peer_gone_max))?;
    Ok(())
}

fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
