//! Replies that a worker answers. They do not know their destination, so a layer between worker and service can intercept them.

use super::hold::BlockHold;
use crate::RefuseReason;
use baton_types::BlockTables;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// A peer's offer that waits for its answer, or was granted.
pub(crate) trait StandingOffer: Send + Sync {
    fn granted(&self, hold: Box<dyn BlockHold>);
    fn refused(&self, reason: RefuseReason, detail: String);
    fn is_wanted(&self) -> bool;
    /// Cancels the offer in whatever state it is.
    #[cfg(any(test, feature = "testing"))]
    fn cancel(&self, reason: String);
}

/// The reply to one [`crate::SinkHandler::reserve`], from any thread, now or later.
pub struct GrantReply(Option<Arc<dyn StandingOffer>>);

impl GrantReply {
    pub(crate) fn new(offer: Arc<dyn StandingOffer>) -> Self {
        Self(Some(offer))
    }

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn offer(&self) -> Option<&Arc<dyn StandingOffer>> {
        self.0.as_ref()
    }

    /// Grants these blocks. They are returned (the hold is dropped) if the handoff ended meanwhile.
    pub fn grant(mut self, hold: Box<dyn BlockHold>) {
        if let Some(offer) = self.0.take() {
            offer.granted(hold);
        }
    }

    /// Refuses the offer; the source gets reason and detail.
    pub fn refuse(mut self, reason: RefuseReason, detail: impl Into<String>) {
        if let Some(offer) = self.0.take() {
            offer.refused(reason, detail.into());
        }
    }

    /// Whether the offer is still open; a worker that queues replies until blocks are free drops those that are not.
    pub fn is_wanted(&self) -> bool {
        self.0.as_ref().is_some_and(|offer| offer.is_wanted())
    }
}

impl Drop for GrantReply {
    fn drop(&mut self) {
        if let Some(offer) = self.0.take() {
            offer.refused(RefuseReason::NoRoom, "the sink dropped the offer".into());
        }
    }
}

impl fmt::Debug for GrantReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GrantReply").finish_non_exhaustive()
    }
}

/// Passes an answer to its receiver.
type Tell<T> = Box<dyn FnOnce(T) + Send>;

/// Blocks that a peer may get and the hold that keeps them, or why there are none.
pub(crate) type PinAnswer = Result<(BlockTables, Box<dyn Any + Send>), (RefuseReason, String)>;

/// The reply to one [`crate::SinkHandler::pin`], from any thread, now or later. Dropping it refuses.
pub struct PinReply(Option<Tell<PinAnswer>>);

impl PinReply {
    pub(crate) fn new(answer: impl FnOnce(PinAnswer) + Send + 'static) -> Self {
        Self(Some(Box::new(answer)))
    }

    /// Lets the peer get these blocks. They cover the requested positions, and the first one begins with [`crate::PinQuestion::from`].
    /// `hold` keeps them from reuse. It is dropped once the get or the pin has ended and no posted write reads the blocks.
    pub fn pin(mut self, blocks: BlockTables, hold: Box<dyn Any + Send>) {
        self.answer(Ok((blocks, hold)));
    }

    /// Refuses the get; the reader gets reason and detail.
    pub fn refuse(mut self, reason: RefuseReason, detail: impl Into<String>) {
        self.answer(Err((reason, detail.into())));
    }

    fn answer(&mut self, answer: PinAnswer) {
        if let Some(tell) = self.0.take() {
            tell(answer);
        }
    }
}

impl Drop for PinReply {
    fn drop(&mut self) {
        self.answer(Err((RefuseReason::UnknownRequest, "the owner dropped the question".into())));
    }
}

impl fmt::Debug for PinReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PinReply").finish_non_exhaustive()
    }
}

/// The reply to one [`crate::SinkHandler::verified`], from any thread, now or later. Dropping it means that the handoff is not adopted.
pub struct AdoptReply(Option<Tell<Result<(), String>>>);

impl AdoptReply {
    pub(crate) fn new(answer: impl FnOnce(Result<(), String>) + Send + 'static) -> Self {
        Self(Some(Box::new(answer)))
    }

    /// Reports adoption, or the reason against it.
    pub fn answer(mut self, answer: Result<(), String>) {
        self.tell(answer);
    }

    fn tell(&mut self, answer: Result<(), String>) {
        if let Some(tell) = self.0.take() {
            tell(answer);
        }
    }
}

impl Drop for AdoptReply {
    fn drop(&mut self) {
        self.tell(Err("the worker dropped it".into()));
    }
}

impl fmt::Debug for AdoptReply {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AdoptReply").finish_non_exhaustive()
    }
}
