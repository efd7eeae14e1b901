//! Two engines connected by a real transfer, and the bits of their results: logits of every step, KV of every token.
//!
//! ```text
//! world (model, backends, requests) ── alone: one request at a time, one thread, whole prompts ──► truth (Ledger)
//!     └── case (drawn): P and D, transport, routes, arrivals ── run ──► Ledger ── compare ──► equal, or the first difference
//! ```
//!
//! The comparison is the same for correct backends and for the wrong ones of `kernels::mutant`. Correct ones must pass it and wrong ones
//! must fail it, which shows that the comparison detects errors.

mod case;
mod coverage;
mod eviction;
mod handoff;
mod ledger;
mod quantized;
mod run;
mod side;
mod world;

pub use case::{Arrivals, Caching, Case, Dealer, Plan, Read, Route, Setup};
pub use coverage::Coverage;
pub use ledger::{Compared, Difference};
pub use run::{Observed, Truth};
pub use world::{Family, World};
