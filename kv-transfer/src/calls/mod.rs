//! Calls of the worker's handler, as a port. The time that a worker spends on an offer grows with the prompt, so a service runs the calls
//! on a thread of their own.

mod thread;

pub(crate) use thread::CallThread;

use crate::handler::{AdoptReply, GrantReply, PinReply, SinkHandler};
use crate::inbox::{Inbox, OfferOf};
use crate::role::{HandoffKey, Input};
use crate::{HandoffFailure, PinQuestion, ReserveOffer, VerifiedHandoff};
use std::sync::Arc;

/// Makes the submitted calls in order: at once, later or on another thread.
///
/// At most four calls are pending for each handoff that peers may have open here.
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
}

/// A call of the handler.
pub(crate) enum Question {
    Reserve(ReserveOffer),
    Pin(PinQuestion),
    Adopt(Box<VerifiedHandoff>),
    Failed(ReserveOffer, HandoffFailure),
}

impl Call {
    /// Makes the call. The driver receives the answer in its next turn.
    pub fn make(self, handler: &dyn SinkHandler) {
        let Self { inbox, key, what } = self;
        match what {
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
                let later = inbox.clone();
                let reply = AdoptReply::new(move |answer| later.input(key, Input::Adopted(answer)));
                if let Some(answer) = handler.arrived(*handoff, reply) {
                    inbox.input(key, Input::Adopted(answer));
                }
            }
            Question::Failed(offer, failure) => handler.ended(&offer, failure),
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
