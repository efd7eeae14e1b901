//! Server-sent events: chunks, then `[DONE]`; or an error, and the end without `[DONE]`.

use super::error;
use crate::openai::{AnswerHead, Shown};
use crate::output::{Event, EventResult, Events, Opened};
use axum::http::{HeaderValue, header};
use axum::response::sse::{Event as SseEvent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures::stream::{self, Stream, StreamExt as _};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

const DONE: &str = "[DONE]";

struct Chunks {
    head: AnswerHead,
    /// Samples whose choices are open.
    open: u32,
    /// Written before anything more is read.
    first: Opened,
    events: Events,
    /// Written before anything more is taken.
    pending: VecDeque<SseEvent>,
    /// What each sample has shown.
    shown: Vec<Shown>,
}

/// The streaming answer; dropping its body drops the request.
pub(super) fn response(head: AnswerHead, first: Opened, events: Events, keepalive: Duration) -> Response {
    let shown = vec![Shown::default(); head.samples as usize];
    let chunks = Chunks { head, open: 0, first, events, pending: VecDeque::new(), shown };
    let keepalive = KeepAlive::new().interval(keepalive).text("keepalive");
    let mut response = Sse::new(chunks.stream()).keep_alive(keepalive).into_response();
    // Some clients take UTF-8 only where it is said.
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    // Proxies that buffer would turn a stream into one late body.
    response.headers_mut().insert("x-accel-buffering", HeaderValue::from_static("no"));
    response.headers_mut().insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    response
}

impl Chunks {
    fn stream(self) -> impl Stream<Item = Result<SseEvent, Infallible>> {
        stream::unfold(self, |mut chunks| async move { chunks.next().await.map(|event| (event, chunks)) }).map(Ok)
    }

    async fn next(&mut self) -> Option<SseEvent> {
        // One at a time: each may carry the prompt.
        while self.open < self.head.samples {
            self.open += 1;
            if let Some(opening) = self.head.first_chunk(self.open - 1) {
                return Some(chunk(opening));
            }
        }
        loop {
            if let Some(event) = self.pending.pop_front() {
                return Some(event);
            }
            let event = match self.first.next() {
                Some(event) => Ok(event),
                None => self.events.next().await?,
            };
            self.take(event);
        }
    }

    fn take(&mut self, event: EventResult) {
        match event {
            Ok(Event::Delta(delta)) => {
                if let Some(shown) = self.shown.get_mut(delta.sample as usize) {
                    self.pending.extend(self.head.delta_chunk(&delta, shown).map(chunk));
                }
            }
            Ok(Event::Finished(finished)) => {
                let shown = self.shown.get(finished.sample as usize).copied().unwrap_or_default();
                self.pending.extend(self.head.last_chunks(&finished, &shown).into_iter().map(chunk));
                if finished.total.is_some() {
                    self.pending.push_back(SseEvent::default().data(DONE));
                }
            }
            Err(e) => self.pending.push_back(chunk(error::body(&e).to_string())),
        }
    }
}

fn chunk(json: String) -> SseEvent {
    SseEvent::default().data(json)
}
