//! What to do about a failed attempt: a pure decision. No clock, no I/O, random numbers from the caller.
//!
//! An answer may go on elsewhere at any point: tokens are exact, so prompt and tokens sent so far, prefilled anew, continue it. What is
//! decided here is whether that may help, whom to avoid, and how long to wait. The flow only executes it.

mod avoided;
mod bucket;
mod pair;
mod probation;
#[cfg(test)]
mod tests;

pub(crate) use avoided::{Avoided, Circle};
pub(crate) use bucket::RetryBucket;
pub(crate) use pair::{FromDecode, FromPrefill, Next, Pair, PrefillFault};
pub(crate) use probation::{Probation, ProbationLimits};

use baton_types::ErrorKind;
use std::time::{Duration, Instant};

/// The steps of an attempt: where it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// No worker to run on.
    Place,
    /// The decode worker took no claim, or has no room for what it claimed.
    Claim,
    /// The prefill worker's stream, before the KV was adopted.
    Prefill,
    /// The decode worker says that the KV did not come.
    Handoff,
    /// The decode worker's stream.
    Decode,
}

impl Step {
    /// Name in spans and metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Place => "place",
            Self::Claim => "claim",
            Self::Prefill => "prefill",
            Self::Handoff => "handoff",
            Self::Decode => "decode",
        }
    }
}

/// What failed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub step: Step,
    /// How. Never the client's own doing: that ends a request at once.
    pub kind: ErrorKind,
    /// Earliest sensible retry, as the worker says.
    pub retry_after: Option<Duration>,
    /// Whether the client has seen tokens: such an answer is carried on wherever there may be room, another is told early to come again.
    pub started: bool,
    /// Whether who failed said before that it drains: it takes nothing more, so this happens once a worker, and is nobody's fault.
    pub drained: bool,
}

/// Who is avoided in the next attempts of this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Avoid {
    /// As long as there is another.
    Softly,
    /// In any case, until the answer has begun.
    Strictly,
}

/// Another attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    /// Wait before it.
    pub after: Duration,
    /// Whether the prefill worker of the failed attempt is avoided.
    pub prefill: Option<Avoid>,
    /// Whether its decode worker is.
    pub decode: Option<Avoid>,
    /// Whether whoever broke is avoided by other requests too, for a while.
    pub probation: bool,
    /// Whether the client has seen tokens.
    pub started: bool,
}

impl Retry {
    /// Which workers of the failed attempt are avoided, and how.
    pub(crate) fn avoids<T>(&self, prefill: Option<T>, decode: T) -> impl Iterator<Item = (T, Avoid)> {
        let workers = [(prefill, self.prefill), (Some(decode), self.decode)];
        workers.into_iter().filter_map(|(worker, how)| worker.zip(how))
    }
}

/// Why there is no other attempt; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GiveUp {
    /// It would fail in the same way.
    Futile,
    /// The request had all its attempts.
    Attempts,
    /// The router had too many retries of late.
    Budget,
    /// No worker came in time.
    NoWorker,
    /// The wait would outlast the deadline.
    Deadline,
}

impl GiveUp {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Futile => "futile",
            Self::Attempts => "attempts",
            Self::Budget => "budget",
            Self::NoWorker => "no_worker",
            Self::Deadline => "deadline",
        }
    }
}

/// Bounds of one request's retries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RetryLimits {
    /// Most attempts, the first one included.
    pub attempts_max: u32,
    /// Wait before the first retry; doubles with each.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// A started answer waits at most so long for a worker to go on with.
    pub place_max: Duration,
    /// Another waits at most so long for one to be ready.
    pub ready_max: Duration,
    /// KV that was handed over is adopted at most so long after.
    pub adopted_max: Duration,
}

/// A request that breaks two workers is more likely at fault than both of them.
const BROKEN_WORKERS_MAX: u32 = 2;

/// The retries of one request so far.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Recovery {
    limits: RetryLimits,
    failed: u32,
    broken: u32,
    /// Failed placements in a row, and since when.
    unplaced: Option<(Instant, u32)>,
}

impl Recovery {
    /// Nothing failed yet.
    pub(crate) fn new(limits: RetryLimits) -> Self {
        Self { limits, failed: 0, broken: 0, unplaced: None }
    }

    /// What follows `failure`. `bucket` pays for calls of workers; `jitter` is drawn from 0 to 1.
    pub(crate) fn after(
        &mut self,
        failure: &Failure,
        now: Instant,
        deadline: Instant,
        bucket: &RetryBucket,
        jitter: f64,
    ) -> Result<Retry, GiveUp> {
        let is_broken = failure.kind == ErrorKind::Internal && failure.step != Step::Handoff;
        self.broken += u32::from(is_broken);
        if is_futile(failure) || self.broken >= BROKEN_WORKERS_MAX {
            return Err(GiveUp::Futile);
        }
        let exponent = if failure.step == Step::Place {
            let (since, n) = self.unplaced.map_or((now, 0), |(since, n)| (since, n + 1));
            self.unplaced = Some((since, n));
            let max = if failure.started { self.limits.place_max } else { self.limits.ready_max };
            if now.saturating_duration_since(since) >= max {
                return Err(GiveUp::NoWorker);
            }
            n
        } else if failure.drained {
            self.unplaced = None;
            0
        } else {
            self.unplaced = None;
            self.failed += 1;
            if self.failed >= self.limits.attempts_max {
                return Err(GiveUp::Attempts);
            }
            self.failed - 1
        };
        let after = self.wait(failure, exponent, jitter);
        if now + after >= deadline {
            return Err(GiveUp::Deadline);
        }
        if failure.step != Step::Place && !failure.drained && !bucket.take(now) {
            return Err(GiveUp::Budget);
        }
        let (prefill, decode) = avoided(failure);
        let probation = matches!(failure.step, Step::Claim | Step::Prefill | Step::Decode)
            && failure.kind != ErrorKind::Overloaded
            && !failure.drained;
        Ok(Retry { after, prefill, decode, probation, started: failure.started })
    }

    /// Doubling, with jitter down to half. A worker that is full says when to come again, which matters where there may be no other.
    fn wait(&self, failure: &Failure, exponent: u32, jitter: f64) -> Duration {
        let doubled = self.limits.backoff_min.saturating_mul(2u32.saturating_pow(exponent));
        let backoff = doubled.min(self.limits.backoff_max).mul_f64(0.5 + jitter.clamp(0.0, 1.0) / 2.0);
        match failure.retry_after {
            Some(hint) if failure.step == Step::Place => backoff.max(hint.min(self.limits.backoff_max)),
            _ => backoff,
        }
    }
}

/// Whether another attempt would fail in the same way.
fn is_futile(failure: &Failure) -> bool {
    match failure.kind {
        ErrorKind::ModelNotFound | ErrorKind::Unsupported => true,
        // What has begun did fit: a worker as large may come back.
        ErrorKind::ContextLengthExceeded | ErrorKind::InvalidRequest => failure.step != Step::Place || !failure.started,
        // A handoff has deadlines of its own.
        ErrorKind::DeadlineExceeded => failure.step != Step::Handoff,
        // Who has seen nothing is told at once that all are full, and goes elsewhere.
        ErrorKind::Overloaded => failure.step == Step::Place && !failure.started,
        _ => false,
    }
}

/// Whom to avoid: prefill and decode worker.
fn avoided(failure: &Failure) -> (Option<Avoid>, Option<Avoid>) {
    let how = if failure.kind == ErrorKind::Overloaded { Avoid::Strictly } else { Avoid::Softly };
    match failure.step {
        Step::Place => (None, None),
        Step::Claim | Step::Decode => (None, Some(how)),
        Step::Prefill => (Some(how), None),
        // Either may be the cause: the decode worker is the first to be tried again, without this prefill worker.
        Step::Handoff => (Some(how), Some(Avoid::Softly)),
    }
}
