//! KV blocks as things that are owned: the block pool, leases over it, the hashes that name a prompt's prefixes, and the index
//! of who has which prefix cached.
//!
//! Place in the house: above `types`, below `engine` (which runs sequences on leases), the workers (which hand leases to the
//! transfer) and `router` (which hashes prompts and keeps the index).
//!
//! ```text
//! SharedPool ── try_lease, try_reserve ──> Lease ── drop ──> free, or cached ── try_reserve ──> Lease
//!                                            ├── store ──> cached as well, and shared      evict ──> free
//!                                            └── quarantine ──> Quarantined ── release ──> free
//! ```
//!
//! Every block has one owner at any instant: the free list, one [`Lease`], the cache, or one [`Quarantined`]. Leases share what the
//! cache owns, and what a fork has in common with its origin; nobody writes that.
//!
//! This crate must never know a kernel, the bytes inside a block, I/O, a clock or a thread of its own.

mod books;
mod cache;
pub mod feed;
pub mod hash;
pub mod index;
pub mod lease;
pub mod pool;
pub mod shared;
#[cfg(test)]
mod tests;

pub use books::Reserve;
pub use cache::{CacheConfig, CacheCounts, Change, ChangeCursor, Keep, Pin};
pub use feed::{CacheFeed, FEED_HASHES_MAX, FeedChange, FeedUpdate};
pub use hash::{HASH_TOKENS, PrefixHash, PrefixHasher};
pub use index::{Applied, CacheChange, CacheUpdate, CachedPrefix, IndexCounts, JoinError, PrefixIndex};
pub use lease::{ForkCopy, Lease, Quarantined};
pub use pool::{BlockCounts, BlockPool, BlockState, PoolError};
pub use shared::SharedPool;
