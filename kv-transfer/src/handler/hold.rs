//! The worker's blocks while the transfer service holds them.

use baton_types::BlockTables;
use std::any::Any;
use std::sync::Arc;

/// Blocks that a peer may write: granted ones, or those of a get. Dropping the hold returns them to the pool, so the service drops it only
/// after a fence.
pub trait BlockHold: Send {
    /// The blocks, per group, covering at least the positions of the offer. Not queried for a get.
    fn blocks(&self) -> &BlockTables;
    /// Leading positions whose KV is in the blocks already. They are not moved. Their blocks, which other sequences may share, are never
    /// written: the peer may write only the blocks behind them.
    ///
    /// A multiple of the pool's block size, below the positions of the offer, and 0 where [`crate::ReserveOffer::partial`] is false.
    /// Queried once, with the grant, and not for a get. Any other value is a defect: it is logged, the offer is refused and the hold dropped.
    fn cached_tokens(&self) -> u32 {
        0
    }
    /// Turns the hold into one whose blocks a peer may still write. Only blocks that the peer could write must stay unused; blocks of
    /// [`BlockHold::cached_tokens`] were never writable by it, and are released at once.
    fn quarantine(self: Box<Self>) -> Box<dyn QuarantinedBlocks>;
    /// The concrete hold, for the worker that made it.
    fn into_any(self: Box<Self>) -> Box<dyn Any + Send>;
}

/// Blocks that a peer may still write, because it is not proven dead. Dropping this without release quarantines them permanently.
pub trait QuarantinedBlocks: Send {
    /// Returns the blocks to the pool: nothing writes to them any more.
    fn release(self: Box<Self>);
}

/// Blocks that go back to the pool once the device has ended its operations on them. Dropping this does not release quarantined ones.
pub(crate) enum KeptBlocks {
    Granted(Box<dyn BlockHold>),
    Quarantined(Box<dyn QuarantinedBlocks>),
    /// Of a source.
    Read(Arc<dyn Any + Send + Sync>),
}

impl KeptBlocks {
    pub(crate) fn are_quarantined(&self) -> bool {
        matches!(self, Self::Quarantined(_))
    }

    pub(crate) fn release(self) {
        match self {
            Self::Granted(hold) => drop(hold),
            Self::Read(hold) => drop(hold),
            Self::Quarantined(blocks) => blocks.release(),
        }
    }
}
