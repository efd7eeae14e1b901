//! KV blocks as things that are owned: the block pool, leases over it, the hashes that name a prompt's prefixes, and the index
//! of who has which prefix cached.
//!
//! Place in the house: above `types`, below `engine` (which runs sequences on leases), the workers (which hand leases to the
//! transfer) and `router` (which hashes prompts and will keep the index).
//!
//! ```text
//! SharedPool ── try_lease ──> Lease ── drop ───────────────> free
//!                               └── quarantine ──> Quarantined ── release ──> free
//! ```
//!
//! Every block has one owner at any instant: the free list, one [`Lease`], the cache, or one [`Quarantined`].
//!
//! This crate must never know a kernel, the bytes inside a block, I/O, a clock or a thread of its own.

pub mod hash;
pub mod index;
pub mod lease;
pub mod pool;

pub use hash::{HASH_TOKENS, PrefixHash, PrefixHasher};
pub use index::{Applied, CacheChange, CacheUpdate, CachedPrefix, IndexCounts, JoinError, PrefixIndex};
pub use lease::{Lease, Quarantined, SharedPool};
pub use pool::{BlockCounts, BlockPool, BlockState, PoolError};
