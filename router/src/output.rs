//! What a request yields, whatever the front: deltas, then one end.

use baton_types::{FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};
use futures::Stream;
use std::pin::Pin;
use std::task::{Context, Poll};
use tokio::sync::mpsc;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Some tokens and the text that they complete. Text lags tokens while a character or a stop string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Text to show.
    pub(crate) text: String,
    /// Tokens generated.
    pub(crate) token_ids: Vec<TokenId>,
    /// One for each token, where asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

/// How a request ended well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    /// Why.
    pub(crate) reason: FinishReason,
    /// Tokens counted.
    pub(crate) usage: Usage,
    /// Where the time went.
    pub(crate) timings: PhaseTimings,
    /// Numerics classes that generated the answer, in order, where it is more than one.
    pub(crate) crossed_classes: Vec<String>,
}

/// One event; [`Event::Finished`] or an error is the last.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// More of the answer.
    Delta(Delta),
    /// The end.
    Finished(Finished),
}

/// What a front receives.
pub(crate) type EventResult = Result<Event, RequestError>;

/// The events of one request: deltas, then one end. Bounded: not reading pauses the workers, dropping it cancels them.
#[derive(Debug)]
pub(crate) struct Events {
    events: mpsc::Receiver<EventResult>,
    /// A request that has ended is not over before its client has read the answer: a drain waits for that.
    _unread: TaskTrackerToken,
}

impl Events {
    pub(crate) fn new(events: mpsc::Receiver<EventResult>, unread: TaskTrackerToken) -> Self {
        Self { events, _unread: unread }
    }

    /// The next event; `None` once there is none.
    pub(crate) async fn recv(&mut self) -> Option<EventResult> {
        self.events.recv().await
    }
}

impl Stream for Events {
    type Item = EventResult;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<EventResult>> {
        self.events.poll_recv(cx)
    }
}
