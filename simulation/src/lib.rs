//! The shipped code of a whole cluster in one thread, under virtual time. Two drivers use it: seeded schedules of requests and faults with
//! the invariants of each, and fleets whose workers take the times of a file of rates, for `baton bench --simulate`.
//!
//! ```text
//!  client ──> router: Core ──Link──> calls ──> worker: services, engine, pool, transfer ──> network
//!                ^                                │
//!                └──── membership: views, leases <┘            all of them tasks of one executor
//! ```
//!
//! Shipped are the router's core, the services of both roles, engine and scheduler, pools and caches, the transfer's driver and the views
//! of membership. Network, etcd, device, model and clock are simulated. Both drivers fill a [`plan::ClusterPlan`], which says what
//! [`cluster::Cluster`] starts. [`run()`] runs the schedule of one seed: delays and faults are drawn, and KV is checked by its content.
//! [`fleet::Fleet::serve`] serves requests where nothing fails: steps and transfers take their time, and KV has no content.

#![allow(missing_docs)] // No API: what has to be said of a field is said.

pub mod called;
pub mod calls;
pub mod checks;
pub mod client;
pub mod cluster;
pub mod counts;
pub mod detours;
pub mod executor;
pub mod fleet;
pub mod flood;
pub mod invariant;
pub mod link;
pub mod membership;
pub mod model;
pub mod network;
mod numbered;
pub mod plan;
pub mod prompts;
mod race;
pub mod random;
mod rated;
pub mod rates;
pub mod run;
pub mod schedule;
pub mod scheduled;
mod stuck;
pub mod worker;

pub use counts::{Counts, EXPECTED};
pub use invariant::{Breach, Invariant};
pub use run::{Broken, Ran, run, run_with_states};
