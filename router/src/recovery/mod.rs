//! What to do about a failed attempt: a pure decision. No clock, no I/O, random numbers from the caller.
//!
//! An answer can continue on another worker at any point: the prompt and the tokens sent so far are prefilled there,
//! and generation resumes exactly. This module decides whether that may help, which workers to avoid, and how long to
//! wait. The flow executes the decision.

mod avoided;
mod bucket;
mod pair;
mod probation;
#[cfg(test)]
mod tests;

pub(crate) use avoided::{Avoided, CandidateSet};
pub(crate) use bucket::RetryBucket;
pub(crate) use pair::{FromDecode, FromPrefill, Next, Pair, PrefillFault};
pub(crate) use probation::{Probation, ProbationLimits};

use baton_types::{ErrorKind, Role};
use std::time::{Duration, Instant};

/// The steps of an attempt, to say where it failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Step {
    /// No worker could be chosen.
    Place,
    /// The decode worker refused the claim, or has no room for what it claimed.
    Claim,
    /// The prefill worker's stream, before the KV was adopted.
    Prefill,
    /// The decode worker reports that the KV did not arrive.
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

    /// Roles of the workers that may have failed at this step.
    pub(crate) const fn roles(self) -> &'static [Role] {
        match self {
            Self::Place => &[],
            Self::Claim | Self::Decode => &[Role::Decode],
            Self::Prefill => &[Role::Prefill],
            Self::Handoff => &[Role::Prefill, Role::Decode],
        }
    }
}

/// A failed step of an attempt, and its error.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Failure {
    pub step: Step,
    /// The kind of error. Never one that the client caused: that ends a request at once.
    pub kind: ErrorKind,
    /// Earliest sensible retry, as stated by the worker.
    pub retry_after: Option<Duration>,
    /// Whether tokens were sent to the client. Such an answer is continued wherever there may be room; any other is
    /// refused early with a retry time.
    pub started: bool,
    /// Whether the failed worker had announced that it drains. Then it accepts nothing more, so this happens once per
    /// worker, and it is not a fault.
    pub drained: bool,
}

/// How long a worker is avoided in the next attempts of this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Avoid {
    /// While another worker is available.
    Softly,
    /// Always, until the answer has begun.
    Strictly,
}

/// How the next attempt differs from the failed one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Retry {
    /// Time to wait before the attempt.
    pub after: Duration,
    /// Whether the prefill worker of the failed attempt is avoided.
    pub prefill: Option<Avoid>,
    /// Whether its decode worker is.
    pub decode: Option<Avoid>,
    /// Whether other requests also avoid the failed worker for a while.
    pub probation: bool,
    /// Whether tokens were sent to the client.
    pub started: bool,
}

impl Retry {
    /// Which workers of the failed attempt are avoided, and how.
    pub(crate) fn avoids<T>(&self, prefill: Option<T>, decode: T) -> impl Iterator<Item = (T, Avoid)> {
        let workers = [(prefill, self.prefill), (Some(decode), self.decode)];
        workers.into_iter().filter_map(|(worker, how)| worker.zip(how))
    }
}

/// Why the request is not retried; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum GiveUp {
    /// A retry would fail in the same way.
    Futile,
    /// The request has used all its attempts.
    Attempts,
    /// The router's retry budget is used up.
    Budget,
    /// No worker became available in time.
    NoWorker,
    /// The wait would exceed the deadline.
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

/// Limits of one request's retries.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct RetryLimits {
    /// Most attempts, the first one included.
    pub attempts_max: u32,
    /// Wait before the first retry; doubles with each.
    pub backoff_min: Duration,
    pub backoff_max: Duration,
    /// Longest wait of an answer that has begun for a worker that can continue it.
    pub place_max: Duration,
    /// Longest wait of any other request for a ready worker.
    pub ready_max: Duration,
    /// Longest time from handing KV over to its adoption.
    pub adopted_max: Duration,
}

/// A request after which two workers broke is more likely the cause than both workers.
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
    /// Without a failure so far.
    pub(crate) fn new(limits: RetryLimits) -> Self {
        Self { limits, failed: 0, broken: 0, unplaced: None }
    }

    /// The reaction to `failure`. `bucket` is charged for retries that call workers; `jitter` is drawn from 0 to 1.
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
        // A full worker costs a client that was sent nothing little. Otherwise one tenant's requests to full workers could
        // leave no retry for others' answers when a worker is lost.
        let lost = failure.started || failure.kind != ErrorKind::Overloaded;
        if failure.step != Step::Place && !failure.drained && !bucket.take(lost, now) {
            return Err(GiveUp::Budget);
        }
        let (prefill, decode) = avoided(failure);
        let probation = matches!(failure.step, Step::Claim | Step::Prefill | Step::Decode)
            && failure.kind != ErrorKind::Overloaded
            && !failure.drained;
        Ok(Retry { after, prefill, decode, probation, started: failure.started })
    }

    /// Doubles, with jitter down to half. A full worker states a retry time, which matters if there is no other worker.
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
        // An answer that has begun did fit: a worker of that size may return.
        ErrorKind::ContextLengthExceeded | ErrorKind::InvalidRequest => failure.step != Step::Place || !failure.started,
        // A handoff has separate deadlines.
        ErrorKind::DeadlineExceeded => failure.step != Step::Handoff,
        // A client that was sent nothing gets the refusal at once when all workers are full, and can go elsewhere.
        ErrorKind::Overloaded => failure.step == Step::Place && !failure.started,
        _ => false,
    }
}

/// How to avoid the prefill worker and the decode worker.
fn avoided(failure: &Failure) -> (Option<Avoid>, Option<Avoid>) {
    let how = if failure.kind == ErrorKind::Overloaded { Avoid::Strictly } else { Avoid::Softly };
    match failure.step {
        Step::Place => (None, None),
        Step::Claim | Step::Decode => (None, Some(how)),
        Step::Prefill => (Some(how), None),
        // Either may be the cause: the decode worker is tried again first, without this prefill worker.
        Step::Handoff => (Some(how), Some(Avoid::Softly)),
    }
}
