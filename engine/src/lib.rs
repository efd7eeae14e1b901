//! The engine: token ids in, token ids out.
//!
//! Layer: above `kernels` (what a device computes) and `kv-cache` (the owner of each block); below the workers, which connect it to the
//! network. A runner owns model, scheduler and running sequences; other code holds an [`EngineHandle`]. A thread, or the simulation, drives
//! the runner; the time comes from a [`baton_types::Clock`].
//!
//! ```text
//! EngineHandle ── submit, cancel ──> runner ── plan ──> scheduler (pure)
//!       ^                              │ launch, finish
//!       └── SequenceSink <── sampled tokens ── model ── step ──> device
//! ```
//!
//! Model and sampling are exact: a row's bits depend only on its own past. So the scheduler may batch, chunk, preempt and recompute in any
//! way without changing a token.
//!
//! This crate does not know networks, peers, text or environment variables. Blocks leave and enter as leases.

pub mod api;
pub mod config;
mod draft_model;
mod engine;
pub mod error;
pub mod fair;
pub mod families;
pub mod formats;
mod gaps;
pub mod gate;
pub mod grammar;
mod handle;
mod health;
mod mailbox;
pub mod model;
pub mod rates;
mod runner;
pub mod scheduler;
mod shared;
pub mod speculation;
mod step_model;
mod thread;

pub use api::{
    AdapterUse, Load, PinFor, PrefillObserver, PrefixUse, Reuse, Run, SequenceEvent, SequenceRequest, SequenceSink,
    SubmitError,
};
pub use config::{EngineConfig, PrefixCacheConfig};
pub use draft_model::DraftModel;
#[doc(hidden)] // For simulations.
pub use engine::Driven;
pub use engine::Engine;
pub use error::EngineError;
pub use gaps::StepGaps;
pub use gate::{LogitObserver, SequenceGate, SequencePhase};
pub use grammar::{GrammarState, Grammars};
pub use handle::{EngineHandle, SequenceControl};
pub use health::Heartbeat;
pub use model::{Model, ModelConfig, ModelError, StepInput, StepOutput};
#[doc(hidden)] // See `Driven`.
pub use runner::Turn;
pub use scheduler::Awaited;
pub use speculation::{SpeculationConfig, SpeculationMethod, StepTime};
pub use step_model::StepModel;
