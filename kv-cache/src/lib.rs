//! Ownership of KV blocks: the block pool, leases of its blocks, the hashes of a prompt's prefixes, and the index of which worker has which
//! prefix cached.
//!
//! Layer: above `types`, below `engine` (which runs sequences on leases), the workers (which hand leases to the
//! transfer) and `router` (which hashes prompts and keeps the index).
//!
//! ```text
//! SharedPool ── try_reserve ──> Lease ── drop ──> free, or cached ── try_reserve ──> Lease
//!                                 ├── store ──> cached as well, and shared      evict ──> free
//!                                 └── quarantine ──> Quarantined ── release ──> free
//! ```
//!
//! Every block is in one state at any instant: free, referenced by one or more [`Lease`]s, cached without a lease, or in one
//! [`Quarantined`]. Each group of a layout has blocks of its own: of a group with a window, a lease holds only those that later positions
//! attend to ([`Lease::hold`]), and a cached prefix needs only those before its end. Leases share cached blocks, and the blocks that a fork has in common with its origin. Shared blocks are never written.
//!
//! This crate knows neither kernels nor the bytes of a block. It does no I/O, reads no clock and has no thread.

mod cache;
mod cached_pool;
pub mod feed;
pub mod hash;
pub mod index;
pub mod lease;
pub mod pool;
pub mod shape;
pub mod shared;
#[cfg(test)]
mod tests;

pub use cache::{CacheConfig, CacheCounts, Change, ChangeCursor, Keep, Pin};
pub use cached_pool::{Fill, Reserve};
pub use feed::{CacheFeed, FEED_HASHES_MAX, FeedChange, FeedUpdate};
pub use hash::{HASH_TOKENS, PrefixHash, PrefixHasher};
pub use index::{Applied, CacheChange, CacheUpdate, CachedPrefix, IndexCounts, JoinError, PrefixIndex};
pub use lease::{ForkCopy, Lease, Quarantined, StateBefore};
pub use pool::{BlockCounts, BlockPool, BlockState, PoolError};
pub use shape::{PoolGroup, PoolShape};
pub use shared::SharedPool;
