//! Why no size can be computed.

use baton_types::LayoutError;
use baton_worker::models::ModelsError;
use std::path::PathBuf;

/// An error in the model or the arguments; each message states the remedy.
#[derive(Debug, thiserror::Error)]
pub(crate) enum KvSizeError {
    /// Neither a file or folder nor a known name.
    #[error(
        "{model:?} is not a file, a folder or a known model; give a folder with a config.json, a .gguf file, or one of: {names}"
    )]
    Unknown { model: String, names: String },
    /// The model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelsError),
    /// `config.json` cannot be read or parsed.
    #[error("{path}: {problem}")]
    Config { path: PathBuf, problem: String },
    /// A block size or dimension that no pool has.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// Weights and reserve leave no memory.
    #[error(
        "weights of {weights} and a reserve of {reserve} leave nothing of {gpu} for KV; where several GPUs share one copy of the weights, \
         give their memory together as --gpu-memory"
    )]
    NoRoom { weights: String, reserve: String, gpu: String },
    /// The number of parameters is unknown.
    #[error("the size of {model}'s weights is unknown; give --weights, or give --memory, the memory for KV")]
    Weights { model: String },
    /// An unknown element type.
    #[error("KV can be stored as {known}, not as {got:?}")]
    Dtype { got: String, known: String },
}
