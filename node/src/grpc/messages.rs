//! Limits on calls and partial messages: each message has a time limit, and the bytes of both are charged before a
//! service stores them.
//!
//! gRPC prefixes each message with its length (1 byte of flags, 4 of length), and a service waits for a complete one. A
//! peer that stops in the middle would occupy memory while its connection answers probes. So a layer around all
//! services watches each stream of messages. A message that has begun must be complete in time. Until the answer
//! begins, a message or the end of the stream must arrive in time. Streams that may be silent between messages (`Join`,
//! reflection) may be so only after the answer has begun.
//!
//! The call itself is charged, too ([`calls`]). Reflection and the streams of the KServe protocol answer message by
//! message, and their clients may send more without reading the answers. Then the stream window fills with bytes that no
//! service has read, so the window is charged from the start.

use super::STREAM_WINDOW_BYTES;
use crate::calls::{self, Counted, Meter};
use crate::intake::{Hold, IntakeFull};
use baton_proto::convert::status;
use bytes::Bytes;
use futures::FutureExt as _;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body::{Body as HttpBody, Frame};
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};
use tonic::Status;
use tonic::body::Body;
use tower_layer::Layer;
use tower_service::Service;

/// Flags and length, before each message.
pub const PREFIX_BYTES: usize = 5;

/// Length of the message after a prefix.
pub fn message_bytes(prefix: &[u8; PREFIX_BYTES]) -> usize {
    let [_, length @ ..] = *prefix;
    u32::from_be_bytes(length) as usize
}

/// What reads while it answers: beginnings of paths.
const READS_ON: [&str; 2] = ["/grpc.reflection.", "/inference.GRPCInferenceService/ModelStreamInfer"];

/// The hold on the budget for a message's bytes. Services find it in the extensions of a call, and keep it as long as
/// they keep the message.
#[derive(Clone, Debug)]
pub struct MessageHold(Arc<Mutex<Hold>>);

impl MessageHold {
    /// Calls `change` with the hold locked.
    pub fn with<T>(&self, change: impl FnOnce(&mut Hold) -> T) -> T {
        change(&mut self.0.lock())
    }
}

#[derive(Clone)]
pub struct Messages {
    pub(super) message_max: Duration,
    pub(super) meter: Option<Meter>,
}

impl<S> Layer<S> for Messages {
    type Service = Watched<S>;

    fn layer(&self, service: S) -> Watched<S> {
        Watched { service, messages: self.clone() }
    }
}

/// A service whose calls are checked.
#[derive(Clone)]
pub struct Watched<S> {
    service: S,
    messages: Messages,
}

impl<S> Service<Request<Body>> for Watched<S>
where
    S: Service<Request<Body>, Response = Response<Body>>,
    S::Error: Send + 'static,
    S::Future: Send + 'static,
{
    type Response = Response<Body>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Response<Body>, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.service.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let (mut parts, body) = request.into_parts();
        let reads_on = READS_ON.iter().any(|path| parts.uri.path().starts_with(path));
        let unread = if reads_on { u64::from(STREAM_WINDOW_BYTES) } else { 0 };
        let enter = |meter| {
            let mut call = calls::enter(meter, &parts)?;
            call.grow(unread)?;
            Ok::<_, IntakeFull>(call)
        };
        let call = match self.messages.meter.as_ref().map(enter).transpose() {
            Ok(call) => call,
            Err(full) => return std::future::ready(Ok(status::from_error(&full.into()).into_http())).boxed(),
        };
        let held = self.messages.meter.as_ref().map(|meter| MessageHold(Arc::new(Mutex::new(meter(&parts)))));
        if let Some(held) = held.clone() {
            parts.extensions.insert(held);
        }
        let answered = Arc::new(AtomicBool::new(false));
        let max = self.messages.message_max;
        let until = Box::pin(sleep_until(Instant::now() + max));
        let watched = Stream { body, framing: Framing::default(), max, until, answered: answered.clone(), held };
        let answer = self.service.call(Request::from_parts(parts, Body::new(watched)));
        async move {
            let answer = answer.await;
            answered.store(true, Ordering::Relaxed);
            match call {
                Some(call) => answer.map(|answer| answer.map(|body| Body::new(Counted::new(body, call)))),
                None => answer,
            }
        }
        .boxed()
    }
}

/// Position within a stream of messages.
#[derive(Clone, Copy, Debug, Default)]
struct Framing {
    prefix: [u8; PREFIX_BYTES],
    /// Bytes of the prefix received.
    come: usize,
    /// Bytes of the message still missing.
    left: usize,
    /// Length of the current or last message.
    bytes: u64,
}

impl Framing {
    fn is_half(&self) -> bool {
        self.come > 0
    }

    /// Takes the next bytes; `true` if a message began or ended in them.
    fn take(&mut self, mut data: &[u8]) -> bool {
        let mut news = false;
        self.bytes = if self.is_half() { self.bytes } else { 0 } + data.len() as u64;
        while !data.is_empty() {
            if self.come < PREFIX_BYTES {
                news |= self.come == 0;
                let n = data.len().min(PREFIX_BYTES - self.come);
                self.prefix[self.come..self.come + n].copy_from_slice(&data[..n]);
                (self.come, data) = (self.come + n, &data[n..]);
                self.left = message_bytes(&self.prefix);
            }
            let n = data.len().min(self.left);
            (self.left, data) = (self.left - n, &data[n..]);
            if self.come == PREFIX_BYTES && self.left == 0 {
                (self.come, news) = (0, true);
            }
        }
        news
    }
}

/// The messages of one call.
struct Stream {
    body: Body,
    framing: Framing,
    max: Duration,
    until: Pin<Box<Sleep>>,
    /// Whether the answer has begun.
    answered: Arc<AtomicBool>,
    held: Option<MessageHold>,
}

impl Stream {
    /// Whether the peer must send something within the time limit.
    fn is_owed(&self) -> bool {
        self.framing.is_half() || !self.answered.load(Ordering::Relaxed)
    }

    fn take(&mut self, data: &[u8]) -> Result<(), Status> {
        if self.framing.take(data) {
            self.until.as_mut().reset(Instant::now() + self.max);
        }
        let Some(held) = &self.held else { return Ok(()) };
        let taken = held.with(|hold| hold.set(self.framing.bytes.max(hold.bytes())));
        taken.map_err(|full: IntakeFull| status::from_error(&full.into()))
    }

    /// A service that already answers and reads on has taken the earlier messages.
    fn forget_taken(&self) {
        if let Some(held) = self.held.as_ref().filter(|_| !self.is_owed()) {
            // A smaller hold always fits.
            let _ = held.with(|hold| hold.set(0));
        }
    }

    fn late(&self) -> Status {
        Status::deadline_exceeded(format!("no whole message came within {:?}; send it faster", self.max))
    }
}

impl HttpBody for Stream {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        this.forget_taken();
        let Poll::Ready(frame) = Pin::new(&mut this.body).poll_frame(cx) else {
            if !this.is_owed() {
                return Poll::Pending;
            }
            ready!(this.until.as_mut().poll(cx));
            return Poll::Ready(Some(Err(this.late())));
        };
        if let Some(Ok(frame)) = &frame
            && let Some(data) = frame.data_ref()
        {
            if let Err(status) = this.take(data) {
                return Poll::Ready(Some(Err(status)));
            }
            // A message that arrives byte by byte can also be late.
            if this.framing.is_half() && Instant::now() >= this.until.deadline() {
                return Poll::Ready(Some(Err(this.late())));
            }
        }
        Poll::Ready(frame)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(bytes: usize) -> Vec<u8> {
        [&[0][..], &u32::try_from(bytes).unwrap().to_be_bytes(), &vec![7; bytes]].concat()
    }

    #[test]
    fn messages_are_half_until_their_last_byte() {
        let stream = [message(3), message(0), message(300)].concat();
        for step in [1, 2, 4, 5, 7, 100, stream.len()] {
            let (mut framing, mut halves, mut taken) = (Framing::default(), 0, 0);
            for piece in stream.chunks(step) {
                framing.take(piece);
                taken += piece.len();
                let whole = [0, 8, 13, stream.len()].contains(&taken);
                assert_eq!(framing.is_half(), !whole, "{step} at {taken}");
                halves += usize::from(!whole);
            }
            assert!(step >= stream.len() || halves > 0);
            assert!(!framing.is_half());
        }
    }

    #[test]
    fn a_beginning_and_an_end_are_news() {
        let mut framing = Framing::default();
        let long = message(10);
        let news: Vec<bool> = [&long[..2], &long[2..6], &long[6..10], &long[10..]].map(|p| framing.take(p)).into();
        assert_eq!(news, [true, false, false, true]);
        assert_eq!(framing.bytes, 15);
        framing.take(&message(1));
        assert_eq!(framing.bytes, 6, "a whole message before it counts no more");
    }
}
