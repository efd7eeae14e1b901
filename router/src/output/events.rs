//! The stream of one request's events.

use super::{Event, EventResult};
use baton_types::{ErrorKind, RequestError};
use futures::Stream;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// The events of one request; the last is always a total or an error. Bounded: if the reader stops, the workers pause.
/// Dropping it cancels the request.
#[derive(Debug)]
pub struct Events {
    /// `None` once the end was returned.
    events: Option<mpsc::Receiver<EventResult>>,
    /// A drain waits until the client has read the answer of a request that ended.
    _unread: TaskTrackerToken,
}

impl Events {
    pub(crate) fn new(events: mpsc::Receiver<EventResult>, unread: TaskTrackerToken) -> Self {
        Self { events: Some(events), _unread: unread }
    }

    /// How many events may wait for the reader.
    pub(crate) fn max(&self) -> usize {
        self.events.as_ref().map_or(0, mpsc::Receiver::max_capacity)
    }
}

impl Stream for Events {
    type Item = EventResult;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<EventResult>> {
        let Some(events) = &mut self.events else { return Poll::Ready(None) };
        let event = ready!(events.poll_recv(cx)).unwrap_or_else(|| Err(lost()));
        let goes_on = match &event {
            Ok(Event::Delta(_)) => true,
            Ok(Event::Finished(finished)) => finished.total.is_none(),
            Err(_) => false,
        };
        if !goes_on {
            self.events = None;
        }
        Poll::Ready(Some(event))
    }
}

/// The request's task ended without sending an end: a panic.
pub(super) fn lost() -> RequestError {
    RequestError::new(ErrorKind::Internal, "the request was lost inside the router")
}
