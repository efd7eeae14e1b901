//! Memory of open calls: each takes memory while it is open, and more for longer headers. It is charged until the
//! answer has ended, on every front.

use crate::intake::{Hold, IntakeFull};
use http::request::Parts;
use http::{HeaderName, HeaderValue};
use http_body::{Body, Frame, SizeHint};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

/// Memory of an open call besides headers and body: its stream, tasks and buffers. Open health watches were measured at
/// 5 KiB.
const CALL_BYTES: u64 = 8 << 10;
/// Memory per byte of headers, as received and as stored.
const HEADER_COSTS: u64 = 2;
/// Memory of a header besides its bytes: entries of a map that has doubled, and their index.
const HEADER_BYTES: u64 = 256;

/// The budget that a call and its messages are charged to.
pub type Meter = Arc<dyn Fn(&Parts) -> Hold + Send + Sync>;

/// Charges a call that has sent only its headers.
///
/// # Errors
/// If the budget has no room.
pub fn enter(meter: &Meter, parts: &Parts) -> Result<Hold, IntakeFull> {
    let of = |(name, value): (&HeaderName, &HeaderValue)| (name.as_str().len() + value.len()) as u64;
    let headers: u64 = parts.headers.iter().map(|header| HEADER_COSTS * of(header) + HEADER_BYTES).sum();
    let mut call = meter(parts);
    call.set(CALL_BYTES + headers)?;
    Ok(call)
}

/// An answer that is charged until it has ended.
#[derive(Debug)]
pub struct Counted<B, H = Hold> {
    body: B,
    _hold: H,
}

impl<B, H> Counted<B, H> {
    /// `hold` is returned to the budget at the end of `body`.
    pub const fn new(body: B, hold: H) -> Self {
        Self { body, _hold: hold }
    }
}

impl<B: Body + Unpin, H: Unpin> Body for Counted<B, H> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        Pin::new(&mut self.get_mut().body).poll_frame(cx)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
