//! The requests of a load: a trace fitted to a cluster, or synthetic requests, with their prompts.

mod fit;
mod prompts;
mod synthetic;

use super::trace::{InfiniteCache, Trace};
pub(super) use fit::{Fit, TooLong};
pub(super) use prompts::{Prompts, TokenRange};
use std::time::Duration;
pub(super) use synthetic::Synthetic;

/// Requests to be sent.
pub(super) struct Load {
    /// In order of arrival; times are those of the load, with the speed applied.
    pub(super) trace: Trace,
    /// The hits of an infinite cache.
    pub(super) infinite: InfiniteCache,
    pub(super) pace: Pace,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Pace {
    /// At their arrival, whether or not others are answered. Requests beyond `in_flight_max` are shed.
    Open { in_flight_max: usize },
    /// As soon as fewer than `concurrency` are in flight.
    Closed { concurrency: usize },
}

impl Load {
    pub(super) fn new(trace: Trace, pace: Pace) -> Self {
        let infinite = trace.infinite_cache();
        Self { trace, infinite, pace }
    }

    /// Time from the first arrival to the last, if arrivals are given.
    pub(super) fn span(&self) -> Option<Duration> {
        matches!(self.pace, Pace::Open { .. }).then(|| self.trace.span())
    }
}
