//! What a request yields, whatever the front: deltas and an end of each sample, or an error.

use crate::prices::Cost;
use baton_types::{ErrorKind, FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};
use futures::{Stream, StreamExt as _};
use std::collections::BTreeMap;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::sync::mpsc;
use tokio_util::task::task_tracker::TaskTrackerToken;

/// Some tokens and the text that they complete. Text lags tokens while a character or a stop string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Which of the samples.
    pub(crate) sample: u32,
    /// Text to show.
    pub(crate) text: String,
    /// Tokens generated.
    pub(crate) token_ids: Vec<TokenId>,
    /// One for each token, where asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
    /// With the first delta of each sample: tokens of the prompt whose KV was cached.
    pub(crate) cached_tokens: Option<u32>,
}

/// The cached share of a prompt in percent, rounded down: 0 to 100.
pub(crate) fn cache_hit_percent(cached_tokens: u32, prompt_tokens: usize) -> u64 {
    (100 * u64::from(cached_tokens) / (prompt_tokens as u64).max(1)).min(100)
}

/// How a sample ended well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    /// Which of the samples.
    pub(crate) sample: u32,
    /// Why.
    pub(crate) reason: FinishReason,
    /// Where the time went.
    pub(crate) timings: PhaseTimings,
    /// Numerics classes that generated the answer, in order, where it is more than one.
    pub(crate) crossed_classes: Vec<String>,
    /// With the last sample that ends.
    pub(crate) total: Option<Total>,
}

/// All samples of a request together.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Total {
    /// Tokens counted.
    pub(crate) usage: Usage,
    /// What it costs, where its model has a price.
    pub(crate) cost: Option<Cost>,
}

/// Counts of several samples as one. The prompt counts once: what any sample computed of it was computed for the request.
pub(crate) fn usage_of_all(started: impl Iterator<Item = Usage>) -> Option<Usage> {
    started.reduce(|a, b| Usage {
        prompt_tokens: a.prompt_tokens,
        completion_tokens: a.completion_tokens.saturating_add(b.completion_tokens),
        cached_tokens: a.cached_tokens.min(b.cached_tokens),
        cache_write_tokens: a.cache_write_tokens.max(b.cache_write_tokens),
        recomputed_tokens: a.recomputed_tokens.saturating_add(b.recomputed_tokens),
    })
}

/// One event; the last [`Event::Finished`], which has the total, or an error is the last.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// More of the answer.
    Delta(Delta),
    /// The end of a sample.
    Finished(Finished),
}

/// What a front receives.
pub(crate) type EventResult = Result<Event, RequestError>;

/// The events of one request, ended by a total or an error, always. Bounded: not reading pauses the workers, dropping it cancels them.
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

    /// All of it at once: every sample, in order, and the total.
    pub(crate) async fn whole(mut self) -> Result<(Vec<(Delta, Finished)>, Total), RequestError> {
        let mut deltas: BTreeMap<u32, Delta> = BTreeMap::new();
        let mut ended = Vec::new();
        loop {
            match self.next().await.unwrap_or_else(|| Err(lost()))? {
                Event::Delta(delta) => {
                    let whole = deltas.entry(delta.sample).or_default();
                    whole.text += &delta.text;
                    whole.token_ids.extend(delta.token_ids);
                    whole.logprobs.extend(delta.logprobs);
                }
                Event::Finished(mut finished) => {
                    let total = finished.total.take();
                    ended.push((deltas.remove(&finished.sample).unwrap_or_default(), finished));
                    if let Some(total) = total {
                        ended.sort_by_key(|(_, finished)| finished.sample);
                        return Ok((ended, total));
                    }
                }
            }
        }
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

/// What comes before the head of an answer: the first token of each sample, since only then it is known what of the prompt was cached.
#[derive(Debug)]
pub(crate) struct Opening {
    events: Vec<Event>,
    missing: u32,
    cached_tokens: u32,
}

impl Opening {
    /// Of an answer with so many samples.
    pub(crate) fn new(samples: u32) -> Self {
        Self { events: Vec::new(), missing: samples, cached_tokens: u32::MAX }
    }

    /// Reads until all is known. What was read is kept where this is given up before.
    pub(crate) async fn read(&mut self, events: &mut Events) -> Result<(), RequestError> {
        while self.missing > 0 {
            let event = events.next().await.unwrap_or_else(|| Err(lost()))?;
            if let Event::Delta(Delta { cached_tokens: Some(cached), .. }) = event {
                self.missing -= 1;
                self.cached_tokens = self.cached_tokens.min(cached);
            }
            self.events.push(event);
        }
        Ok(())
    }

    /// What was read, and tokens of the prompt whose KV was cached where that is known.
    pub(crate) fn done(self) -> (Vec<Event>, Option<u32>) {
        (self.events, (self.missing == 0).then_some(self.cached_tokens))
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

    fn delta(sample: u32, cached_tokens: Option<u32>) -> EventResult {
        Ok(Event::Delta(Delta { sample, token_ids: vec![sample], cached_tokens, ..Delta::default() }))
    }

    fn finished(sample: u32, total: Option<Total>) -> EventResult {
        let (reason, timings, crossed_classes) = (FinishReason::Length, PhaseTimings::default(), Vec::new());
        Ok(Event::Finished(Finished { sample, reason, timings, crossed_classes, total }))
    }

    fn refused() -> EventResult {
        Err(RequestError::new(ErrorKind::Overloaded, "full"))
    }

    fn events(sent: Vec<EventResult>) -> Events {
        let (sender, receiver) = mpsc::channel(10);
        sent.into_iter().for_each(|event| sender.try_send(event).unwrap());
        Events::new(receiver, TaskTracker::new().token())
    }

    #[tokio::test]
    async fn there_is_one_end_whatever_becomes_of_the_request() {
        let all = || Some(Total::default());
        for (sent, expected) in [
            (vec![delta(0, None), finished(0, all())], vec![delta(0, None), finished(0, all())]),
            (vec![finished(1, None), finished(0, all())], vec![finished(1, None), finished(0, all())]),
            (vec![delta(0, None), refused()], vec![delta(0, None), refused()]),
            (vec![finished(0, None)], vec![finished(0, None), Err(lost())]),
            (vec![delta(0, None)], vec![delta(0, None), Err(lost())]),
            (vec![], vec![Err(lost())]),
        ] {
            assert_eq!(events(sent).collect::<Vec<_>>().await, expected);
        }
    }

    #[tokio::test]
    async fn samples_are_told_apart_and_come_in_order() {
        let total = Total { usage: Usage { completion_tokens: 3, ..Usage::default() }, cost: None };
        let sent =
            vec![delta(1, None), delta(0, None), finished(1, None), delta(0, None), finished(0, Some(total.clone()))];
        let (samples, told) = events(sent).whole().await.unwrap();
        assert_eq!(told, total);
        let samples: Vec<_> = samples.into_iter().map(|(delta, finished)| (finished.sample, delta.token_ids)).collect();
        assert_eq!(samples, [(0, vec![0, 0]), (1, vec![1])]);
        assert_eq!(events(vec![delta(0, None), refused()]).whole().await.unwrap_err().kind, ErrorKind::Overloaded);
    }

    #[tokio::test]
    async fn the_head_waits_for_the_first_token_of_each_sample() {
        let mut opening = Opening::new(2);
        let mut all =
            events(vec![delta(0, Some(48)), delta(0, None), finished(0, None), delta(1, Some(32)), delta(1, None)]);
        opening.read(&mut all).await.unwrap();
        let (read, cached) = opening.done();
        assert_eq!((read.len(), cached), (4, Some(32)));
        let mut opening = Opening::new(2);
        assert!(opening.read(&mut events(vec![delta(0, Some(48)), refused()])).await.is_err());
        let (read, cached) = opening.done();
        assert_eq!((read.len(), cached), (1, None), "what was read is not lost");
    }

    #[test]
    fn the_prompt_of_several_samples_counts_once() {
        let usage = |completion_tokens, cached_tokens, cache_write_tokens, recomputed_tokens| Usage {
            prompt_tokens: 100,
            completion_tokens,
            cached_tokens,
            cache_write_tokens,
            recomputed_tokens,
        };
        let all = [usage(3, 32, 64, 0), usage(5, 96, 0, 7), usage(1, 96, 0, 2)];
        assert_eq!(usage_of_all(all.into_iter()), Some(usage(9, 32, 64, 9)));
        assert_eq!(usage_of_all(std::iter::empty()), None);
    }

    #[test]
    fn a_share_is_rounded_down() {
        let cases = [(0, 0, 0), (0, 5, 0), (1, 3, 33), (2, 3, 66), (199, 200, 99), (200, 200, 100), (7, 0, 100)];
        for (cached, prompt, percent) in cases {
            assert_eq!(cache_hit_percent(cached, prompt), percent, "{cached} of {prompt}");
        }
    }
}
