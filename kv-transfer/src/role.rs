//! What the driver and the roles of handoffs say to each other: inputs in, effects out.

use crate::greeting::Terms;
use crate::handler::BlockHold;
use crate::message::Message;
use crate::plan::{CopyRun, End, LayerCopy, Move};
use crate::verify::work::{Verified, Work};
use crate::window::Window;
use crate::{
    CommitPayload, GetOutcome, HandoffFailure, HoldPoint, PinQuestion, PutOutcome, RefuseReason, ReserveOffer,
    TransferConfig, VerifiedHandoff,
};
use baton_types::{Fence, GroupBlocks, RequestId, TicketId};
use std::any::Any;
use std::fmt;
use std::sync::Arc;
use std::time::Instant;
use tokio::sync::oneshot;

/// One handoff in the table of one driver, never reused. On the wire it is the number of the handoffs that this side offers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct HandoffKey(pub u64);

impl fmt::Display for HandoffKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// What happened to one handoff. A role takes what concerns it and passes over the rest.
pub(crate) enum Input {
    // The worker of this side.
    /// A layer was launched.
    Launched {
        layer: u32,
        tokens_end: usize,
        fence: Fence,
    },
    /// Everything was launched.
    Finish(CommitPayload),
    /// This side gives up, whoever began it.
    Abort(HandoffFailure),
    /// The worker reserved blocks.
    Granted(Box<dyn BlockHold>),
    /// The worker pinned blocks to be got.
    Pinned {
        blocks: GroupBlocks,
        hold: Box<dyn Any + Send>,
    },
    /// The worker has no room, or nothing to be got.
    Refused {
        reason: RefuseReason,
        detail: String,
    },
    /// The worker's answer to what arrived.
    Adopted(Result<(), String>),

    /// The verifier has done what [`Effect::Verify`] asked for.
    Verified(Verified),

    // The connection.
    /// It can be used from now on, or never.
    Greeted,
    Heard(Message),
    /// The peer will have nothing to do with us.
    Rejected(HandoffFailure),
    /// A write was posted.
    Posted {
        epoch: u32,
        bytes: usize,
    },
    /// A flush covers what was queued for this epoch and before.
    Flushed {
        epoch: u32,
    },
    /// So many bytes of a get by this side itself are here.
    Got {
        bytes: usize,
    },
    /// The connection is gone; `fenced` if nothing can be stored through it any more.
    Lost {
        fenced: bool,
        detail: String,
    },
    /// Nothing of the peer writes any more.
    Fenced,

    // The driver.
    /// The bound on quarantined blocks has room for what the peer may come to write here,
    Admitted,
    /// or has not.
    Barred(String),
    /// Look at fences, which wake nobody.
    Poll,
    Tick,
}

/// What the driver is to do for a handoff, in order.
pub(crate) enum Effect {
    /// To the peer.
    Send(Message),
    /// Queue the writes of a copy.
    Put {
        epoch: u32,
        ticket: TicketId,
        copy: LayerCopy,
    },
    /// Flush what is queued by then.
    Flush {
        epoch: u32,
    },
    /// Drop the writes that are not posted and flush the others, ahead of what other handoffs have queued.
    FlushPosted {
        epoch: u32,
    },
    /// Drop the writes and flushes that are queued.
    CancelPuts,
    /// Get from the peer's region, by this side itself.
    Get(CopyRun),
    /// The peer may write there under this ticket,
    OpenWindow(TicketId, Window),
    /// and no longer.
    CloseWindow(TicketId),
    /// Compute or compare checksums.
    Verify(Work),
    /// End the connection: something on it does not end by itself.
    Disconnect(&'static str),
    /// From now on the peer may name this ticket of its own.
    Heed(TicketId),
    /// The peer is to write to so many blocks here: may it? The answer is [`Input::Admitted`] or [`Input::Barred`].
    Admit {
        blocks: usize,
    },
    /// Ask the worker for room.
    Reserve(ReserveOffer),
    /// Ask the worker for blocks to be got.
    Pin(PinQuestion),
    /// What is whole, to the worker. Its answer is [`Input::Adopted`].
    Deliver(Box<VerifiedHandoff>),
    /// The worker is told that what was offered failed.
    Failed(ReserveOffer, HandoffFailure),
    Count(Counted),
    /// The handoff's place among those of this side is free; its blocks wait for a fence.
    Quarantined,
    /// The end, after which nothing but its outcome follows.
    Forget,
    PutEnded(oneshot::Sender<PutOutcome>, PutOutcome),
    GetEnded(oneshot::Sender<GetOutcome>, GetOutcome),
}

/// What is counted, for the peer and in total.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Counted {
    /// Outcomes.
    Source(&'static str),
    Sink(&'static str),
    Reader(&'static str),
    /// An offer was refused here.
    Refused(RefuseReason),
    /// So many bytes were adopted.
    Adopted(u64),
}

/// What a role may know of the service and of its connection.
pub(crate) struct Link<'a> {
    pub(crate) key: HandoffKey,
    pub(crate) config: &'a TransferConfig,
    /// Settled by the greeting; `None` before, and where the connection is gone.
    pub(crate) terms: Option<&'a Terms>,
    /// Name of the transport, and what carries the connection.
    pub(crate) transport: &'static str,
    pub(crate) lanes: &'a str,
    /// Closing the connection is expected to fence it.
    pub(crate) closing_fences: bool,
    /// This side gets from the peer's region without the peer's help.
    pub(crate) gets_by_itself: bool,
}

impl Link<'_> {
    /// What moves from blocks of this side to those of the peer.
    pub(crate) fn outward(&self, ours: &Arc<GroupBlocks>, theirs: &Arc<GroupBlocks>) -> Option<Arc<Move>> {
        let terms = self.terms?;
        let cut = terms.outward.as_ref()?;
        let source = End { map: self.config.map.clone(), blocks: ours.clone(), heads: cut.source.clone() };
        let sink = End { map: terms.map.clone(), blocks: theirs.clone(), heads: cut.sink.clone() };
        Some(Arc::new(Move { source, sink, run_bytes_max: self.config.limits.put_bytes_max }))
    }

    /// What moves from blocks of the peer to those of this side.
    pub(crate) fn inward(&self, ours: &Arc<GroupBlocks>, theirs: &Arc<GroupBlocks>) -> Option<Arc<Move>> {
        let terms = self.terms?;
        let cut = terms.inward.as_ref()?;
        let source = End { map: terms.map.clone(), blocks: theirs.clone(), heads: cut.source.clone() };
        let sink = End { map: self.config.map.clone(), blocks: ours.clone(), heads: cut.sink.clone() };
        Some(Arc::new(Move { source, sink, run_bytes_max: self.config.limits.put_bytes_max }))
    }

    /// Whether a test holds the handoff here.
    pub(crate) fn holds(&self, point: HoldPoint, request_id: &RequestId) -> bool {
        self.config.hooks.hold(point, request_id)
    }
}

/// Milliseconds from `now` to a deadline, as messages carry them.
pub(crate) fn millis_left(deadline: Instant, now: Instant) -> u32 {
    u32::try_from(deadline.saturating_duration_since(now).as_millis()).unwrap_or(u32::MAX)
}
