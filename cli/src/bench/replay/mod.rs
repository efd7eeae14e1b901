//! Sends a load to a running router and records the outcome of each request.

mod ask;
mod progress;

use super::load::{Load, Pace, Prompts};
use super::report::{Ending, Outcome};
use crate::router::explain;
use anyhow::Context as _;
pub(super) use ask::Target;
use ask::{Answered, Question, ask};
use progress::Progress;
use std::sync::Arc;
use std::time::{Duration, Instant};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tonic::{Code, Status};

/// The results of a replay.
pub(super) struct Replayed {
    /// In the order in which requests ended.
    pub(super) outcomes: Vec<Outcome>,
    /// Requests that were not due yet when the load was interrupted.
    pub(super) unsent: usize,
    /// The longest delay after its due time with which a request was sent: this side's own delay.
    pub(super) late_max: Duration,
}

/// Sends all requests, and ends when the last one has ended or on Ctrl-C.
///
/// # Errors
/// If the router refuses a property that all requests share: key, model, token ids.
pub(super) async fn run(load: &Load, prompts: Arc<Prompts>, target: &Target) -> anyhow::Result<Replayed> {
    let (stop, stopped) = watch::channel(false);
    let mut replay = Replay {
        load,
        prompts,
        target,
        start: Instant::now(),
        stopped,
        asking: JoinSet::new(),
        next: 0,
        outcomes: Vec::with_capacity(load.trace.requests.len()),
        late_max: Duration::ZERO,
        progress: Progress::new(load.trace.requests.len()),
    };
    let ended = tokio::select! {
        ended = replay.all() => ended,
        interrupt = tokio::signal::ctrl_c() => interrupt.context("cannot wait for Ctrl-C"),
    };
    // Requests in flight end at once and return what they have received. If there are none, nothing receives this.
    let _ = stop.send(true);
    while let Some(answered) = replay.asking.join_next().await {
        replay.ended(answered.context("a request was lost")?.outcome);
    }
    replay.progress.finish();
    ended?;
    let unsent = load.trace.requests.len() - replay.next;
    Ok(Replayed { outcomes: replay.outcomes, unsent, late_max: replay.late_max })
}

/// A load while it is replayed.
struct Replay<'a> {
    load: &'a Load,
    prompts: Arc<Prompts>,
    target: &'a Target,
    start: Instant,
    stopped: watch::Receiver<bool>,
    asking: JoinSet<Answered>,
    /// The next request to send.
    next: usize,
    outcomes: Vec<Outcome>,
    late_max: Duration,
    progress: Progress,
}

impl Replay<'_> {
    async fn all(&mut self) -> anyhow::Result<()> {
        loop {
            let due = self.load.trace.requests.get(self.next).map(|request| match self.load.pace {
                Pace::Open { .. } => Some(self.start + request.at),
                Pace::Closed { concurrency } => (self.asking.len() < concurrency).then_some(self.start),
            });
            if due.is_none() && self.asking.is_empty() {
                return Ok(());
            }
            let due = due.flatten();
            tokio::select! {
                // Ended requests free capacity for those that are due.
                biased;
                Some(answered) = self.asking.join_next() => {
                    let answered = answered.context("a request was lost")?;
                    self.refused(answered.status.as_ref())?;
                    self.ended(answered.outcome);
                }
                () = until(due) => self.send(),
            }
        }
    }

    /// Sends the next request, or sheds it.
    fn send(&mut self) {
        let (index, load) = (self.next, self.load);
        let request = &load.trace.requests[index];
        let infinite_tokens = load.infinite.tokens_hit_by_request[index];
        self.next += 1;
        if let Pace::Open { in_flight_max } = load.pace {
            self.late_max = self.late_max.max(self.start.elapsed().saturating_sub(request.at));
            if self.asking.len() >= in_flight_max {
                self.ended(Outcome::shed(request.at, request.prompt_tokens, infinite_tokens));
                return;
            }
        }
        let question = Question {
            prompt: self.prompts.prompt(&load.trace, index),
            output_tokens: request.output_tokens,
            infinite_tokens,
        };
        self.asking.spawn(ask(self.target.clone(), question, self.start, self.stopped.clone()));
    }

    fn ended(&mut self, outcome: Outcome) {
        self.progress.ended(&outcome, self.asking.len());
        self.outcomes.push(outcome);
    }

    /// Ends a load of which every request would be refused for the same reason. Once one request was answered, a refusal concerns a
    /// single request.
    fn refused(&self, status: Option<&Status>) -> anyhow::Result<()> {
        let answered = self.outcomes.iter().any(|outcome| outcome.result == Ending::Ok);
        match status {
            Some(status) if !answered && is_of_all(status.code()) => {
                Err(explain(status)).context("the router refuses this load; see --model, --token-ids and the key")
            }
            _ => Ok(()),
        }
    }
}

/// Whether a refusal concerns a property that all requests share.
fn is_of_all(code: Code) -> bool {
    let common = [Code::Unauthenticated, Code::PermissionDenied, Code::NotFound, Code::InvalidArgument];
    common.contains(&code) || code == Code::Unimplemented
}

/// Waits until an instant, or forever.
async fn until(instant: Option<Instant>) {
    match instant {
        Some(instant) => tokio::time::sleep_until(instant.into()).await,
        None => std::future::pending().await,
    }
}
