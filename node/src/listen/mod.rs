//! Listening: every connection that a Baton process takes comes through here, gRPC's and HTTP's.
//!
//! None is held for nothing. One that does not prove who it is, where that is asked, and say what it speaks, ends after [`HELLO_MAX`]; one whose peer is gone, or takes nothing of
//! what is written, ends after [`PEER_GONE_MAX`]; and there are at most so many at once. What a silent peer may do after its first bytes
//! is its protocol's matter: HTTP/2 probes it, HTTP/1 waits a bounded time for a whole request head.

mod connection;
mod http;
mod socket;
#[cfg(test)]
mod tests;

pub use connection::{Connection, Peer};
pub use http::{serve_http, serve_probes};

use socket2::{SockRef, TcpKeepalive};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::sleep;

/// From the start of a connection until it is known what it speaks.
pub const HELLO_MAX: Duration = Duration::from_secs(10);
/// A peer that neither acknowledges nor takes anything for so long is gone: a host without power, a link cut, a reader that stopped long
/// enough to fill all buffers in between. What was computed for it is let go within ten seconds.
pub const PEER_GONE_MAX: Duration = Duration::from_secs(8);
/// A connection on which nothing comes is probed from then on, so often, until [`PEER_GONE_MAX`].
const PROBED_EVERY: Duration = Duration::from_secs(2);
/// Calls reset by the peer before this side took them up, on one HTTP/2 connection. A client that cancels a burst of requests is no attacker:
/// hyper's own limit of 20 would end its connection and every other call on it. The heads of these are kept, and counted nowhere.
pub(crate) const RESET_STREAMS_MAX: usize = 512;
/// Calls that this side reset, over the whole life of one connection: an upload that goes on after its refusal is one.
pub(crate) const LOCAL_RESETS_MAX: usize = 4_096;
/// Where no connection can be taken, of file descriptors mostly, those that end make room.
const WITHOUT_ROOM: Duration = Duration::from_millis(100);

/// Why a process cannot listen.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}{}", hint(.source))]
pub struct BindError {
    /// The address asked for.
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

/// A socket that takes connections, at most so many at once; the others wait in the kernel's queue.
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
    /// Listens for at most `connections_max` connections at once. The error says what to do about a taken port.
    pub async fn bind(address: SocketAddr, connections_max: u32) -> Result<Self, BindError> {
        let error = |source| BindError { address, source };
        let socket = TcpListener::bind(address).await.map_err(error)?;
        let address = socket.local_addr().map_err(error)?;
        let connections_max = usize::try_from(connections_max).unwrap_or(Semaphore::MAX_PERMITS);
        let room = Arc::new(Semaphore::new(connections_max));
        Ok(Self { socket, address, room, connections_max, hello_max: HELLO_MAX, peer_gone_max: PEER_GONE_MAX })
    }

    /// Where it listens, the port that was taken for 0 included.
    pub const fn address(&self) -> SocketAddr {
        self.address
    }

    /// How many connections it takes at once.
    pub(crate) const fn connections_max(&self) -> usize {
        self.connections_max
    }

    /// The next connection. Errors of single connections are theirs; a listener goes on.
    pub async fn accept(&self) -> Connection {
        loop {
            // Never closed.
            let Ok(room) = self.room.clone().acquire_owned().await else { return std::future::pending().await };
            match self.socket.accept().await {
                Ok((stream, _)) if prepare(&stream, self.peer_gone_max).is_ok() => {
                    return Connection::new(stream, room, self.hello_max);
                }
                Ok(_) => {} // Ended already.
                Err(error) if is_of_one_connection(&error) => {}
                Err(error) => {
                    tracing::warn!(address = %self.address, %error, "takes no connection");
                    sleep(WITHOUT_ROOM).await;
                }
            }
        }
    }
}

/// Tokens are small: each must leave at once. And the kernel says when a peer is gone.
fn prepare(stream: &TcpStream, peer_gone_max: Duration) -> std::io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_keepalive(&TcpKeepalive::new().with_time(PROBED_EVERY).with_interval(PROBED_EVERY))?;
    // Bounds the probes of both kinds, of the silent and of those that take nothing, and what is sent and never acknowledged.
    #[cfg(target_os = "linux")]
    socket.set_tcp_user_timeout(Some(peer_gone_max))?;
    Ok(())
}

fn is_of_one_connection(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}
