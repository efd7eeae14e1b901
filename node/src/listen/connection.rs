//! A connection: its bytes, its place among the open ones, a time limit on its first bytes, and the roles that its peer
//! has proven.

use super::incoming::Terms;
use super::socket::Socket;
use crate::identity::Roles;
use std::io::{Error, ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until, timeout_at};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;
use tonic::transport::server::{Connected, TcpConnectInfo};

/// The start of HTTP/2 (RFC 9113, section 3.4). Servers have no time limit until the preface is complete, or is
/// something else.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The peer of a connection; servers find it in the extensions of each request.
#[derive(Clone, Debug)]
pub struct Peer {
    pub addresses: TcpConnectInfo,
    /// The roles that it has proven; `None` where no proof is asked for.
    pub roles: Option<Roles>,
}

/// A connection accepted by a [`Listener`](super::Listener). Its reads fail if the protocol is not known within the
/// time limit.
#[derive(Debug)]
pub struct Connection {
    socket: Socket,
    bytes: Bytes,
    hello: Option<Hello>,
    room: OwnedSemaphorePermit,
}

#[derive(Debug)]
enum Bytes {
    Clear(Socket),
    /// With the roles that the peer has proven; `None` where no proof is asked for.
    Tls(Box<TlsStream<Socket>>, Option<Roles>),
}

/// State until the first protocol bytes are complete.
#[derive(Debug)]
struct Hello {
    /// Bytes of [`PREFACE`] received.
    come: usize,
    until: Pin<Box<Sleep>>,
}

impl Hello {
    /// Whether the protocol is still unknown after `bytes`.
    fn is_open_after(&mut self, bytes: &[u8]) -> bool {
        let rest = &PREFACE[self.come..];
        self.come += bytes.len();
        bytes.len() < rest.len() && rest.starts_with(bytes)
    }
}

fn silent() -> Error {
    Error::new(ErrorKind::TimedOut, "the connection does not say what it speaks")
}

impl Connection {
    pub(super) fn new(stream: TcpStream, room: OwnedSemaphorePermit, hello_max: Duration) -> Self {
        let until = Box::pin(sleep_until(Instant::now() + hello_max));
        let socket = Socket::new(stream);
        Self { bytes: Bytes::Clear(socket.clone()), socket, hello: Some(Hello { come: 0, until }), room }
    }

    /// The connection with TLS, once the peer has presented what `terms` demand. One time limit covers
    /// both the handshake and the first bytes after it.
    pub(crate) async fn secured(self, terms: Terms) -> std::io::Result<Self> {
        let Self { socket, hello, room, bytes: _ } = self;
        let until = hello.as_ref().map_or_else(Instant::now, |hello| hello.until.deadline());
        let accept = TlsAcceptor::from(terms.tls).accept(socket.clone());
        let stream = timeout_at(until, accept).await.map_err(|_| silent())??;
        let presented = stream.get_ref().1.peer_certificates().unwrap_or_default();
        let roles = terms.proves_roles.then(|| Roles::of(presented));
        Ok(Self { socket, bytes: Bytes::Tls(Box::new(stream), roles), hello, room })
    }

    /// The socket, to watch while a server owns the connection.
    pub(super) fn socket(&self) -> Socket {
        self.socket.clone()
    }

    fn roles(&self) -> Option<Roles> {
        match &self.bytes {
            Bytes::Clear(_) => None,
            Bytes::Tls(_, roles) => roles.clone(),
        }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let known = buf.filled().len();
        let read = match &mut this.bytes {
            Bytes::Clear(socket) => Pin::new(socket).poll_read(cx, buf),
            Bytes::Tls(stream, _) => Pin::new(stream).poll_read(cx, buf),
        };
        let Some(hello) = &mut this.hello else { return read };
        if read.is_pending() {
            ready!(hello.until.as_mut().poll(cx));
            return Poll::Ready(Err(silent()));
        }
        if !hello.is_open_after(&buf.filled()[known..]) {
            this.hello = None;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        match &mut self.get_mut().bytes {
            Bytes::Clear(socket) => Pin::new(socket).poll_write(cx, buf),
            Bytes::Tls(stream, _) => Pin::new(stream).poll_write(cx, buf),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        match &mut self.get_mut().bytes {
            Bytes::Clear(socket) => Pin::new(socket).poll_write_vectored(cx, bufs),
            Bytes::Tls(stream, _) => Pin::new(stream).poll_write_vectored(cx, bufs),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match &self.bytes {
            Bytes::Clear(socket) => socket.is_write_vectored(),
            Bytes::Tls(stream, _) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.get_mut().bytes {
            Bytes::Clear(socket) => Pin::new(socket).poll_flush(cx),
            Bytes::Tls(stream, _) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        match &mut self.get_mut().bytes {
            Bytes::Clear(socket) => Pin::new(socket).poll_shutdown(cx),
            Bytes::Tls(stream, _) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}

impl Connected for Connection {
    type ConnectInfo = Peer;

    fn connect_info(&self) -> Peer {
        Peer { addresses: self.socket.addresses(), roles: self.roles() }
    }
}
