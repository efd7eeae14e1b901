//! Membership without a server of its own: routers keep leases over a gRPC stream (`baton.v1.Membership/Join`).
//!
//! A worker joins every router it is told of. The router's [`EmbeddedRouter`] is the service and the view in one.

mod config;
mod router;
mod session;
mod telling;
mod worker;

pub use config::{JoinConfig, LeaseConfig};
pub use router::EmbeddedRouter;
pub use worker::{Connect, EmbeddedWorker};
