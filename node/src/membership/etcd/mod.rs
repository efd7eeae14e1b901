//! Membership kept by etcd: several routers see the same workers, and either side may restart alone.
//!
//! Keys, below a prefix of each cluster:
//!
//! ```text
//! epoch                                      drawn once; another value means that etcd was wiped
//! instances/{instance}                       record of a worker, on the worker's lease
//! words/{incarnation}/{instance}/{router}    what one router says of that start (admitted | evicted, and why), on the router's lease
//! ```
//!
//! A worker follows the words on itself as it hears its routers' streams under the embedded backend: a word that goes with its router's
//! lease still stands, as the word of a router that cannot be heard. A lease is gone only when a live etcd says so; while etcd is away
//! everybody goes on with what was last known.
//!
//! [`view`], `opinions` and `claim` decide and do no I/O.

mod claim;
mod config;
mod connection;
mod error;
mod history;
mod join;
mod keys;
mod lease;
mod opinions;
mod prefix;
mod probe;
mod reach;
mod recall;
mod remembered;
mod router;

mod cluster_check;
#[cfg(test)]
mod tests;
pub mod view;
mod worker;

pub use crate::grpc::WatchProbe;
pub use cluster_check::Nodes;
pub use config::EtcdConfig;
pub use join::{JoinError, ListedNode, Start, join};
pub use prefix::{PrefixError, ensure_free};
pub use probe::{Probe, Verdict};
pub use reach::{Reached, reach};
pub use recall::Recall;
pub use router::EtcdRouter;
pub use worker::EtcdWorker;
