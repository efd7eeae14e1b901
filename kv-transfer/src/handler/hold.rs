//! Blocks of the worker in the hands of the transfer.

use baton_types::GroupBlocks;
use std::any::Any;

/// Blocks under a grant. Dropping the hold gives them back to the pool, so the service drops it only behind a fence.
pub trait BlockHold: Send {
    /// The blocks, per group, covering at least the positions of the offer.
    fn blocks(&self) -> &GroupBlocks;
    /// Leading positions whose KV is in the blocks already. They are not moved, and their blocks, which others may share, are never
    /// written: the peer may write the blocks behind them only. A multiple of the pool's block size, below the positions of the offer, and 0
    /// where [`crate::ReserveOffer::partial`] says so; asked once, with the grant. Anything else is a defect: it is logged, the offer is refused
    /// and the hold dropped.
    fn cached_tokens(&self) -> u32 {
        0
    }
    /// Turns the hold into one whose blocks a peer may still write. Only those that it could write are to be kept from use: blocks of
    /// [`BlockHold::cached_tokens`] were never open to it, and are let go at once.
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks>;
    /// The concrete hold, for the worker that made it.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// Blocks that a peer, not provably dead, may still write. Dropping without release keeps them quarantined for good.
pub trait QuarantinedBlocks: Send {
    /// Nothing writes there any more: back to the pool.
    fn release(self: Box<Self>);
}
