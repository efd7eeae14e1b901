//! Why an engine cannot start.

use crate::model::ModelError;
use baton_kv_cache::PoolError;
use baton_types::LayoutError;

/// Failures to configure and start an engine. None is retryable: each needs another configuration or another machine.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Debug, thiserror::Error)]
pub enum EngineError {
    /// A setting is out of range.
    #[error("{name} must be {expected}, got {got}")]
    Config {
        /// Name of the setting, as in the configuration.
        name: &'static str,
        /// Values that are accepted, in words.
        expected: String,
        got: String,
    },
    /// The KV memory is too small for a pool that can run a sequence.
    #[error(
        "kv_cache_bytes = {got} holds {blocks} blocks of {block_bytes} bytes; at least {blocks_min} are needed, that is {needed} bytes"
    )]
    PoolTooSmall {
        got: u64,
        /// Number of blocks that fit.
        blocks: u64,
        /// Size of one block.
        block_bytes: u64,
        /// Fewest blocks that a pool can have.
        blocks_min: u64,
        /// Bytes of the fewest blocks.
        needed: u64,
    },
    /// The model cannot be loaded or bound.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The draft model has other tokens.
    #[error(
        "the draft model has a vocabulary of {draft} tokens and the model one of {model}: they must be the same tokens"
    )]
    DraftVocab { draft: usize, model: usize },
    /// A draft model goes back by a few tokens at nearly each step.
    #[error(
        "the draft model keeps a state for each sequence, which proposals cannot be taken back from: use another one"
    )]
    StatesDrafted,
    /// The KV layout is invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The pool is invalid.
    #[error(transparent)]
    Pool(#[from] PoolError),
    /// The operating system could not create a thread.
    #[error("cannot start the engine thread")]
    Thread(#[source] std::io::Error),
}
