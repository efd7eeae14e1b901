//! What a request yields, whatever the front: deltas and an end of each sample, or an error.

use crate::prices::Cost;
use baton_node::intake::{Hold, IntakeFull};
use baton_types::{ErrorKind, FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};
use futures::{Stream, StreamExt as _};
use std::collections::{BTreeMap, VecDeque};
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;
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

/// Lists double as they grow.
const DOUBLES: usize = 2;
/// What an allocator takes for itself.
const ALLOCATION_BYTES: usize = 16;

impl Delta {
    /// Most memory that it takes, by itself or as a part of a whole answer.
    fn bytes(&self) -> u64 {
        let top = |logprobs: &TokenLogprobs| ALLOCATION_BYTES + logprobs.top.capacity() * size_of::<(TokenId, f32)>();
        let lists = self.text.len() + size_of_val(&self.token_ids[..]) + size_of_val(&self.logprobs[..]);
        (DOUBLES * lists + self.logprobs.iter().map(top).sum::<usize>()) as u64
    }
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

impl Finished {
    /// Why, as OpenAI's API and OpenTelemetry's conventions call it.
    pub(crate) const fn reason_name(&self) -> &'static str {
        match self.reason {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
            FinishReason::Cancelled => "cancelled",
        }
    }
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

    /// How many may wait for their reader.
    fn most(&self) -> usize {
        self.events.as_ref().map_or(0, mpsc::Receiver::max_capacity)
    }

    /// All of it at once, in the room that there is. `written` is how many bytes a delta will take in the answer, and `before` how many that
    /// takes besides.
    pub(crate) async fn whole(
        mut self,
        hold: Hold,
        before: u64,
        written: impl Fn(&Delta) -> u64,
    ) -> Result<Whole, RequestError> {
        let mut deltas: BTreeMap<u32, Delta> = BTreeMap::new();
        let mut whole = Whole { samples: Vec::new(), total: Total::default(), hold, written: before };
        let mut kept = 0;
        make_room(&mut whole.hold, whole.written)?;
        loop {
            match self.next().await.unwrap_or_else(|| Err(lost()))? {
                Event::Delta(delta) => {
                    kept += delta.bytes();
                    whole.written += written(&delta);
                    make_room(&mut whole.hold, kept + whole.written)?;
                    let sample = deltas.entry(delta.sample).or_default();
                    sample.text += &delta.text;
                    sample.token_ids.extend(delta.token_ids);
                    sample.logprobs.extend(delta.logprobs);
                }
                Event::Finished(mut finished) => {
                    let total = finished.total.take();
                    whole.samples.push((deltas.remove(&finished.sample).unwrap_or_default(), finished));
                    if let Some(total) = total {
                        whole.total = total;
                        whole.samples.sort_by_key(|(_, finished)| finished.sample);
                        return Ok(whole);
                    }
                }
            }
        }
    }
}

/// A whole answer, and the room for it and for what is written of it.
#[derive(Debug)]
pub(crate) struct Whole {
    /// Every sample, in order.
    pub(crate) samples: Vec<(Delta, Finished)>,
    /// All of them together.
    pub(crate) total: Total,
    /// What it takes.
    pub(crate) hold: Hold,
    /// How much of that is for what is written.
    pub(crate) written: u64,
}

/// Room is taken in steps: one budget serves all answers, and a token takes some bytes.
const STEP_BYTES: u64 = 4 << 10;
/// Answers come and go within seconds.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// Makes room for `bytes` of an answer, before they are kept.
fn make_room(hold: &mut Hold, bytes: u64) -> Result<(), RequestError> {
    if bytes <= hold.bytes() {
        return Ok(());
    }
    hold.set(bytes.next_multiple_of(STEP_BYTES)).map_err(no_room)
}

/// What a client does about an answer that there is no room for.
pub(crate) fn no_room(full: IntakeFull) -> RequestError {
    let whose = match full {
        IntakeFull::Share(max) | IntakeFull::Strangers(max) => {
            format!(
                "answers of this client that are gathered whole, or that it has not read, hold {max} bytes, its share"
            )
        }
        IntakeFull::All(max) => {
            format!("answers that are gathered whole, or not read, hold {max} bytes, which is the limit")
        }
    };
    let message = format!(
        "{whose}; read those that have come, ask for a stream, fewer samples, fewer log-probabilities or fewer requests at once, \
         or try again later"
    );
    RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
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

/// What an event takes that waits for its reader. Log-probabilities of twenty tokens are some hundred bytes.
pub(crate) const EVENT_BYTES: u64 = 512;

/// What comes before the head of an answer: the first token of each sample, since only then it is known what of the prompt was cached. Other
/// samples go on meanwhile, so it has room like a whole answer.
#[derive(Debug)]
pub(crate) struct Opening {
    events: Opened,
    kept: u64,
    missing: u32,
    cached_tokens: u32,
}

/// What was read before the head was written, in order, and the room for it. The rest of the room is for what a client leaves unread: it has
/// to live as long as the answer.
#[derive(Debug)]
pub(crate) struct Opened {
    events: VecDeque<Event>,
    hold: Hold,
    unread: u64,
}

impl Iterator for Opened {
    type Item = Event;

    fn next(&mut self) -> Option<Event> {
        let event = self.events.pop_front();
        if event.is_none() && self.hold.bytes() > self.unread {
            self.events = VecDeque::new();
            // Fewer always fit.
            let _ = self.hold.set(self.unread);
        }
        event
    }
}

impl Opening {
    /// Of an answer with so many samples, which takes `head` bytes and as many of its events as there may be until it is read: also one that
    /// has ended.
    ///
    /// # Errors
    /// If there is no room for it.
    pub(crate) fn new(samples: u32, events: &Events, head: u64, mut hold: Hold) -> Result<Self, RequestError> {
        let unread = head + EVENT_BYTES * events.most() as u64;
        hold.set(unread).map_err(no_room)?;
        let events = Opened { events: VecDeque::new(), hold, unread };
        Ok(Self { events, kept: 0, missing: samples, cached_tokens: u32::MAX })
    }

    /// Reads until all is known, or there is no room to wait for it. What was read is kept where this is given up before.
    pub(crate) async fn read(&mut self, events: &mut Events) -> Result<(), RequestError> {
        while self.missing > 0 {
            let event = events.next().await.unwrap_or_else(|| Err(lost()))?;
            if let Event::Delta(delta) = &event {
                self.kept += (DOUBLES * size_of::<Event>()) as u64 + delta.bytes();
                if let Some(cached) = delta.cached_tokens {
                    self.missing -= 1;
                    self.cached_tokens = self.cached_tokens.min(cached);
                }
            }
            self.events.events.push_back(event);
            if make_room(&mut self.events.hold, self.events.unread + self.kept).is_err() {
                break;
            }
        }
        Ok(())
    }

    /// What was read, and tokens of the prompt whose KV was cached where that is known.
    pub(crate) fn done(self) -> (Opened, Option<u32>) {
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
    use baton_node::intake::{Client, Intake};
    use tokio_util::task::TaskTracker;

    const MIB: u64 = 1 << 20;

    fn room(intake: &Intake) -> Hold {
        intake.hold(Client::Tenant("a".into()))
    }

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
        let intake = Intake::new(MIB, MIB);
        let whole = events(sent).whole(room(&intake), 0, |_| 1).await.unwrap();
        assert_eq!((&whole.total, whole.written), (&total, 3));
        let samples: Vec<_> =
            whole.samples.into_iter().map(|(delta, finished)| (finished.sample, delta.token_ids)).collect();
        assert_eq!(samples, [(0, vec![0, 0]), (1, vec![1])]);
        let failed = events(vec![delta(0, None), refused()]).whole(room(&intake), 0, |_| 1).await;
        assert_eq!(failed.unwrap_err(), refused().unwrap_err());
    }

    #[tokio::test]
    async fn an_answer_grows_as_far_as_there_is_room() {
        let intake = Intake::new(4 * MIB, MIB);
        let of = async |before: u64, each: u64| {
            let sent = vec![delta(0, None), delta(0, None), finished(0, Some(Total::default()))];
            events(sent).whole(room(&intake), before, |_| each).await
        };
        let whole = of(100, 400 << 10).await.unwrap();
        assert_eq!((whole.written, whole.hold.bytes()), ((800 << 10) + 100, (804 << 10)));
        assert_eq!(intake.used(), whole.hold.bytes());
        // Beside that one there is no more room, of which a third is enough alone.
        for (before, each) in [(0, 300 << 10), (300 << 10, 0)] {
            let error = of(before, each).await.unwrap_err();
            assert_eq!((error.kind, error.retry_after), (ErrorKind::Overloaded, Some(RETRY_AFTER)));
            assert!(error.message.contains("ask for a stream"), "{error}");
        }
        drop(whole);
        assert_eq!(intake.used(), 0);
        of(300 << 10, 0).await.unwrap();
    }

    #[tokio::test]
    async fn a_head_waits_as_long_as_there_is_room() {
        let intake = Intake::new(MIB, MIB);
        let mut other = room(&intake);
        other.set(MIB - MIB / 8).unwrap();
        let text = || Ok(Event::Delta(Delta { text: "x".repeat(20 << 10), ..Delta::default() }));
        let mut all = events(vec![text(), text(), delta(0, Some(48))]);
        let mut opening = Opening::new(1, &all, 0, room(&intake)).unwrap();
        opening.read(&mut all).await.unwrap();
        let (mut read, cached) = opening.done();
        assert_eq!((read.by_ref().count(), cached), (2, None), "it goes without what it would have waited for");
        assert_eq!(intake.used(), other.bytes() + 10 * EVENT_BYTES, "what was written takes no room");
        drop((read, all));
        assert_eq!(intake.used(), other.bytes());
    }

    #[tokio::test]
    async fn the_head_waits_for_the_first_token_of_each_sample() {
        let intake = Intake::new(MIB, MIB);
        let mut all =
            events(vec![delta(0, Some(48)), delta(0, None), finished(0, None), delta(1, Some(32)), delta(1, None)]);
        let mut opening = Opening::new(2, &all, 0, room(&intake)).unwrap();
        opening.read(&mut all).await.unwrap();
        let (read, cached) = opening.done();
        assert_eq!((read.count(), cached), (4, Some(32)));
        let mut all = events(vec![delta(0, Some(48)), refused()]);
        let mut opening = Opening::new(2, &all, 0, room(&intake)).unwrap();
        assert!(opening.read(&mut all).await.is_err());
        let (read, cached) = opening.done();
        assert_eq!((read.count(), cached), (1, None), "what was read is not lost");
    }

    #[test]
    fn what_a_client_may_leave_unread_has_room_or_is_refused() {
        let intake = Intake::new(MIB, MIB);
        let all = events(vec![]);
        let (opened, _) = Opening::new(1, &all, MIB / 2, room(&intake)).unwrap().done();
        assert_eq!(intake.used(), MIB / 2 + 10 * EVENT_BYTES);
        let refused = Opening::new(1, &all, MIB / 2, room(&intake)).unwrap_err();
        assert!(refused.kind == ErrorKind::Overloaded && refused.message.contains("read those"), "{refused:?}");
        drop(opened);
        assert_eq!(intake.used(), 0);
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
