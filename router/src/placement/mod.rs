//! Where a request runs: a pure function of a view of the workers. No clock, no I/O, random numbers from the caller.
//!
//! Cost is time, computed from measured rates. The first token costs the queue, the uncached part of the prompt (each
//! token weighted by its context), and the transfer time that compute does not hide. Later tokens cost the decode
//! worker's step time and how full its batch is. A cached prefix counts on the worker that has it. On a prefill worker
//! it is not computed again. On the decode worker it need not be transferred: the prefill worker can read it from there
//! (a *get*), or the decode worker continues from it. So a popular prefix is copied to other workers once queueing for
//! it costs more than computing it again.
//!
//! Without cached tokens the cost is: predicted first token = (queued tokens + own tokens) / measured prefill rate;
//! predicted end = first token + wait for a place in the batch + expected tokens / measured decode rate. Both are
//! multiplied by the factor by which past answers with as many sequences ahead took longer than predicted, and by 4/3
//! if any sequence is ahead. Only workers whose fingerprints match are paired.
//!
//! Workers serve tenants in turns, by weight. So a tenant waits for its own requests there at its share of the worker,
//! whatever others have queued. Below its share of all requests, it also finds room in queues that others fill.

mod by_cost;
mod choose;
mod cost;
mod decision;
mod experience;
mod longest;
mod pairs;
mod pending;
mod policy;
mod skew;
mod slowness;
mod view;
mod without_cache;

#[cfg(test)]
mod tests;

pub(crate) use choose::{alone, has_room, place, retry_after};
pub(crate) use decision::{Decision, Numbers, Reason};
pub(crate) use experience::{Ended, Experience};
pub(crate) use pending::PendingPrefixes;
pub use policy::PlacementPolicy;
pub(crate) use skew::{Kind, pair_alike, unpaired, why_unpaired};
pub(crate) use slowness::Slowness;
pub(crate) use view::{Measured, Own, Worker, WorkerRates, tokens_max};

use crate::request::PrefillPolicy;
use baton_types::{ErrorKind, Role};
use std::time::Duration;

/// A tenant's standing among those with requests in this router.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Standing {
    /// The part of its weight in the weights of all, over 0 to 1.
    pub share: f64,
    /// Whether others are there, and it has at most this share of all requests.
    pub is_below: bool,
}

impl Standing {
    /// No other tenant is there.
    pub(crate) const ALONE: Self = Self { share: 1.0, is_below: false };
}

/// The properties of a request that placement uses.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Tokens of the prompt, and of the answer so far.
    pub prompt_tokens: u64,
    /// Prompt and the longest possible answer.
    pub total_tokens: u64,
    /// Expected tokens of the answer.
    pub answer_tokens: u64,
    /// Where it may be prefilled.
    pub policy: PrefillPolicy,
    /// Time left until the deadline.
    pub time_left: Duration,
    /// The factor by which answers take longer than the measured rates predict.
    pub slowness: Slowness,
    /// The time that the longest recent requests would take alone. Behind other requests, a request is accepted only if
    /// one of this length would still meet the deadline. Otherwise short requests would fill each gap before a long one
    /// fits.
    pub longest: Duration,
    /// The standing of its tenant.
    pub standing: Standing,
    /// Number of the request, for the round-robin policy.
    pub turn: u64,
}

impl Demand {
    /// Tokens of the prompt and its first token; the answer must not end there for lack of room.
    fn prefill_tokens(&self) -> u64 {
        self.total_tokens.min(self.prompt_tokens + 2)
    }
}

/// When an answer is expected, from the rates at the time of the decision.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prediction {
    /// Time to the first token.
    pub first_token: Duration,
    /// Time from each token to the next, with the wait for a place in the batch spread over all.
    pub token: Duration,
    /// Sequences that are ahead of it.
    pub ahead: u32,
}

impl Prediction {
    /// Time until an answer of `tokens` tokens has ended.
    pub(crate) fn end(&self, tokens: u32) -> Duration {
        self.first_token.saturating_add(self.token.saturating_mul(tokens.saturating_sub(1)))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Thresholds {
    /// `auto` prefills prompts of at most this many tokens on the decode worker.
    pub local_prefill_tokens_max: u64,
    /// Prefill rate assumed for a worker that has measured none, in tokens per second.
    pub prefill_tokens_per_s_default: f64,
    /// How workers are chosen.
    pub policy: PlacementPolicy,
    /// The position at which a prompt token takes twice as long to prefill as the first one, in tokens; 0: all take the
    /// same time.
    pub prefill_doubles_at_tokens: f64,
    /// Rate at which KV moves between two workers, in bytes per second; 0 counts transfers as instant.
    pub transfer_bytes_per_s: f64,
    /// Whether prefill workers can read cached blocks from decode workers.
    pub gets: bool,
}

/// Why a request cannot be placed.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refusal {
    /// No decode worker of this model is alive.
    NoDecodeWorker,
    /// The policy requires a prefill worker, and there is none.
    NoPrefillWorker,
    /// Too large for every worker, even an idle one.
    NeverFits {
        /// Longest sequence that any worker accepts, in tokens.
        tokens_max: u64,
    },
    /// The policy requires a prefill worker, and the prompt is too long for every one, even an idle one.
    NeverPrefilled {
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Longest prompt that any prefill worker accepts, in tokens.
        prompt_tokens_max: u64,
    },
    /// All workers are busy, and their queues are full.
    Full {
        /// Earliest time at which a retry makes sense.
        retry_after: Duration,
    },
    /// Even idle workers would not finish the answer before the deadline.
    Impossible {
        /// Time to the first token on an idle worker.
        first_token: Duration,
        /// Time to the last token.
        end: Duration,
    },
    /// The answer would be finished after the deadline.
    TooLate {
        /// Predicted time to the first token.
        first_token: Duration,
        /// Predicted time to the last one.
        end: Duration,
    },
}

impl Refusal {
    /// The role in which no worker could serve the request, even if idle; `None` if such workers exist.
    pub(crate) fn missing(&self) -> Option<Role> {
        match self {
            Self::NoDecodeWorker | Self::NeverFits { .. } => Some(Role::Decode),
            Self::NoPrefillWorker | Self::NeverPrefilled { .. } => Some(Role::Prefill),
            Self::Full { .. } | Self::TooLate { .. } | Self::Impossible { .. } => None,
        }
    }

    /// The error for the client.
    pub(crate) fn kind(&self) -> ErrorKind {
        match self {
            Self::NoDecodeWorker | Self::NoPrefillWorker => ErrorKind::Unavailable,
            Self::NeverFits { .. } => ErrorKind::ContextLengthExceeded,
            // Another policy may allow it.
            Self::NeverPrefilled { .. } => ErrorKind::InvalidRequest,
            Self::Impossible { .. } => ErrorKind::DeadlineExceeded,
            Self::Full { .. } | Self::TooLate { .. } => ErrorKind::Overloaded,
        }
    }
}
