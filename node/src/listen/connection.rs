//! A connection: bytes as they come, a place among those that are there, and a bound on silence at its start.

use std::io::{Error, ErrorKind, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// What HTTP/2 begins with (RFC 9113, section 3.4). Servers keep no time until it is whole, or is something else.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection taken by a [`Listener`](super::Listener). Its reads fail where it has not said within the bound what it speaks.
#[derive(Debug)]
pub struct Connection {
    stream: TcpStream,
    hello: Option<Hello>,
    _room: OwnedSemaphorePermit,
}

/// What is known before the first protocol bytes are whole.
#[derive(Debug)]
struct Hello {
    /// Bytes of [`PREFACE`] that have come.
    come: usize,
    until: Pin<Box<Sleep>>,
}

impl Hello {
    /// Whether `bytes`, which come next, leave it open what is spoken.
    fn is_open_after(&mut self, bytes: &[u8]) -> bool {
        let rest = &PREFACE[self.come..];
        self.come += bytes.len();
        bytes.len() < rest.len() && rest.starts_with(bytes)
    }
}

impl Connection {
    pub(super) fn new(stream: TcpStream, room: OwnedSemaphorePermit, hello_max: Duration) -> Self {
        let until = Box::pin(sleep_until(Instant::now() + hello_max));
        Self { stream, hello: Some(Hello { come: 0, until }), _room: room }
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let known = buf.filled().len();
        let read = Pin::new(&mut this.stream).poll_read(cx, buf);
        let Some(hello) = &mut this.hello else { return read };
        if read.is_pending() {
            ready!(hello.until.as_mut().poll(cx));
            return Poll::Ready(Err(Error::new(ErrorKind::TimedOut, "the connection does not say what it speaks")));
        }
        if !hello.is_open_after(&buf.filled()[known..]) {
            this.hello = None;
        }
        read
    }
}

impl AsyncWrite for Connection {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        Pin::new(&mut self.get_mut().stream).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Pin::new(&mut self.get_mut().stream).poll_shutdown(cx)
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
