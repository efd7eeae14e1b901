//! The shipped code of a whole cluster in one thread, under virtual time: seeded schedules of requests and faults, and what must hold in
//! each.
//!
//! ```text
//!  client ──> router: Core ──Link──> calls ──> worker: services, engine, pool, transfer ──> network
//!                ^                                │
//!                └──── membership: views, leases <┘            all of them tasks of one executor
//! ```
//!
//! Shipped are the router's core, the services of both roles, engine and scheduler, pools and caches, the transfer's driver and the views
//! of membership. Stand-ins are the wires, etcd, the device with its model, and time. [`run()`] runs the schedule of one seed.

#![allow(missing_docs)] // No API: what has to be said of a field is said.

pub mod calls;
pub mod checks;
pub mod client;
pub mod cluster;
pub mod counts;
pub mod executor;
pub mod flood;
pub mod invariant;
pub mod link;
pub mod membership;
pub mod model;
pub mod network;
pub mod random;
pub mod run;
pub mod schedule;
pub mod worker;

pub use counts::{Counts, EXPECTED};
pub use invariant::{Breach, Invariant};
pub use run::{Broken, Ran, run};
