//! The router: admits, places, streams.
//!
//! ```text
//!  http/ ─────────┐                                    ┌─ Decode/Generate ─> decode worker
//!                 ├─> request ─> flow/ ─> placement/ ──┤
//!  grpc/ ─────────┘     admission, models/, workers/   └─ Prefill/Run ─────> prefill worker
//! ```
//!
//! Every API turns a call into one validated `request::Request`. `flow` takes it through admission, tokenization,
//! placement and the workers' streams. `placement` is a pure function of the load reports that `workers` receives and
//! of the index in `prefixes`. `models` has model cards and text. `openai` and `anthropic` are the formats of HTTP's
//! APIs, over what they share in `wire`.
//!
//! The router knows tokens, costs and gRPC. It handles no tensors, KV bytes or kernels: it links neither engine,
//! kernels nor kv-transfer. It holds no model files: cards, tokenizers and templates come from the workers.

#![allow(missing_docs, reason = "parts of one program: most names say what they hold")]

mod admission;
mod anthropic;
mod auth;
mod cache_scope;
mod config;
mod deadline;
mod flow;
mod grpc;
mod http;
mod meter;
mod metrics;
mod models;
mod openai;
mod output;
mod page;
mod placement;
pub mod port;
mod prefixes;
mod prices;
mod quotas;
mod readiness;
mod recovery;
mod request;
mod server;
mod status;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod traces;
mod wire;
mod workers;

pub use auth::{AuthConfig, KeysError};
pub use cache_scope::{CacheConfig, CacheOptions};
pub use config::{HttpConfig, LimitsConfig, PlacementConfig, RetryConfig, RouterConfig};
pub use flow::{Core, Generation, Outside, Prepared, Refused};
pub use output::{Delta, Event, EventResult, Events, Finished, Total};
pub use page::PageConfig;
pub use placement::PlacementPolicy;
pub use prices::{Cost, Price, PricesConfig};
pub use request::{AskedGrammar, Parameters, PrefillPolicy, Prompt, Request, Sampling, Segment, Tools};
pub use server::{Router, RouterError, RunningRouter, run};
