//! What is known of one request while it is simulated, and what became of it.

use super::clock::Time;
use crate::bench::report::{Ending, Outcome};
use crate::bench::trace::TraceRequest;
use baton_kv_cache::Lease;
use baton_router::pure::Decision;
use baton_types::ErrorKind;
use std::time::Duration;

/// A request. Leases are held by the worker that they are of.
#[derive(Default)]
pub(super) struct Request {
    pub(super) decision: Option<Decision>,
    pub(super) refused: Option<ErrorKind>,
    pub(super) prefill_lease: Option<Lease>,
    pub(super) decode_lease: Option<Lease>,
    /// What the prefill worker reads of the decode worker's cache.
    pub(super) pin: Option<Lease>,
    /// Tokens that the worker which computed the prompt had.
    pub(super) cached_tokens: u64,
    /// Tokens that the prefill worker read from the decode worker.
    pub(super) got_tokens: u64,
    /// Tokens that did not have to be sent.
    pub(super) decode_cached_tokens: u64,
    pub(super) computes_from: Time,
    pub(super) prefilled_at: Option<Time>,
    pub(super) reserved_at: Option<Time>,
    pub(super) first_token: Option<Time>,
    pub(super) gaps_us: Vec<u32>,
    pub(super) end: Option<Time>,
}

impl Request {
    /// As its client saw it.
    pub(super) fn outcome(self, of: &TraceRequest, infinite_tokens: u32) -> Outcome {
        let since_start = |time: Time| Duration::from_nanos(time);
        let result = match (self.refused, self.end) {
            (Some(kind), _) => Ending::Failed(kind.name().to_owned()),
            (None, Some(_)) => Ending::Ok,
            (None, None) => Ending::Cancelled,
        };
        let cached_tokens = u32::try_from(self.cached_tokens + self.got_tokens).unwrap_or(u32::MAX);
        Outcome {
            at: of.at,
            ttft: self.first_token.map(|at| since_start(at).saturating_sub(of.at)),
            output_tokens: self.gaps_us.len() as u32 + u32::from(self.first_token.is_some()),
            gaps_us: self.gaps_us,
            end: self.end.map_or(of.at, since_start),
            prompt_tokens: of.prompt_tokens,
            cached_tokens,
            infinite_tokens,
            placement: self.decision.map(|decision| decision.reason.name().to_owned()),
            result,
        }
    }
}
