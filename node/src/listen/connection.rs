//! A connection: bytes as they come, a place among those that are there, a bound on silence at its start, and an eye on its end.

use socket2::SockRef;
use std::io::{Error, ErrorKind, IoSlice};
use std::net::Shutdown;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Instant, Sleep, sleep, sleep_until};
use tonic::transport::server::{Connected, TcpConnectInfo};

/// What HTTP/2 begins with (RFC 9113, section 3.4). Servers keep no time until it is whole, or is something else.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A connection taken by a [`Listener`](super::Listener). Its reads fail where it has not said within the bound what it speaks.
#[derive(Debug)]
pub struct Connection {
    stream: Arc<TcpStream>,
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
        Self { stream: Arc::new(stream), hello: Some(Hello { come: 0, until }), _room: room }
    }

    /// The other end, to be watched while a server owns this one.
    pub(super) fn peer(&self) -> Peer {
        Peer(self.stream.clone())
    }

    fn poll_take(&self, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        loop {
            ready!(self.stream.poll_read_ready(cx))?;
            match self.stream.try_read(buf.initialize_unfilled()) {
                Ok(n) => {
                    buf.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                Err(error) => return Poll::Ready(Err(error)),
            }
        }
    }

    fn poll_give(
        &self,
        cx: &mut Context<'_>,
        give: impl Fn(&TcpStream) -> std::io::Result<usize>,
    ) -> Poll<std::io::Result<usize>> {
        loop {
            ready!(self.stream.poll_write_ready(cx))?;
            match give(&self.stream) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => {}
                done => return Poll::Ready(done),
            }
        }
    }
}

/// The other end of a [`Connection`].
#[derive(Debug)]
pub(super) struct Peer(Arc<TcpStream>);

impl Peer {
    /// Returns once the peer has closed its side, with what it said before still unread or not, and `grace` has passed. An error is an end.
    /// Looks again `every` so often where bytes lie unread.
    pub(super) async fn left(&self, every: Duration, grace: Duration) {
        while self.0.ready(Interest::READABLE).await.is_ok_and(|ready| !ready.is_read_closed()) {
            sleep(every).await;
        }
        sleep(grace).await;
    }
}

impl AsyncRead for Connection {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<std::io::Result<()>> {
        let this = self.get_mut();
        let known = buf.filled().len();
        let read = this.poll_take(cx, buf);
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
        self.poll_give(cx, |stream| stream.try_write(buf))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<std::io::Result<usize>> {
        self.poll_give(cx, |stream| stream.try_write_vectored(bufs))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<std::io::Result<()>> {
        Poll::Ready(SockRef::from(&*self.stream).shutdown(Shutdown::Write))
    }
}

impl Connected for Connection {
    type ConnectInfo = TcpConnectInfo;

    fn connect_info(&self) -> TcpConnectInfo {
        self.stream.connect_info()
    }
}
