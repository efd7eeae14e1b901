//! Where a request runs, and why.

use super::Prediction;

/// Why a request runs where it does; also a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Reason {
    /// The policy is remote.
    RemotePolicy,
    /// Too long to be prefilled within a running batch, and no possible prefill worker has any of it cached.
    RemoteLongPrompt,
    /// At most `local_prefill_tokens_max` tokens, but all decode workers have answers running, which it would delay.
    RemoteShortPrompt,
    /// No prefill worker has more of it cached than this one.
    RemoteCached,
    /// Another prefill worker has more of it cached, but would begin so late that computing it here is cheaper.
    RemoteReplicated,
    /// The decode worker has more of it cached, and the prefill worker gets that from it.
    RemoteGet,
    /// The policy is local.
    LocalPolicy,
    /// At most `local_prefill_tokens_max` tokens, and a decode worker is idle or would still begin so much earlier that it is cheaper.
    LocalShortPrompt,
    /// The decode worker has all but at most `local_prefill_tokens_max` tokens cached.
    LocalShortRest,
    /// The decode worker has a part of it cached, and computing the longer rest within its batch is the cheapest
    /// choice.
    LocalCached,
    /// No live prefill worker is compatible with this decode worker.
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
            Self::RemoteShortPrompt => "remote_short_prompt",
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
    /// Tokens of the prompt that the prefill worker has cached; 0 without a prefill worker.
    pub prefill_cached_tokens: u64,
    /// Tokens of the prompt that the decode worker has cached.
    pub decode_cached_tokens: u64,
    /// Cost of the choice, in seconds.
    pub cost_s: f64,
    /// Cost of the second cheapest choice, in seconds; `None` if there was none or the policy ignores costs.
    pub runner_up_s: Option<f64>,
}

/// Where a request runs. Indices refer to the given view.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Decision {
    pub decode: usize,
    /// The prefill worker; `None`: the decode worker prefills.
    pub prefill: Option<usize>,
    /// Prompt token up to which the prefill worker gets blocks from the decode worker, starting after its own cached
    /// ones; 0: no get.
    pub get_to_tokens: u64,
    /// Tokens to compute, weighted by their compute time at their position in the prompt.
    pub work_tokens: u64,
    pub reason: Reason,
    pub numbers: Numbers,
    /// `None` while nothing is measured.
    pub predicted: Option<Prediction>,
}
