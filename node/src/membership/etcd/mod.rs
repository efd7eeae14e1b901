//! Membership stored in etcd: several routers see the same workers, and either side may restart alone.
//!
//! Keys, below a prefix of each cluster:
//!
//! ```text
//! epoch                                      drawn once; another value means that etcd was wiped
//! instances/{instance}                       record of a worker, on the worker's lease
//! verdicts/{incarnation}/{instance}/{router}    a router's verdict on it (admitted | evicted, with the reason), on the router's lease
//! ```
//!
//! A worker follows the verdicts on itself as it follows its routers' streams under the embedded backend. A verdict
//! that is removed with its router's lease stays in force, as that of an unreachable router. A lease has ended only
//! when a live etcd says so. While etcd is unreachable all processes continue with the last known state.
//!
//! [`view`], `verdicts` and `claim` make decisions without I/O.

mod claim;
mod config;
mod connection;
mod error;
mod history;
mod join;
mod keys;
mod lease;
mod offline_start;
mod prefix;
mod probe;
mod reach;
mod record_cache;
mod router;
mod verdicts;

mod cluster_check;
#[cfg(test)]
mod tests;
pub mod view;
mod worker;

pub use crate::grpc::WatchProbe;
pub use cluster_check::Nodes;
pub use config::EtcdConfig;
pub use join::{JoinError, ListedNode, Start, join};
pub use offline_start::OfflineSources;
pub use prefix::{PrefixError, ensure_free};
pub use probe::{Probe, Verdict};
pub use reach::{Reached, reach};
pub use router::EtcdRouter;
pub use worker::EtcdWorker;
