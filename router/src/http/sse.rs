//! Answers as server-sent events. Nothing follows an error.

use crate::output::{Event, EventResult, Events, Opened};
use crate::wire::StreamForm;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use baton_types::RequestError;
use futures::stream::{Stream, StreamExt as _};
use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;
use tokio::time::{Instant, Sleep, sleep_until};

/// Events that are ready are sent together, up to about this many bytes.
const PART_BYTES_MAX: usize = 16 << 10;

/// The body of a streaming answer; dropping it drops the request.
struct Parts<F> {
    form: F,
    /// Samples that are open.
    open: u32,
    /// Sent before any further event.
    first: Opened,
    /// `None` once all events were read.
    events: Option<Events>,
    /// When something was last written.
    last: Instant,
    /// Timer that checks how long ago that was.
    silence: Pin<Box<Sleep>>,
    keepalive: Duration,
}

/// The response that streams an answer as server-sent events.
pub(super) fn response(form: impl StreamForm, first: Opened, events: Events, keepalive: Duration) -> Response {
    let last = Instant::now();
    let silence = Box::pin(sleep_until(last + keepalive));
    let parts = Parts { form, open: 0, first, events: Some(events), last, silence, keepalive };
    let mut response = Response::new(Body::from_stream(parts));
    // Some clients read UTF-8 only if the charset is stated.
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    // Proxies that buffer would turn the stream into one late body.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl<F: StreamForm> Parts<F> {
    /// The next event, or the end.
    fn poll_event(&mut self, cx: &mut Context<'_>) -> Poll<Option<EventResult>> {
        let Some(events) = &mut self.events else { return Poll::Ready(None) };
        match self.first.next() {
            Some(event) => Poll::Ready(Some(Ok(event))),
            None => events.poll_next_unpin(cx),
        }
    }

    /// Writes an event. Nothing follows an error.
    fn write(&mut self, next: EventResult, to: &mut Vec<u8>) {
        let written = next.and_then(|next| match next {
            Event::Delta(delta) => self.form.delta(&delta, to),
            Event::Finished(finished) => self.form.finished(&finished, to),
        });
        self.end_with_error(written, to);
    }

    fn end_with_error(&mut self, written: Result<(), RequestError>, to: &mut Vec<u8>) {
        if let Err(error) = written {
            self.events = None;
            self.form.error(&error, to);
        }
    }

    /// Writes all events that are ready. `true` if nothing can follow.
    fn fill(&mut self, to: &mut Vec<u8>, cx: &mut Context<'_>) -> bool {
        // One at a time: each may contain the prompt.
        while self.open < self.form.samples() && self.events.is_some() {
            self.open += 1;
            let opened = self.form.opening(self.open - 1, to);
            self.end_with_error(opened, to);
            if !to.is_empty() {
                return false;
            }
        }
        while to.len() < PART_BYTES_MAX {
            match self.poll_event(cx) {
                Poll::Ready(Some(next)) => self.write(next, to),
                Poll::Ready(None) => return true,
                Poll::Pending => break,
            }
        }
        false
    }
}

impl<F: StreamForm> Stream for Parts<F> {
    type Item = Result<Bytes, Infallible>;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let mut part = Vec::new();
        let is_over = self.fill(&mut part, cx);
        if !part.is_empty() {
            self.last = Instant::now();
            return Poll::Ready(Some(Ok(part.into())));
        }
        if is_over {
            return Poll::Ready(None);
        }
        while self.silence.as_mut().poll(cx).is_ready() {
            let (now, due) = (Instant::now(), self.last + self.keepalive);
            if now >= due {
                self.last = now;
                return Poll::Ready(Some(Ok(Bytes::from_static(F::KEEPALIVE))));
            }
            self.silence.as_mut().reset(due);
        }
        Poll::Pending
    }
}
