//! The outcome of one request.

use super::Slo;
use std::time::Duration;

/// One request from its arrival to its end, as its client sees it.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Outcome {
    /// Arrival, relative to the start of the load.
    pub(crate) at: Duration,
    /// From arrival to the first token, if there was one.
    pub(crate) ttft: Option<Duration>,
    /// Microseconds between each token and the one before it; 0 between tokens that arrive together.
    pub(crate) gaps_us: Vec<u32>,
    /// The end, relative to the start of the load.
    pub(crate) end: Duration,
    /// Length of the prompt that was sent.
    pub(crate) prompt_tokens: u32,
    /// From the usage of the answer; 0 if there was none.
    pub(crate) cached_tokens: u32,
    /// The hits of an infinite cache.
    pub(crate) infinite_tokens: u32,
    pub(crate) output_tokens: u32,
    /// Placement or its reason, if known.
    pub(crate) placement: Option<String>,
    pub(crate) result: Ending,
}

/// How a request ended.
#[derive(Clone, Debug, Eq, PartialEq)]
pub(crate) enum Ending {
    /// The answer arrived completely.
    Ok,
    /// The kind of the error, as in the error table.
    Failed(String),
    /// Cut off by the end of the load.
    Cancelled,
    /// Not sent when due, because the maximum number of requests was in flight.
    Shed,
}

impl Outcome {
    /// A request that was never sent.
    pub(crate) fn shed(at: Duration, prompt_tokens: u32, infinite_tokens: u32) -> Self {
        Self {
            at,
            ttft: None,
            gaps_us: Vec::new(),
            end: at,
            prompt_tokens,
            cached_tokens: 0,
            infinite_tokens,
            output_tokens: 0,
            placement: None,
            result: Ending::Shed,
        }
    }

    /// Gaps between successive tokens, in milliseconds.
    pub(super) fn gaps_ms(&self) -> impl Iterator<Item = f64> {
        self.gaps_us.iter().map(|&us| f64::from(us) / 1e3)
    }

    /// Whether it completed within the SLO.
    pub(super) fn meets(&self, slo: Slo) -> bool {
        let within = |time: Option<f64>, max: Option<f64>| max.is_none_or(|max| time.is_some_and(|time| time <= max));
        let ttft = self.ttft.map(|ttft| ttft.as_secs_f64() * 1e3);
        // An answer of one token has no gaps.
        let itl = self.gaps_ms().sum::<f64>() / (self.gaps_us.len().max(1) as f64);
        self.result == Ending::Ok && within(ttft, slo.ttft_ms) && within(Some(itl), slo.itl_ms)
    }
}
