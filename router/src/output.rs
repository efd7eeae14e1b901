//! What a request yields, whatever the front: deltas, then one end.

use crate::prices::Cost;
use baton_types::{ErrorKind, FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};
use futures::{Stream, StreamExt as _};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
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
    /// With the first delta: tokens of the prompt whose KV was cached.
    pub(crate) cached_tokens: Option<u32>,
}

/// The cached share of a prompt in percent, rounded down: 0 to 100.
pub(crate) fn cache_hit_percent(cached_tokens: u32, prompt_tokens: usize) -> u64 {
    (100 * u64::from(cached_tokens) / (prompt_tokens as u64).max(1)).min(100)
}

/// How a request ended well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    /// Why.
    pub(crate) reason: FinishReason,
    /// Tokens counted.
    pub(crate) usage: Usage,
    /// What it costs, where its model has a price.
    pub(crate) cost: Option<Cost>,
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

impl Event {
    /// Tokens of the prompt whose KV was cached, as the first delta tells.
    pub(crate) fn cached_tokens(&self) -> Option<u32> {
        match self {
            Self::Delta(delta) => delta.cached_tokens,
            Self::Finished(_) => None,
        }
    }
}

/// What a front receives.
pub(crate) type EventResult = Result<Event, RequestError>;

/// The events of one request: deltas, then one end, always. Bounded: not reading pauses the workers, dropping it cancels them.
#[derive(Debug)]
pub(crate) struct Events {
    /// `None` once the end was yielded.
    events: Option<mpsc::Receiver<EventResult>>,
    /// A request that has ended is not over before its client has read the answer: a drain waits for that.
    _unread: TaskTrackerToken,
}

impl Events {
    pub(crate) fn new(events: mpsc::Receiver<EventResult>, unread: TaskTrackerToken) -> Self {
        Self { events: Some(events), _unread: unread }
    }

    /// All of it at once.
    pub(crate) async fn whole(mut self) -> Result<(Delta, Finished), RequestError> {
        let mut whole = Delta::default();
        loop {
            match self.next().await.unwrap_or_else(|| Err(lost()))? {
                Event::Delta(delta) => {
                    whole.text += &delta.text;
                    whole.token_ids.extend(delta.token_ids);
                    whole.logprobs.extend(delta.logprobs);
                    whole.cached_tokens = whole.cached_tokens.or(delta.cached_tokens);
                }
                Event::Finished(finished) => return Ok((whole, finished)),
            }
        }
    }
}

impl Stream for Events {
    type Item = EventResult;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<EventResult>> {
        let Some(events) = &mut self.events else { return Poll::Ready(None) };
        let event = ready!(events.poll_recv(cx)).unwrap_or_else(|| Err(lost()));
        if !matches!(event, Ok(Event::Delta(_))) {
            self.events = None;
        }
        Poll::Ready(Some(event))
    }
}

/// The task of a request ended without an end: a panic.
fn lost() -> RequestError {
    RequestError::new(ErrorKind::Internal, "the request was lost inside the router")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio_util::task::TaskTracker;

    async fn read(sent: Vec<EventResult>) -> Vec<EventResult> {
        let (sender, receiver) = mpsc::channel(10);
        for event in sent {
            sender.send(event).await.unwrap();
        }
        drop(sender);
        Events::new(receiver, TaskTracker::new().token()).collect().await
    }

    #[tokio::test]
    async fn there_is_one_end_whatever_becomes_of_the_request() {
        let delta = || Ok(Event::Delta(Delta::default()));
        let finished = || {
            Ok(Event::Finished(Finished {
                reason: FinishReason::Length,
                usage: Usage::default(),
                cost: None,
                timings: PhaseTimings::default(),
                crossed_classes: Vec::new(),
            }))
        };
        let refused = || Err(RequestError::new(ErrorKind::Overloaded, "full"));
        for (sent, expected) in [
            (vec![delta(), finished()], vec![delta(), finished()]),
            (vec![delta(), refused()], vec![delta(), refused()]),
            (vec![delta()], vec![delta(), Err(lost())]),
            (vec![], vec![Err(lost())]),
        ] {
            assert_eq!(read(sent).await, expected);
        }
    }

    #[test]
    fn a_share_is_rounded_down() {
        let cases = [(0, 0, 0), (0, 5, 0), (1, 3, 33), (2, 3, 66), (199, 200, 99), (200, 200, 100), (7, 0, 100)];
        for (cached, prompt, percent) in cases {
            assert_eq!(cache_hit_percent(cached, prompt), percent, "{cached} of {prompt}");
        }
    }
}
