//! Worker tokens to client events: text, stop strings, counts and times.

use super::core::Core;
use super::job::Job;
use super::sample::Sample;
use crate::output::{Delta, Event, EventResult, Finished, PROMPT_PART_TOKENS_MAX};
use baton_text::{Detokenizer, StopMatcher};
use baton_types::events::TransferReport;
use baton_types::{
    ErrorKind, FinishReason, GeneratedToken, NumericsClass, PhaseTimings, PromptLogprobs, RequestError, TokenId, Usage,
};
use std::time::{Duration, Instant};
use tokio::sync::mpsc;
use tokio::sync::mpsc::error::TrySendError;
use tracing::Span;

/// The answer while it is generated.
pub(super) struct Answer<'a> {
    core: &'a Core,
    job: &'a Job,
    /// Index of its sample.
    sample: u32,
    /// The prompt that it answers.
    prompt: usize,
    /// How many tokens of the prompt, from the second on, the client has the log-probabilities of; `None` if this sample reports none.
    scored: Option<usize>,
    /// Numerics class of the worker that reported the first of them.
    scored_by: Option<NumericsClass>,
    /// Most tokens that it has.
    max_tokens: u32,
    out: &'a mpsc::Sender<EventResult>,
    detokenizer: Option<Detokenizer>,
    stops: StopMatcher,
    first: Option<Instant>,
    last: Option<Instant>,
    /// How long the client blocked the answer by not reading.
    stalled: Duration,
    timings: PhaseTimings,
    usage: Usage,
    /// Tokens sent to the client so far; another attempt continues after them.
    tokens: Vec<TokenId>,
    /// How many of them earlier attempts generated.
    carried: usize,
    /// Numerics classes of the workers that generated them, each with the number of tokens before it.
    classes: Vec<(NumericsClass, usize)>,
    /// From the first token to the end.
    stream: Option<Span>,
}

impl<'a> Answer<'a> {
    pub(super) fn new(core: &'a Core, sample: &Sample<'a>, out: &'a mpsc::Sender<EventResult>) -> Self {
        let scored = sample.scores().then_some(0);
        let (job, prompt, sample) = (sample.job, sample.prompt(), sample.index);
        Self {
            core,
            job,
            sample,
            prompt: job.choices().prompt_of(sample),
            scored,
            scored_by: None,
            max_tokens: prompt.max_tokens,
            out,
            detokenizer: job.model.text.as_deref().map(|text| text.detokenizer(job.marks())),
            stops: job.stops.clone(),
            first: None,
            last: None,
            stalled: Duration::ZERO,
            timings: PhaseTimings::default(),
            usage: Usage { prompt_tokens: prompt.tokens.len() as u32, ..Usage::default() },
            tokens: Vec::new(),
            carried: 0,
            classes: Vec::new(),
            stream: None,
        }
    }

    /// Whether a token was sent to the client.
    pub(super) fn has_started(&self) -> bool {
        self.first.is_some()
    }

    /// Tokens sent to the client so far.
    pub(super) fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// The numerics class of its last token, or of what was reported of its prompt.
    pub(super) fn class(&self) -> Option<&NumericsClass> {
        self.generated_by().last().or(self.scored_by.as_ref())
    }

    /// Numerics classes of its tokens, in order.
    fn generated_by(&self) -> impl Iterator<Item = &NumericsClass> {
        self.classes.iter().filter(|(_, before)| *before < self.tokens.len()).map(|(class, _)| class)
    }

    /// Workers of this class continue the answer.
    pub(super) fn runs_on(&mut self, class: &NumericsClass) {
        self.carried = self.tokens.len();
        self.classes.retain(|(_, before)| *before < self.carried);
        if self.generated_by().last() != Some(class) {
            self.classes.push((class.clone(), self.carried));
        }
    }

    /// Time in queues before the first token.
    pub(super) fn queued(&mut self, in_router: Duration, in_worker_us: u64) {
        self.job.metrics.began(self.core.runtime.now());
        if !self.has_started() {
            self.timings.queue_us = Some(micros(in_router).saturating_add(in_worker_us));
        }
    }

    /// Compute time before an attempt's first token. Only the time that the client waited for counts, not that of
    /// attempts that continued the answer.
    pub(super) fn prefilled(&mut self, prefill_us: Option<u64>) {
        if self.carried == 0 {
            self.timings.prefill_us = prefill_us.or(self.timings.prefill_us);
        }
    }

    /// Report of a transfer. The last one counts: the earlier transfers were of failed attempts.
    pub(super) fn transferred(&mut self, done: &TransferReport) {
        self.prefilled(Some(done.prefill_us));
        self.timings.transfer_us = Some(done.transfer_us);
        self.timings.exposed_us = Some(done.exposed_us);
        self.timings.transfer_bytes = Some(done.transfer_bytes);
    }

    /// Times of its phases that workers have reported so far.
    pub(super) fn timings(&self) -> &PhaseTimings {
        &self.timings
    }

    /// How long the client blocked the answer by not reading.
    pub(super) fn stalled(&self) -> Duration {
        self.stalled
    }

    /// When the first token was sent.
    pub(super) fn first_token_at(&self) -> Option<Instant> {
        self.first
    }

    /// Whether log-probabilities of the prompt are still to come.
    pub(super) fn scores(&self) -> bool {
        self.scored.is_some_and(|scored| scored + 1 < self.job.prompts[self.prompt].tokens.len())
    }

    /// Takes a part of them, and sends what the client does not have yet: another attempt reports all of them again.
    pub(super) async fn prompt(&mut self, part: PromptLogprobs) -> Result<(), RequestError> {
        let other = || {
            let message = "the worker reported other log-probabilities of the prompt than it was asked for";
            RequestError::new(ErrorKind::Internal, message)
        };
        let job = self.job;
        let behind_first = job.prompts[self.prompt].tokens.get(1..).unwrap_or_default();
        let (scored, first) = self.scored.zip((part.first as usize).checked_sub(1)).ok_or_else(other)?;
        let prompt =
            behind_first.get(first..first + part.tokens.len()).filter(|_| first <= scored).ok_or_else(other)?;
        if part.tokens.iter().map(|token| token.token).ne(prompt.iter().copied()) {
            return Err(other());
        }
        if self.scored_by.is_none() {
            self.scored_by = self.classes.last().map(|(class, _)| class.clone());
        }
        self.scored = Some(scored.max(first + part.tokens.len()));
        let mut tokens = part.tokens.into_iter().skip(scored - first).peekable();
        while tokens.peek().is_some() {
            let prompt = tokens.by_ref().take(PROMPT_PART_TOKENS_MAX).collect();
            self.send(Event::Delta(Delta { sample: self.sample, prompt, ..Delta::default() })).await?;
        }
        Ok(())
    }

    /// Takes a token and sends the output that it completes. Returns the finish reason if the answer ends with it. The
    /// prefill's span ends when the token is passed on, so no gap is left before the span `stream`.
    pub(super) async fn token(
        &mut self,
        token: GeneratedToken,
        prefill: Option<Span>,
    ) -> Result<Option<FinishReason>, RequestError> {
        if token.logprobs.is_none() && self.job.sampling.logprobs.is_some() {
            let message = "the worker left out the log-probabilities asked for";
            return Err(RequestError::new(ErrorKind::Internal, message));
        }
        if self.scores() {
            let message = "the worker left out the log-probabilities of the prompt";
            return Err(RequestError::new(ErrorKind::Internal, message));
        }
        if self.tokens.len() == self.carried {
            self.reused(&token);
        }
        if self.max_tokens == 0 {
            let cached_tokens = Some(self.usage.cached_tokens);
            self.send(Event::Delta(Delta { sample: self.sample, cached_tokens, ..Delta::default() })).await?;
            drop(prefill);
            self.count_time();
            return Ok(Some(FinishReason::Length));
        }
        self.usage.completion_tokens += 1;
        self.tokens.push(token.id);
        let spent = self.usage.completion_tokens >= self.max_tokens;
        let mut finish = token.finish.or(spent.then_some(FinishReason::Length));
        let mut text = String::new();
        if let Some(detokenizer) = &mut self.detokenizer {
            // The stop token is not part of the answer.
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
        let logprobs = token.logprobs.into_iter().collect();
        let cached_tokens = self.first.is_none().then_some(self.usage.cached_tokens);
        let token_ids = vec![token.id];
        let delta = Delta { sample: self.sample, text, token_ids, logprobs, cached_tokens, prompt: Vec::new() };
        self.send(Event::Delta(delta)).await?;
        drop(prefill);
        self.count_time();
        Ok(finish)
    }

    /// Takes the cache figures of an attempt's first token. The client is sent the cached count of its own first token.
    /// Later attempts recompute what they did not find cached.
    fn reused(&mut self, first: &GeneratedToken) {
        let usage = &mut self.usage;
        let cached = first.cached_tokens.unwrap_or(0);
        if self.carried > 0 {
            let sequence = usage.prompt_tokens.saturating_add(self.carried as u32);
            let computed = sequence.saturating_sub(cached);
            usage.recomputed_tokens = usage.recomputed_tokens.saturating_add(computed);
            return;
        }
        usage.cached_tokens = cached.min(usage.prompt_tokens);
        let computed = usage.prompt_tokens - usage.cached_tokens;
        usage.cache_write_tokens = first.cache_write_tokens.unwrap_or(0).min(computed);
    }

    fn count_time(&mut self) {
        let now = self.core.runtime.now();
        match self.last.replace(now) {
            None => {
                self.first = Some(now);
                if self.scored.is_some() {
                    self.job.has_begun(self.prompt);
                }
                self.stream = Some(tracing::info_span!(parent: &self.job.span, "stream"));
                // The request's first token is the first one sent by any of its samples.
                if self.job.starts() {
                    self.job.metrics.first_token(now - self.job.received, now);
                }
            }
            Some(last) => self.job.metrics.inter_token(now - last),
        }
    }

    /// Its end, with timings.
    pub(super) fn finished(&self, reason: FinishReason) -> Finished {
        let timings = PhaseTimings {
            ttft_us: self.first.map(|first| micros(first - self.job.received)),
            decode_us: self.first.zip(self.last).map(|(first, last)| micros(last - first)),
            ..self.timings
        };
        let mut classes: Vec<&NumericsClass> = self.scored_by.iter().chain(self.generated_by()).collect();
        classes.dedup();
        let classes: Vec<String> = classes.into_iter().map(NumericsClass::to_string).collect();
        let crossed_classes = if classes.len() > 1 { classes } else { Vec::new() };
        let stop = self.stops.found_string().map(str::to_owned);
        Finished { sample: self.sample, reason, stop, timings, crossed_classes, total: None }
    }

    /// Tokens counted so far.
    pub(super) fn usage(&self) -> Usage {
        self.usage
    }

    /// Sends an event. A client that reads nothing pauses the worker's stream here, and is cancelled after a time
    /// limit.
    async fn send(&mut self, event: Event) -> Result<(), RequestError> {
        let gone = || RequestError::new(ErrorKind::Cancelled, "the client is gone");
        let event = match self.out.try_send(Ok(event)) {
            Ok(()) => return Ok(()),
            Err(TrySendError::Closed(_)) => return Err(gone()),
            Err(TrySendError::Full(event)) => event,
        };
        let (runtime, stall) = (&*self.core.runtime, self.core.limits.client_stall_max);
        let since = runtime.now();
        let sent = runtime.until(since + stall, self.out.send(event)).await;
        self.stalled += runtime.now().saturating_duration_since(since);
        match sent {
            Some(sent) => sent.map_err(|_| gone()),
            None => {
                let message = format!("the client read nothing for {stall:?}");
                Err(RequestError::new(ErrorKind::Cancelled, message))
            }
        }
    }
}

fn micros(duration: Duration) -> u64 {
    u64::try_from(duration.as_micros()).unwrap_or(u64::MAX)
}
