//! Where tests take hold of the service: phases held open, bytes corrupted, messages forged.

use crate::Party;
use baton_types::RequestId;

/// Points at which a handoff can be held open.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Phase {
    /// Source: before the offer is sent.
    Offer,
    /// Source: granted, before writes are posted.
    Puts,
    /// Source: everything written and flushed, before the commit is sent.
    Commit,
    /// Sink: commit received, before verification.
    Verify,
    /// Reader of a get: blocks are pinned, before anything is read.
    Reads,
}

/// What is made of a lost connection's late writes, over UCX.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fencing {
    /// Blocks return when the connection's worker is destroyed, where that is a fence for its lanes.
    #[default]
    ByLanes,
    /// As if some lane could not be fenced: blocks stay quarantined.
    Never,
    /// The hazard itself: blocks return, and the connection's endpoint and worker live on. Those of a get that is given up return at once,
    /// whatever its owner still writes.
    Pretended,
}

/// What becomes of a pin that expires while a peer reads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Pinning {
    /// Its blocks are free, and the reader is told that it did not hold.
    #[default]
    Bounded,
    /// The hazard itself: its blocks are free, and the reader is told that it held, with checksums of what is there then.
    Pretended,
}

/// Whose messages a ticket stands for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Tickets {
    /// Those of the connection that it was given on, which is one between two incarnations.
    #[default]
    OfOneConnection,
    /// The hazard itself: those of whoever names it.
    OfAnyone,
}

/// What of a peer's greeting is compared with what was expected.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Greetings {
    /// Everything.
    #[default]
    Compared,
    /// The hazard itself: whoever answers at an address, or offers in a name, is taken for the start that is meant.
    AnyIncarnation,
    /// The hazard itself: models, layouts and classes are taken to agree.
    AnyFingerprint,
}

/// Which blocks of a grant its source can write, where the transport stores what peers write.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Windows {
    /// Those that take what is moved.
    #[default]
    OfWhatIsMoved,
    /// The hazard itself: also those whose KV was here before, which other sequences read.
    OfAllBlocks,
}

/// Which commits a sink takes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Commits {
    /// One a ticket, while its reservation stands and before its deadline.
    #[default]
    Once,
    /// The hazard itself: also those whose ticket is over.
    Late,
    /// The hazard itself: each of them, as if it were the first.
    Doubled,
}

/// Called on the progress thread; everything must return at once. The defaults change nothing.
pub trait TransferHooks: Send + Sync {
    /// Whether the handoff is to wait at this phase. Asked again until it answers no.
    fn hold(&self, phase: Phase, request_id: &RequestId) -> bool {
        let _ = (phase, request_id);
        false
    }

    /// Chosen when the service starts.
    fn fencing(&self) -> Fencing {
        Fencing::ByLanes
    }

    /// Asked for each pin.
    fn pinning(&self) -> Pinning {
        Pinning::Bounded
    }

    /// Asked for each offer.
    fn commits(&self) -> Commits {
        Commits::Once
    }

    /// Asked for each greeting and offer.
    fn greetings(&self) -> Greetings {
        Greetings::Compared
    }

    /// Asked for each grant.
    fn windows(&self) -> Windows {
        Windows::OfWhatIsMoved
    }

    /// Asked for each message that names a ticket.
    fn tickets(&self) -> Tickets {
        Tickets::OfOneConnection
    }

    /// Replaces an encoded control message on its way out. Returning it twice doubles it, not at all drops it.
    fn outgoing_message(&self, to: Option<&Party>, message: Vec<u8>) -> Vec<Vec<u8>> {
        let _ = to;
        vec![message]
    }
}

/// Changes nothing.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoHooks;

impl TransferHooks for NoHooks {}
