//! What is sent: a trace cut and scaled to what a cluster can take, or a made-up one, and the prompts of either.

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
    /// In order of arrival; times are those of the load, speed applied.
    pub(super) trace: Trace,
    /// What an infinite cache would hit of it.
    pub(super) infinite: InfiniteCache,
    pub(super) pace: Pace,
}

/// When requests are sent.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Pace {
    /// At their arrival, whether or not others are answered. What would be more than `in_flight_max` at once is shed.
    Open { in_flight_max: usize },
    /// As soon as fewer than `concurrency` are under way.
    Closed { concurrency: usize },
}

impl Load {
    pub(super) fn new(trace: Trace, pace: Pace) -> Self {
        let infinite = trace.infinite_cache();
        Self { trace, infinite, pace }
    }

    /// Time from the first arrival to the last, where arrivals are given.
    pub(super) fn span(&self) -> Option<Duration> {
        matches!(self.pace, Pace::Open { .. }).then(|| self.trace.span())
    }
}
