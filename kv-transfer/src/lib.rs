//! Moves the KV blocks of a sequence from one instance's pool into another's, complete and verified or not at all.
//!
//! A *handoff* is one sequence's move. The source offers it, and the sink answers with a grant (blocks under a ticket). The source writes
//! finished blocks into them while later layers compute, flushes, and commits; the sink verifies checksums and adopts. Source and sink are
//! the sides of one handoff, whether a worker prefills or decodes.
//!
//! Positions that the sink has cached are left out of a handoff: the grant names the first position to move.
//!
//! A *get* is the reverse: a reader asks an owner for blocks, and the owner pins them for a bounded time. The reader adopts only a
//! complete copy, once the owner has confirmed that the pin still held and the checksums matched.
//!
//! ```text
//!  worker's threads           progress thread (one)                      verifier and worker threads (one each)
//!  PutHandle, GetHandle ──►  inbox ──► driver ── put::{source, sink}, get::{reader, owner}
//!                                        │  └─────────────────────────►  verify: checksums over the pool
//!                                        │  └─────────────────────────►  calls ──► SinkHandler, which answers through the inbox
//!                                      transport: ucx | tcp  ──► pool memory
//! ```
//!
//! Layer: above `types` and `memory`; a worker connects it to the engine. It does not know models, schedulers, pool policy, gRPC or membership.
//! Blocks come as opaque holds; dropping a hold returns them to the pool.
//!
//! Invariants, tested in `tests/` and beside the state machines (the last one in `tests/late_writes.rs`):
//! - no write is posted without a grant, and none after an abort was acknowledged;
//! - a commit is posted only from the completion of a flush that covers every write of its handoff;
//! - blocks of positions that are left out are never written: other sequences may share them;
//! - the source's hold outlives every operation that reads its blocks;
//! - the sink adopts only what passed its checksums, under the right ticket, between the right incarnations;
//! - a reader adopts only blocks whose pin held until they were read;
//! - blocks of a failed handoff return to the pool only after a fence, and are quarantined until then.

#[cfg(test)]
extern crate self as baton_kv_transfer; // Tests share what they need.

mod address;
#[doc(hidden)]
pub mod bench;
#[allow(missing_docs)] // Public through `simulation` alone.
mod calls;
mod checksum;
mod config;
mod coverage;
pub mod credentials;
mod driver;
mod error;
mod get;
mod greeting;
mod handle;
mod handler;
mod hazards;
mod heads;
mod hooks;
mod inbox;
pub mod inventory;
#[allow(missing_docs)] // Public through `simulation` alone.
mod message;
#[allow(missing_docs)] // Public through `simulation` alone.
mod plan;
mod pool_turns;
mod put;
mod role;
mod service;
#[cfg(any(test, feature = "testing"))]
pub mod shards;
#[doc(hidden)]
pub mod simulation;
mod stats;
#[allow(missing_docs)] // Public through `simulation` alone.
mod transport;
pub mod trial;
mod ucx;
mod verify;
#[allow(missing_docs)] // Public through `simulation` alone.
mod window;
mod wire;

pub use address::TransferAddress;
pub use baton_types::Party;
pub use config::{Peer, TransferConfig, TransferLimits, TransportChoice, UcxLanes, UcxWrites};
pub use credentials::Credentials;
pub use error::{HandoffFailure, RefuseReason, TransferError};
pub use get::{GetOutcome, GetReport, GetRequest};
pub use handle::{GetHandle, Handle, PutHandle};
pub use handler::{
    AdoptReply, BlockHold, GrantReply, PinQuestion, PinReply, QuarantinedBlocks, ReserveOffer, SinkHandler,
    SinkTimings, VerifiedHandoff,
};
#[cfg(any(test, feature = "testing"))]
pub use hazards::{Hazard, Hazards};
pub use heads::HeadShard;
pub use hooks::{HoldPoint, NoHooks, TransferHooks};
pub use put::{CommitPayload, PutOutcome, PutReport, PutRequest};
pub use service::KvTransfer;
pub use stats::{PeerStats, TransferStats};
pub use trial::{Moved, Trial, TrialError};
