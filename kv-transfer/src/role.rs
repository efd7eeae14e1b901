//! The interface between the driver and the roles of handoffs: inputs in, effects out.

use crate::greeting::Terms;
use crate::handler::{BlockHold, KeptBlocks};
use crate::message::Message;
use crate::plan::{CopyRun, End, LayerCopy, Move};
use crate::verify::work::{Verified, Work};
use crate::window::Window;
use crate::{
    CommitPayload, GetOutcome, HandoffFailure, HoldPoint, PinQuestion, PutOutcome, RefuseReason, ReserveOffer,
    TransferConfig, VerifiedHandoff,
};
use baton_types::{BlockTables, Fence, RequestId, TicketId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// Key of one handoff in the table of one driver, never reused. In messages, it is the number of a handoff that this side offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct HandoffKey(pub u64);

impl fmt::Display for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// An event of one handoff. A role handles the inputs that concern it and ignores the rest.
pub(crate) enum Input {
    // From this side's worker.
    /// A layer was launched.
    Launched {
        layer: u32,
        tokens_end: usize,
        fence: Fence,
    },
    /// The source's blocks from now on: a window's come while its sequence is computed.
    Grown(BlockTables),
    /// Every layer was launched; the payload goes with the commit.
    Finish(CommitPayload),
    /// This side aborts, whichever side began the handoff.
    Abort(HandoffFailure),
    /// The worker reserved blocks.
    Granted(Box<dyn BlockHold>),
    /// The worker pinned blocks for a get.
    Pinned {
        blocks: BlockTables,
        hold: Box<dyn Any + Send>,
    },
    /// The worker has no free blocks, or nothing to pin.
    Refused {
        reason: RefuseReason,
        detail: String,
    },
    /// The worker's answer to the delivered sequence.
    Adopted(Result<(), String>),

    /// The verifier has completed [`Effect::Verify`].
    Verified(Verified),

    // From the connection.
    /// The connection is usable from now on.
    Greeted,
    Heard(Message),
    /// The peer refuses this side.
    Rejected(HandoffFailure),
    /// A write was posted.
    Posted {
        epoch: u32,
        bytes: usize,
    },
    /// A flush of what it queued was posted.
    Flushing,
    /// Nothing that it posted is under way.
    Idle,
    /// A flush covers what was queued for this epoch and before.
    Flushed {
        epoch: u32,
    },
    /// This many bytes of a one-sided read by this side are here.
    Got {
        bytes: usize,
    },
    /// No write under the ticket is on its way, after [`Effect::CloseWindow`].
    WindowClosed,
    /// The connection is closed; `fenced` if nothing can be stored through it any more.
    Lost {
        fenced: bool,
        detail: String,
    },
    /// The peer can no longer write.
    Fenced,

    // From the driver.
    /// The bound on quarantined blocks allows what the peer may write here.
    Admitted,
    /// The bound on quarantined blocks does not allow it.
    Barred(String),
    /// Check fences, which cannot wake the driver.
    Poll,
    Tick,
}

/// What the driver must do for a handoff, in order.
pub(crate) enum Effect {
    /// Send to the peer.
    Send(Message),
    /// Queue the writes of a copy.
    Put {
        epoch: u32,
        ticket: TicketId,
        copy: LayerCopy,
    },
    /// Flush what is queued so far.
    Flush {
        epoch: u32,
    },
    /// Drop the writes that are not posted and flush the others, ahead of other handoffs' queued writes.
    FlushPosted {
        epoch: u32,
    },
    /// Drop the queued writes and flushes.
    CancelPuts,
    /// Read from the peer's region, one-sided.
    Get(CopyRun),
    /// The peer may write there under this ticket.
    OpenWindow(TicketId, Window),
    /// The peer may no longer write under this ticket. [`Input::WindowClosed`] or [`Input::Lost`] follows.
    CloseWindow(TicketId),
    /// Close the window too, and release the blocks once no write under the ticket is on its way.
    Release(TicketId, KeptBlocks),
    /// Nothing of this handoff reads or writes these blocks any more, except what the device still does for a connection that has closed.
    LetGo(KeptBlocks),
    /// Compute or compare checksums.
    Verify(Work),
    /// Close the connection: an operation on it does not end by itself.
    Disconnect(&'static str),
    /// From now on the peer may name this ticket, which it gave, in messages.
    Await(TicketId),
    /// Check whether the peer may write this many blocks here. The answer is [`Input::Admitted`] or [`Input::Barred`].
    Admit {
        blocks: usize,
    },
    /// Ask the worker for blocks.
    Reserve(ReserveOffer),
    /// Ask the worker to pin blocks for a get.
    Pin(PinQuestion),
    /// Deliver a complete sequence to the worker. Its answer is [`Input::Adopted`].
    Deliver(Box<VerifiedHandoff>),
    /// Report to the worker that an offered handoff failed.
    Failed(ReserveOffer, HandoffFailure),
    Count(Counted),
    /// Free the handoff's place among those of this side; its blocks wait for a fence.
    Quarantined,
    /// The handoff has ended; only its outcome follows.
    Forget,
    PutEnded(oneshot::Sender<PutOutcome>, PutOutcome),
    GetEnded(oneshot::Sender<GetOutcome>, GetOutcome),
}

/// What to count, for the peer and in total.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counted {
    /// Outcome of a put whose source is here, as a label; the same for the next two.
    Source(&'static str),
    Sink(&'static str),
    Reader(&'static str),
    /// An offer was refused here.
    Refused(RefuseReason),
    /// This many bytes were adopted.
    Adopted(u64),
}

/// What a role may read of the service and its connection.
pub(crate) struct Link<'a> {
    pub(crate) key: HandoffKey,
    pub(crate) config: &'a TransferConfig,
    /// Terms of the greeting; `None` before it, and once the connection is closed.
    pub(crate) terms: Option<&'a Terms>,
    /// Name of the transport, and lanes of the connection.
    pub(crate) transport: &'static str,
    pub(crate) lanes: &'a str,
    /// Closing the connection is expected to fence it.
    pub(crate) closing_fences: bool,
    /// This side reads the peer's region one-sided.
    pub(crate) one_sided_gets: bool,
}

impl Link<'_> {
    /// What moves from this side's blocks to the peer's.
    pub(crate) fn outward(&self, ours: &Arc<BlockTables>, theirs: &Arc<BlockTables>) -> Option<Arc<Move>> {
        let terms = self.terms?;
        let cut = terms.outward.as_ref()?;
        let source = End { map: self.config.map.clone(), blocks: ours.clone(), heads: cut.source.clone() };
        let sink = End { map: terms.map.clone(), blocks: theirs.clone(), heads: cut.sink.clone() };
        Some(Arc::new(Move { source, sink, run_bytes_max: self.config.limits.put_bytes_max }))
    }

    /// What moves from the peer's blocks to this side's.
    pub(crate) fn inward(&self, ours: &Arc<BlockTables>, theirs: &Arc<BlockTables>) -> Option<Arc<Move>> {
        let terms = self.terms?;
        let cut = terms.inward.as_ref()?;
        let source = End { map: terms.map.clone(), blocks: theirs.clone(), heads: cut.source.clone() };
        let sink = End { map: self.config.map.clone(), blocks: ours.clone(), heads: cut.sink.clone() };
        Some(Arc::new(Move { source, sink, run_bytes_max: self.config.limits.put_bytes_max }))
    }

    /// Whether a test hook holds the handoff here.
    pub(crate) fn holds(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        self.config.hooks.hold(point, request_id)
    }
}

/// Milliseconds from `now` to a deadline, as messages carry them.
pub(crate) fn millis_left(deadline: Instant, now: Instant) -> u32 {
    u32::try_from(deadline.saturating_duration_since(now).as_millis()).unwrap_or(u32::MAX)
}
