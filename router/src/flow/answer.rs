//! Worker tokens to client events: text, stop strings, counts and times.

use crate::models::ModelText;
use crate::output::{Delta, Event, EventResult, Finished};
use baton_proto::convert::finish_reason;
use baton_proto::v1;
use baton_text::{Detokenizer, StopMatcher};
use baton_types::{ErrorKind, FinishReason, PhaseTimings, RequestError, TokenLogprobs, Usage};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::SendTimeoutError;
use tracing::Span;

/// Times of tokens, for metrics.
pub(super) trait Clocked: Send + Sync {
    /// The first token left, so long after the request came.
    fn first_token(&self, after: Duration);
    /// Another token left, so long after the one before.
    fn next_token(&self, after: Duration);
}

/// Bounds of one answer.
#[derive(Clone, Copy, Debug)]
pub(super) struct AnswerLimits {
    /// Most tokens.
    pub(super) max_tokens: u32,
    /// A client that takes nothing for so long is cancelled.
    pub(super) client_stall_max: Duration,
}

/// The answer in the making.
pub(super) struct Answer<'a> {
    out: &'a mpsc::Sender<EventResult>,
    limits: AnswerLimits,
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    wants_logprobs: bool,
    received: Instant,
    first: Option<Instant>,
    last: Option<Instant>,
    /// What is known of the phases.
    pub(super) timings: PhaseTimings,
    usage: Usage,
    clock: &'a dyn Clocked,
    parent: &'a Span,
    /// From the first token to the end.
    stream: Option<Span>,
}

impl<'a> Answer<'a> {
    #[allow(clippy::too_many_arguments)] // One caller, and every argument is of another type.
    pub(super) fn new(
        out: &'a mpsc::Sender<EventResult>,
        limits: AnswerLimits,
        text: Option<&ModelText>,
        stops: StopMatcher,
        wants_logprobs: bool,
        (prompt_tokens, received): (u32, Instant),
        clock: &'a dyn Clocked,
        parent: &'a Span,
    ) -> Self {
        let usage = Usage { prompt_tokens, ..Usage::default() };
        let (detokenizer, timings) = (text.map(ModelText::detokenizer), PhaseTimings::default());
        let (first, last, stream) = (None, None, None);
        Self {
            out,
            limits,
            detokenizer,
            stops,
            wants_logprobs,
            received,
            first,
            last,
            timings,
            usage,
            clock,
            parent,
            stream,
        }
    }

    /// Whether the client has seen a token.
    pub(super) fn has_started(&self) -> bool {
        self.first.is_some()
    }

    /// When the first token left.
    pub(super) fn first_token_at(&self) -> Option<Instant> {
        self.first
    }

    /// Takes a token and sends what it completes; says why the answer ends with it, where it does.
    pub(super) async fn token(&mut self, token: v1::Token) -> Result<Option<FinishReason>, RequestError> {
        let stated = finish_reason(token.finish_reason)?;
        if stated == Some(FinishReason::Cancelled) {
            return Err(RequestError::new(ErrorKind::Unavailable, "the worker cancelled the request; send it again"));
        }
        self.usage.completion_tokens += 1;
        let spent = self.usage.completion_tokens >= self.limits.max_tokens;
        let mut finish = stated.or(spent.then_some(FinishReason::Length));
        let logprobs = match token.logprobs {
            Some(logprobs) => vec![TokenLogprobs::try_from(logprobs)?],
            None if self.wants_logprobs => {
                return Err(RequestError::new(
                    ErrorKind::Internal,
                    "the worker left out the log-probabilities asked for",
                ));
            }
            None => Vec::new(),
        };
        let mut text = String::new();
        if let Some(detokenizer) = &mut self.detokenizer {
            // The token that stops is no part of the answer.
            let piece = if finish == Some(FinishReason::Stop) { None } else { detokenizer.push(token.id) };
            let rest = finish.and_then(|_| detokenizer.finish());
            let (shown, stop) = self.stops.push(&(piece.unwrap_or_default() + &rest.unwrap_or_default()));
            text = shown;
            if stop.is_some() {
                finish = Some(FinishReason::Stop);
            } else if finish.is_some() {
                text += &self.stops.finish();
            }
        }
        self.send(Event::Delta(Delta { text, token_ids: vec![token.id], logprobs })).await?;
        self.count_time();
        Ok(finish)
    }

    fn count_time(&mut self) {
        let now = Instant::now();
        match self.last.replace(now) {
            None => {
                self.first = Some(now);
                self.stream = Some(tracing::info_span!(parent: self.parent, "stream"));
                self.clock.first_token(now - self.received);
            }
            Some(last) => self.clock.next_token(now - last),
        }
    }

    /// The end, with usage and timings.
    pub(super) fn finished(&self, reason: FinishReason) -> Finished {
        let micros = |d: Duration| u64::try_from(d.as_micros()).unwrap_or(u64::MAX);
        let timings = PhaseTimings {
            ttft_us: self.first.map(|first| micros(first - self.received)),
            decode_us: self.first.zip(self.last).map(|(first, last)| micros(last - first)),
            ..self.timings
        };
        Finished { reason, usage: self.usage, timings }
    }

    /// Tokens counted so far.
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Sends an event. A client that reads nothing pauses the worker's stream here, and is given up after a while.
    async fn send(&self, event: Event) -> Result<(), RequestError> {
        let stall = self.limits.client_stall_max;
        self.out.send_timeout(Ok(event), stall).await.map_err(|e| match e {
            SendTimeoutError::Closed(_) => RequestError::new(ErrorKind::Cancelled, "the client is gone"),
            SendTimeoutError::Timeout(_) => {
                RequestError::new(ErrorKind::Cancelled, format!("the client read nothing for {stall:?}"))
            }
        })
    }
}
