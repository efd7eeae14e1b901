//! Where a request runs: a pure function of a view of the workers. No clock, no I/O, random numbers from the caller.
//!
//! Cost is time, from measured rates: first token = queue + what is left to prefill, each token by its context + what of the
//! transfer nothing hides; later tokens = the decode worker's steps and how full it is. A prefix counts where it is: on a prefill
//! worker it is not computed again; on the decode worker it need not cross the wire, and can be read from there by the prefill
//! worker (a *get*) or gone on with in place. So a prefix that many ask for is copied to other workers once the queue where it is
//! costs more than computing it again.
//!
//! What nobody has cached costs what it always cost: predicted first token = (queued tokens + own tokens) / measured prefill rate;
//! predicted end = first token + wait for a place in the batch + expected tokens / measured decode rate; both times how much longer
//! answers with as much ahead of them took than predicted so far, and by a third longer where anything is ahead. Only workers whose
//! fingerprints match are paired.

mod blind;
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

#[cfg(test)]
mod tests;

pub(crate) use choose::{alone, has_room, place, retry_after};
pub(crate) use decision::{Decision, Numbers, Reason};
pub(crate) use experience::{Ended, Experience};
pub(crate) use pending::PendingPrefixes;
pub use policy::PlacementPolicy;
pub(crate) use skew::{Kind, pair_alike, unpaired, why_unpaired};
pub(crate) use slowness::Slowness;
pub(crate) use view::{Measured, Worker, tokens_max};

use crate::request::PrefillPolicy;
use baton_types::{ErrorKind, Role};
use std::time::Duration;

/// What placement needs to know of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Demand {
    /// Tokens of the prompt (and of what was generated so far).
    pub prompt_tokens: u64,
    /// Prompt and the longest possible answer.
    pub total_tokens: u64,
    /// Tokens that the answer is expected to have.
    pub answer_tokens: u64,
    /// Where it may be prefilled.
    pub policy: PrefillPolicy,
    /// Time left until the deadline.
    pub time_left: Duration,
    /// By what factor answers take longer than predicted from rates alone.
    pub slowness: Slowness,
    /// How long the longest requests of late would take alone: where others are ahead, no request is taken that would be late if it were as
    /// long. Else short ones would fill each gap before it is one for a long one.
    pub longest: Duration,
    /// Number of the request, for the policy that takes workers in turns.
    pub turn: u64,
}

impl Demand {
    /// Tokens of the prompt and its first token, which must not be the last for want of room.
    fn prefill_tokens(&self) -> u64 {
        self.total_tokens.min(self.prompt_tokens + 2)
    }
}

/// When an answer comes, from the rates at the time of asking.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Prediction {
    /// Until the first token.
    pub first_token: Duration,
    /// From each token to the next, the wait for a place in the batch spread over all.
    pub token: Duration,
    /// Sequences that were there before it.
    pub ahead: u32,
}

impl Prediction {
    /// Until an answer of so many tokens has ended.
    pub(crate) fn end(&self, tokens: u32) -> Duration {
        self.first_token.saturating_add(self.token.saturating_mul(tokens.saturating_sub(1)))
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct Thresholds {
    /// `auto` prefills prompts of at most this many tokens where they decode.
    pub local_prefill_tokens_max: u64,
    /// Prefill rate assumed of a worker that has measured none, in tokens per second.
    pub prefill_tokens_per_s_default: f64,
    /// How workers are chosen.
    pub policy: PlacementPolicy,
    /// A token of a prompt with so many tokens before it takes twice as long as the first one; 0 counts all alike.
    pub prefill_doubles_at_tokens: f64,
    /// Rate at which KV moves between two workers, in bytes per second; 0 counts it as no time.
    pub transfer_bytes_per_s: f64,
    /// Whether prefill workers can read cached blocks from decode workers.
    pub gets: bool,
}

/// Why a request runs nowhere.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Refusal {
    /// No decode worker of this model is alive.
    NoDecodeWorker,
    /// The policy demands a prefill worker and there is none.
    NoPrefillWorker,
    /// Fits no worker, however empty.
    NeverFits {
        /// Tokens of the longest sequence that one takes.
        tokens_max: u64,
    },
    /// The policy demands a prefill worker, and the prompt fits none, however idle.
    NeverPrefilled {
        /// Tokens of the prompt.
        prompt_tokens: u64,
        /// Tokens of the longest prompt that one takes.
        prompt_tokens_max: u64,
    },
    /// Everything is full.
    Full {
        /// Earliest sensible retry.
        retry_after: Duration,
    },
    /// Not even workers that have nothing else to do would finish the answer before the deadline.
    Impossible {
        /// Time to the first token there.
        first_token: Duration,
        /// Time to the last one.
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
    /// The role of which no worker could serve the request, even if it were idle; `None` where there are such workers.
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
            // Another policy may serve it.
            Self::NeverPrefilled { .. } => ErrorKind::InvalidRequest,
            Self::Impossible { .. } => ErrorKind::DeadlineExceeded,
            Self::Full { .. } | Self::TooLate { .. } => ErrorKind::Overloaded,
        }
    }
}
