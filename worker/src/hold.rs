//! Leases as the transfer holds them: behind a trait, so that the transfer does not depend on the pool.

use baton_kv_cache::{Lease, Quarantined};
use baton_kv_transfer::{BlockHold, QuarantinedBlocks};
use baton_types::{BlockTables, Party, seeded};
use std::any::Any;
use std::hash::{DefaultHasher, Hash, Hasher};

/// A lease of blocks that one peer may write.
#[derive(Debug)]
pub struct LeaseHold {
    lease: Lease,
    owner: u64,
    cached_tokens: u32,
}

impl LeaseHold {
    /// Holds `lease`, of blocks of `block_tokens`, for writes of `peer`. The peer leaves out the blocks that the lease found in the
    /// cache.
    pub fn new(lease: Lease, peer: &Party, block_tokens: usize) -> Self {
        let mut cached_tokens = lease.cached_blocks() * block_tokens;
        if seeded!(PartialGrantOffByOne) && cached_tokens > 0 && lease.blocks_end() > lease.cached_blocks() + 1 {
            cached_tokens += block_tokens;
        }
        Self { lease, owner: owner(peer), cached_tokens: cached_tokens as u32 }
    }

    /// Takes the lease back out of what the transfer returned.
    pub fn into_lease(hold: Box<dyn BlockHold>) -> Option<Lease> {
        hold.into_any().downcast::<Self>().ok().map(|h| h.lease)
    }
}

/// The label under which blocks that `peer` may still write are counted.
pub fn owner(peer: &Party) -> u64 {
    let mut hasher = DefaultHasher::new();
    peer.hash(&mut hasher);
    hasher.finish()
}

impl BlockHold for LeaseHold {
    fn blocks(&self) -> &BlockTables {
        self.lease.tables()
    }

    fn cached_tokens(&self) -> u32 {
        self.cached_tokens
    }

    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks> {
        Box::new(QuarantinedLease(self.lease.quarantine(self.owner)))
    }

    fn into_any(self: Box<Self>) -> Box<dyn Any + Send> {
        self
    }
}

struct QuarantinedLease(Quarantined);

impl QuarantinedBlocks for QuarantinedLease {
    fn release(self: Box<Self>) {
        self.0.release();
    }
}
