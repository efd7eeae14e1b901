//! Membership without a server of its own: routers keep leases over a gRPC stream (`baton.v1.Membership/Join`).
//!
//! A worker registers with every router of its configuration. The router's [`EmbeddedRouter`] is both the service and
//! the view.

mod config;
mod grpc;

pub use config::{JoinConfig, LeaseConfig};
pub use grpc::{Connect, EmbeddedRouter, EmbeddedWorker, JoinService};
