//! Client channels.
//!
//! This replaces tonic's channel. h2 counts, over the life of a connection, the frames that a peer still sends for
//! calls that were cancelled here. At 1,024 of one kind, or at half the connection's window of small ones, h2 closes
//! the connection with every call on it. A router cancels calls all the time, and tonic's channel cannot turn this
//! protection off. So here the first limit is off, and the connection window is as large as possible (stream windows
//! bound the memory). New calls take a new connection before the other limits matter.

use super::deadline::{TIMEOUT_HEADER, parse_timeout};
use super::dial;
use super::{KEEPALIVE_MS, KEEPALIVE_WAIT_MS, STREAM_WINDOW_BYTES};
use crate::identity::{Identity, Protocol, Role};
use futures::future::BoxFuture;
use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri, header};
use hyper::body::Incoming;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo, TokioTimer};
use std::fmt;
use std::future::ready;
use std::io;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::Mutex;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tonic::Status;
use tonic::body::Body;
use tower_service::Service;

const USER_AGENT: HeaderValue = HeaderValue::from_static(concat!("baton/", env!("CARGO_PKG_VERSION")));

/// The largest window that HTTP/2 allows.
const CONNECTION_WINDOW_BYTES: u32 = (1 << 31) - 1;
/// Most calls on one connection. Running calls keep it when the next connection opens.
const CALLS_MAX: u32 = 4096;

/// Settings of a channel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ChannelConfig {
    /// Longest time to connect, in milliseconds.
    pub connect_ms_max: u64,
    /// Interval of keepalive probes, also on idle connections, so that a lost peer is noticed.
    pub keepalive_ms: u64,
    /// A probe without an answer for this long ends the connection, and every call on it.
    pub keepalive_wait_ms_max: u64,
    /// Bytes that the peer may send on one stream before the reader must have consumed them.
    pub stream_window_bytes: u32,
}

impl Default for ChannelConfig {
    fn default() -> Self {
        Self {
            connect_ms_max: 2_000,
            keepalive_ms: KEEPALIVE_MS,
            keepalive_wait_ms_max: KEEPALIVE_WAIT_MS,
            stream_window_bytes: STREAM_WINDOW_BYTES,
        }
    }
}

/// An address that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{address:?} is not the address of a gRPC server; write host:port or http://host:port")]
pub struct ChannelError {
    pub address: String,
}

/// A channel to `address` (`host:port`, or the same as a URL). With an `identity`, both sides authenticate with
/// certificates, whatever the URL's scheme, and the peer must have the role `demanded`. Without one, the connection is
/// not encrypted.
pub fn channel(
    address: &str,
    config: &ChannelConfig,
    identity: &Identity,
    demanded: Role,
) -> Result<Channel, ChannelError> {
    let bare = ["http://", "https://"].into_iter().find_map(|scheme| address.strip_prefix(scheme)).unwrap_or(address);
    let authority = bare.trim_end_matches('/').parse::<Authority>().ok().filter(|a| a.port_u16().is_some());
    let authority = authority.ok_or_else(|| ChannelError { address: address.into() })?;
    let (to, identity) = (authority.clone(), identity.clone());
    let dial = move || -> BoxFuture<'static, io::Result<Box<dyn Stream>>> {
        let (to, tls) = (to.clone(), identity.client(Protocol::Grpc));
        Box::pin(async move {
            let stream = dial::connect(&to).await?;
            stream.set_nodelay(true)?;
            Ok(match tls {
                None => Box::new(stream) as Box<dyn Stream>,
                Some(tls) => Box::new(TlsConnector::from(tls).connect(demanded.server_name(), stream).await?),
            })
        })
    };
    Ok(channel_over(Arc::new(dial), authority, config))
}

/// A connection of any kind.
pub trait Stream: AsyncRead + AsyncWrite + Send + Unpin {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin> Stream for T {}

/// Opens connections to one peer.
pub type Dial = Arc<dyn Fn() -> BoxFuture<'static, io::Result<Box<dyn Stream>>> + Send + Sync>;

/// A channel to the peer that `dial` connects to; requests name it `authority`.
pub fn channel_over(dial: Dial, authority: Authority, config: &ChannelConfig) -> Channel {
    let mut http2 = Builder::new(TokioExecutor::new());
    http2
        .timer(TokioTimer::new())
        .keep_alive_interval(Duration::from_millis(config.keepalive_ms))
        .keep_alive_timeout(Duration::from_millis(config.keepalive_wait_ms_max))
        .keep_alive_while_idle(true)
        .initial_stream_window_size(config.stream_window_bytes)
        .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        .max_local_error_reset_streams(None);
    let connect_max = Duration::from_millis(config.connect_ms_max);
    Channel(Arc::new(Peer { authority, dial, http2, connect_max, connection: Mutex::default() }))
}

/// One connection to a gRPC server, opened at first use and again after it breaks. Clones share it. Calls must be made
/// within a tokio runtime; a call with a deadline gets no answer after it.
#[derive(Clone)]
pub struct Channel(Arc<Peer>);

impl Channel {
    /// A channel to the same peer with a separate connection: for streams that stay open as long as the peer, which
    /// would otherwise keep old connections of other calls open.
    pub fn apart(&self) -> Self {
        let Peer { authority, dial, http2, connect_max, connection: _ } = &*self.0;
        let (authority, dial, http2) = (authority.clone(), dial.clone(), http2.clone());
        Self(Arc::new(Peer { authority, dial, http2, connect_max: *connect_max, connection: Mutex::default() }))
    }
}

struct Peer {
    authority: Authority,
    dial: Dial,
    http2: Builder<TokioExecutor>,
    connect_max: Duration,
    connection: Mutex<Option<(SendRequest<Body>, u32)>>,
}

impl Peer {
    /// A connection that is presumably open. The first caller opens it, within the connect timeout.
    async fn connection(&self) -> Result<SendRequest<Body>, Status> {
        let connect = async {
            let mut slot = self.connection.lock().await;
            if let Some((open, calls)) = slot.as_mut().filter(|(open, calls)| !open.is_closed() && *calls < CALLS_MAX) {
                *calls += 1;
                return Ok(open.clone());
            }
            let stream = (self.dial)().await.map_err(|e| self.unreachable(e))?;
            let (sender, driver) = self.http2.handshake(TokioIo::new(stream)).await.map_err(|e| self.unreachable(e))?;
            // Ends with the connection, or with its last call once a newer connection has replaced it. Calls receive
            // its errors.
            tokio::spawn(driver);
            Ok(slot.insert((sender, 1)).0.clone())
        };
        let late = |_| self.unreachable(io::Error::from(io::ErrorKind::TimedOut));
        timeout(self.connect_max, connect).await.map_err(late).flatten()
    }

    fn unreachable(&self, source: impl std::error::Error + Send + Sync + 'static) -> Status {
        let mut status = Status::unavailable(format!("cannot connect to {}: {source}", self.authority));
        status.set_source(Arc::new(source));
        status
    }

    async fn call(&self, request: Request<Body>) -> Result<Response<Incoming>, Status> {
        let mut connection = self.connection().await?;
        connection.send_request(request).await.map_err(|e| Status::from_error(Box::new(e)))
    }

    /// The request with the absolute address of this peer.
    fn addressed(&self, mut request: Request<Body>) -> Request<Body> {
        let mut parts = std::mem::take(request.uri_mut()).into_parts();
        parts.scheme = Some(Scheme::HTTP);
        parts.authority = Some(self.authority.clone());
        parts.path_and_query.get_or_insert(PathAndQuery::from_static("/"));
        *request.uri_mut() = Uri::from_parts(parts).expect("all three parts are there");
        request.headers_mut().insert(header::USER_AGENT, USER_AGENT);
        request
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Incoming>;
    type Error = Status;
    type Future = BoxFuture<'static, Result<Self::Response, Status>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Status>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let within = match request.headers().get(TIMEOUT_HEADER).map(|v| v.to_str().ok().and_then(parse_timeout)) {
            None => None,
            Some(Some(within)) => Some(within),
            Some(None) => return Box::pin(ready(Err(Status::invalid_argument("grpc-timeout cannot be read")))),
        };
        let (peer, request) = (self.0.clone(), self.0.addressed(request));
        Box::pin(async move {
            match within {
                None => peer.call(request).await,
                Some(within) => {
                    let late = |_| Status::deadline_exceeded("the deadline passed before the call was answered");
                    timeout(within, peer.call(request)).await.map_err(late).flatten()
                }
            }
        })
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({})", self.0.authority)
    }
}
