//! Where a request runs: a pure function of a view of the workers. No clock, no I/O, random numbers from the caller.
//!
//! Cost is time: predicted first token = (queued tokens + own tokens) / measured prefill rate; predicted end = first token + wait for a
//! place in the batch + expected tokens / measured decode rate; both times how much longer answers with as much ahead of them took than
//! predicted so far, and by a third longer where anything is ahead. The decode worker is chosen by room, then by how full its batch is; the prefill worker by predicted first token. Only workers whose
//! fingerprints match are paired.

mod choose;
mod experience;
mod skew;
mod slowness;
mod view;

#[cfg(test)]
mod tests;

pub use choose::place;
pub(crate) use choose::{has_room, retry_after};
pub(crate) use experience::{Ended, Experience};
pub(crate) use skew::{Kind, unpaired, why_unpaired};
pub use slowness::Slowness;
pub(crate) use view::tokens_max;
pub use view::{Measured, Worker};

use crate::request::PrefillPolicy;
use baton_types::{ErrorKind, Role};
use std::time::Duration;

/// What placement needs to know of a request.
#[derive(Clone, Copy, Debug)]
pub struct Demand {
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
}

impl Demand {
    /// Tokens of the prompt and its first token, which must not be the last for want of room.
    fn prefill_tokens(&self) -> u64 {
        self.total_tokens.min(self.prompt_tokens + 2)
    }
}

/// When an answer comes, from the rates at the time of asking.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Prediction {
    /// Until the first token.
    pub first_token: Duration,
    /// From each token to the next, the wait for a place in the batch spread over all.
    pub token: Duration,
    /// Sequences that were there before it.
    pub ahead: u32,
}

impl Prediction {
    /// Until an answer of so many tokens has ended.
    pub fn end(&self, tokens: u32) -> Duration {
        self.first_token.saturating_add(self.token.saturating_mul(tokens.saturating_sub(1)))
    }
}

/// Thresholds.
#[derive(Clone, Copy, Debug)]
pub struct Thresholds {
    /// `auto` prefills prompts of at most this many tokens where they decode.
    pub local_prefill_tokens_max: u64,
    /// Prefill rate assumed of a worker that has measured none, in tokens per second.
    pub prefill_tokens_per_s_default: f64,
}

/// Why a request runs where it does; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Reason {
    /// The policy says remote.
    RemotePolicy,
    /// Too long to be prefilled beside a running batch.
    RemoteLongPrompt,
    /// The policy says local.
    LocalPolicy,
    /// At most `local_prefill_tokens_max` tokens.
    LocalShortPrompt,
    /// No prefill worker alive that fits this decode worker.
    LocalNoPrefillWorker,
    /// All prefill workers are full.
    LocalPrefillFull,
}

impl Reason {
    /// Name in spans and metrics.
    pub const fn name(self) -> &'static str {
        match self {
            Self::RemotePolicy => "remote_policy",
            Self::RemoteLongPrompt => "remote_long_prompt",
            Self::LocalPolicy => "local_policy",
            Self::LocalShortPrompt => "local_short_prompt",
            Self::LocalNoPrefillWorker => "local_no_prefill_worker",
            Self::LocalPrefillFull => "local_prefill_full",
        }
    }
}

/// Where a request runs. Indices into the view that was given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Decision {
    /// The decode worker.
    pub decode: usize,
    /// The prefill worker; `None` prefills on the decode worker.
    pub prefill: Option<usize>,
    /// Why.
    pub reason: Reason,
    /// `None` while nothing is measured.
    pub predicted: Option<Prediction>,
}

/// Why a request runs nowhere.
#[derive(Clone, Debug, PartialEq)]
pub enum Refusal {
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
    pub fn missing(&self) -> Option<Role> {
        match self {
            Self::NoDecodeWorker | Self::NeverFits { .. } => Some(Role::Decode),
            Self::NoPrefillWorker | Self::NeverPrefilled { .. } => Some(Role::Prefill),
            Self::Full { .. } | Self::TooLate { .. } => None,
        }
    }

    /// What the client is told.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Self::NoDecodeWorker | Self::NoPrefillWorker => ErrorKind::Unavailable,
            Self::NeverFits { .. } => ErrorKind::ContextLengthExceeded,
            // Another policy may serve it.
            Self::NeverPrefilled { .. } => ErrorKind::InvalidRequest,
            Self::Full { .. } | Self::TooLate { .. } => ErrorKind::Overloaded,
        }
    }
}
