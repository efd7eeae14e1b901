//! What a request yields, whatever the front: deltas, then one end.

use baton_types::{FinishReason, PhaseTimings, RequestError, TokenId, TokenLogprobs, Usage};

/// Some tokens and the text that they complete. Text lags tokens while a character or a stop string is incomplete.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Delta {
    /// Text to show.
    pub text: String,
    /// Tokens generated.
    pub token_ids: Vec<TokenId>,
    /// One for each token, where asked for.
    pub logprobs: Vec<TokenLogprobs>,
}

/// How a request ended well.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Tokens counted.
    pub usage: Usage,
    /// Where the time went.
    pub timings: PhaseTimings,
}

/// One event; [`Event::Finished`] or an error is the last.
#[derive(Clone, Debug, PartialEq)]
pub enum Event {
    /// More of the answer.
    Delta(Delta),
    /// The end.
    Finished(Finished),
}

/// What a front receives.
pub type EventResult = Result<Event, RequestError>;
