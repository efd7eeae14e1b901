//! `baton.v1.Membership`: both ends of the stream over which a worker keeps its lease.

mod member_updates;
mod router;
mod session;
mod worker;

pub use router::{EmbeddedRouter, JoinService};
pub use worker::{Connect, EmbeddedWorker};
