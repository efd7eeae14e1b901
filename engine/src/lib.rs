//! The engine: token ids in, token ids out.
//!
//! Place in the house: above `kernels` (what a device computes) and `kv-cache` (who owns which block); below the workers, which
//! join it to the network. One thread owns model, scheduler and running sequences; everybody else holds an [`EngineHandle`].
//!
//! ```text
//! EngineHandle ── submit, cancel ──> runner ── plan ──> scheduler (pure)
//!       ^                              │ step
//!       └── SequenceSink <── tokens ── sampler <── logits ── model ── ops ──> device
//! ```
//!
//! Exactness is the model's and the sampler's: a row's bits depend on its own past alone. The scheduler may therefore mix,
//! chunk, preempt and recompute as it likes, and no token changes.
//!
//! This crate must never know a network, a peer, text, or an environment variable. Blocks leave and enter as leases.

pub mod api;
pub mod config;
pub mod error;
pub mod gate;
mod handle;
mod health;
mod mailbox;
pub mod model;
pub mod rates;
mod runner;
pub mod sampler;
pub mod scheduler;
mod step_model;
pub mod weights;

pub use api::{
    Load, PinFor, PrefillObserver, PrefixUse, Reuse, Run, SequenceEvent, SequenceRequest, SequenceSink, SubmitError,
};
pub use config::{EngineConfig, PrefixCacheConfig};
pub use error::EngineError;
pub use gate::{LogitObserver, Phase, SequenceGate};
pub use handle::{Engine, EngineHandle, SequenceControl};
pub use health::Heartbeat;
pub use model::{Logits, Model, ModelConfig, ModelError, StepBatch};
pub use step_model::StepModel;
