//! What a request yields, whatever the front: deltas, then one end.

use baton_types::{FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};

/// Some tokens and the text that they complete. Text lags tokens while a character or a stop string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Delta {
    /// Text to show.
    pub(crate) text: String,
    /// Tokens generated.
    pub(crate) token_ids: Vec<TokenId>,
    /// One for each token, where asked for.
    pub(crate) logprobs: Vec<TokenLogprobs>,
}

/// How a request ended well.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Finished {
    /// Why.
    pub(crate) reason: FinishReason,
    /// Tokens counted.
    pub(crate) usage: Usage,
    /// Where the time went.
    pub(crate) timings: PhaseTimings,
    /// Numerics classes that generated the answer, in order, where it is more than one.
    pub(crate) crossed_classes: Vec<String>,
}

/// One event; [`Event::Finished`] or an error is the last.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Event {
    /// More of the answer.
    Delta(Delta),
    /// The end.
    Finished(Finished),
}

/// What a front receives.
pub(crate) type EventResult = Result<Event, RequestError>;
