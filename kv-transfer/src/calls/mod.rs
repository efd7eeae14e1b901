//! Calls of the worker's handler, as a port. The time that a worker spends on an offer grows with the prompt, so a service runs the calls
//! on a thread of their own.

mod thread;
mod waiting;

pub(crate) use thread::CallThread;
pub(crate) use waiting::{WaitingCalls, Waits};

use crate::handler::{AdoptReply, GrantReply, PinReply, SinkHandler};
use crate::inbox::{Inbox, OfferOf};
use crate::role::{HandoffKey, Input};
use crate::{HandoffFailure, PinQuestion, ReserveOffer, VerifiedHandoff};
use baton_types::InstanceId;
use std::sync::Arc;

/// Makes the submitted calls in order: at once, later or on another thread.
///
/// At most four calls are pending for each handoff that peers may have open here ([`crate::TransferLimits::accepted_handoffs_max`]): an offer
/// is taken while fewer than two are, and each of the open puts adds at most two more, its sequence and its failure.
pub trait Calls {
    /// Accepts a call; the implementation runs [`Call::make`].
    fn submit(&mut self, call: Call);
    /// The answer of [`SinkHandler::joins_legs`].
    fn joins_legs(&self) -> bool;
}

/// One call of the worker's handler.
pub struct Call {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) key: HandoffKey,
    pub(crate) what: Question,
    /// Until the call is made.
    pub(crate) waits: Waits,
}

/// A call of the handler.
pub(crate) enum Question {
    Reserve(ReserveOffer),
    Pin(PinQuestion),
    Adopt(Box<VerifiedHandoff>),
    Failed(ReserveOffer, HandoffFailure),
}

impl Question {
    /// The peer whose handoff it is.
    pub(crate) fn peer(&self) -> &InstanceId {
        match self {
            Self::Reserve(offer) | Self::Failed(offer, _) => &offer.source.instance,
            Self::Pin(question) => &question.reader.instance,
            Self::Adopt(handoff) => &handoff.source.instance,
        }
    }
}

impl Call {
    /// Makes the call, unless it asks for blocks of an offer that has ended meanwhile. The driver receives the answer in its next turn.
    pub fn make(self, handler: &dyn SinkHandler) {
        let Self { inbox, key, what, waits } = self;
        drop(waits);
        match what {
            // A handler that joins several legs must know of each that fails.
            Question::Reserve(ReserveOffer { legs: 1, .. }) | Question::Pin(_) if !inbox.is_offered(key) => {}
            Question::Reserve(offer) => {
                let standing = OfferOf { inbox, key };
                handler.reserve(offer, GrantReply::new(Arc::new(standing)));
            }
            Question::Pin(question) => {
                let reply = PinReply::new(move |answer| {
                    let input = match answer {
                        Ok((blocks, hold)) => Input::Pinned { blocks, hold },
                        Err((reason, detail)) => Input::Refused { reason, detail },
                    };
                    inbox.answered(key, input);
                });
                handler.pin(question, reply);
            }
            Question::Adopt(handoff) => {
                handler.verified(*handoff, AdoptReply::new(move |answer| inbox.input(key, Input::Adopted(answer))));
            }
            Question::Failed(offer, failure) => handler.failed(&offer, failure),
        }
    }
}

impl std::fmt::Debug for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Call({})", self.key)
    }
}

/// Makes each call at once. For simulations and tests.
pub struct Inline(pub Arc<dyn SinkHandler>);

impl Calls for Inline {
    fn submit(&mut self, call: Call) {
        call.make(&*self.0);
    }
    fn joins_legs(&self) -> bool {
        self.0.joins_legs()
    }
}

impl std::fmt::Debug for Inline {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inline").finish_non_exhaustive()
    }
}
