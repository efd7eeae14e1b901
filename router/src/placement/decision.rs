//! Where a request runs, and why.

use super::Prediction;

/// Why a request runs where it does; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// The policy says remote.
    RemotePolicy,
    /// Too long to be prefilled beside a running batch, and no prefill worker that it may go to has any of it cached.
    RemoteLongPrompt,
    /// No prefill worker has more of it cached than this one.
    RemoteCached,
    /// Another prefill worker has more of it cached, but would begin so late that computing it here is cheaper.
    RemoteReplicated,
    /// The decode worker has more of it cached, which the prefill worker reads from there.
    RemoteGet,
    /// The policy says local.
    LocalPolicy,
    /// At most `local_prefill_tokens_max` tokens.
    LocalShortPrompt,
    /// The decode worker has all but at most `local_prefill_tokens_max` tokens cached.
    LocalShortRest,
    /// The decode worker has a part of it cached, and computing the longer rest beside its batch is cheaper than anything else.
    LocalCached,
    /// No prefill worker alive that fits this decode worker.
    LocalNoPrefillWorker,
    /// All prefill workers are full.
    LocalPrefillFull,
}

impl Reason {
    /// Name in spans and metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::RemotePolicy => "remote_policy",
            Self::RemoteLongPrompt => "remote_long_prompt",
            Self::RemoteCached => "remote_cached",
            Self::RemoteReplicated => "remote_replicated",
            Self::RemoteGet => "remote_get",
            Self::LocalPolicy => "local_policy",
            Self::LocalShortPrompt => "local_short_prompt",
            Self::LocalShortRest => "local_short_rest",
            Self::LocalCached => "local_cached",
            Self::LocalNoPrefillWorker => "local_no_prefill_worker",
            Self::LocalPrefillFull => "local_prefill_full",
        }
    }
}

/// The numbers behind a decision.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Numbers {
    /// Tokens of the prompt that the prefill worker has cached; 0 where there is none.
    pub prefill_cached_tokens: u64,
    /// Tokens of the prompt that the decode worker has cached.
    pub decode_cached_tokens: u64,
    /// Cost of what was chosen, in seconds.
    pub cost_s: f64,
    /// Cost of the cheapest other choice, in seconds; `None` where there was none, or where the policy did not look at costs.
    pub runner_up_s: Option<f64>,
}

/// Where a request runs. Indices into the view that was given.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    pub decode: usize,
    /// The prefill worker; `None` prefills on the decode worker.
    pub prefill: Option<usize>,
    /// Tokens of the prompt up to which the prefill worker reads what the decode worker has cached, from where its own end; 0 reads
    /// nothing.
    pub get_to_tokens: u64,
    /// What is to be computed, in tokens, those far into the prompt counted by the time that they take.
    pub work_tokens: u64,
    pub reason: Reason,
    pub numbers: Numbers,
    /// `None` while nothing is measured.
    pub predicted: Option<Prediction>,
}
