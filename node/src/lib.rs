//! What every Baton process has: configuration, telemetry, metrics, health, membership, listening, gRPC plumbing, drain.
//!
//! Layer: above `types` and `proto`, below the router, the workers and the command line. It keeps each `main` short:
//!
//! ```text
//! parse flags -> config::load_or_dump -> telemetry::init -> Shutdown::install -> run(config) -> bounded drain
//! ```
//!
//! This is the only crate that reads environment variables. It knows no tokens, KV or placement: it carries records
//! and leases without interpreting them.

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

pub mod admin;
pub mod announce;
pub mod backoff;
pub mod calls;
pub mod config;
pub mod environment;
pub mod grpc;
pub mod host;
pub mod id;
pub mod identity;
pub mod intake;
pub mod listen;
pub mod membership;
pub mod metrics;
pub mod operators;
pub mod private;
pub mod runtime;
pub mod shutdown;
pub mod telemetry;
#[cfg(any(test, feature = "testing"))]
#[doc(hidden)]
pub mod testing;

pub use runtime::TokioRuntime;
pub use shutdown::{DrainConfig, Shutdown};
