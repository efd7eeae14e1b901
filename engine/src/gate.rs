//! Hooks with which tests hold sequences in a phase and inspect what was computed for them. Not used in production.

use baton_types::{BlockTables, RequestId};

/// Phase of a sequence, for a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SequencePhase {
    /// Waiting, for the first time or after a preemption.
    Queue,
    /// Between two chunks of its prefill (before the first one it already holds its blocks).
    Prefill,
    /// Between two steps of its decode.
    Decode,
}

/// Decides whether a sequence may proceed. Called before every step for every sequence, on the engine thread; must return at once. A held
/// sequence keeps its resources, does not block others, and still ends by cancellation or deadline. While a sequence is held the engine
/// checks again every few milliseconds.
pub trait SequenceGate: Send + Sync {
    /// Whether `id` may proceed in `phase`.
    fn is_open(&self, id: &RequestId, phase: SequencePhase) -> bool;
}

impl<F: Fn(&RequestId, SequencePhase) -> bool + Send + Sync> SequenceGate for F {
    fn is_open(&self, id: &RequestId, phase: SequencePhase) -> bool {
        self(id, phase)
    }
}

/// Observes the logits that determine each token, so that tests compare bits and not only tokens. Called on the engine thread.
pub trait LogitObserver: Send + Sync {
    /// `logits` (`[vocab]`, before penalties and temperature) will determine the token at `position` of `id`; `blocks` hold the KV of the
    /// positions before it, of a window that of the last ones.
    fn computed(&self, id: &RequestId, position: usize, blocks: &BlockTables, logits: &[f32]);
}
