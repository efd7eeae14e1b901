//! The queue of commands from other threads to the driver.

use crate::handler::{BlockHold, StandingOffer};
use crate::role::{HandoffKey, Input};
use crate::transport::Wake;
use crate::{
    CommitPayload, GetOutcome, GetRequest, HandoffFailure, Party, Peer, PutOutcome, PutRequest, RefuseReason,
    TransferError,
};
use baton_types::{BlockTables, Fence, RequestId};
use parking_lot::Mutex;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::oneshot;

/// A command to the progress thread.
pub(crate) enum Command {
    /// Put a sequence to a peer.
    Put { key: HandoffKey, peer: Peer, request: PutRequest, outcome: oneshot::Sender<PutOutcome> },
    /// Get from a peer.
    Get { key: HandoffKey, peer: Peer, request: GetRequest, outcome: oneshot::Sender<GetOutcome> },
    /// Something happened to one handoff.
    Input(HandoffKey, Input),
    /// The process of this party is proven dead.
    PeerDead(Party),
    /// Shut down by this instant.
    Stop(Instant),
}

/// The queue in front of the progress thread.
///
/// Bounded by the handoffs that may be open: `started_handoffs_max` handoffs of [`Inbox::LAUNCHES_MAX`] commands each, and one answer and one
/// cancellation for each handoff that peers began here. A handoff that exceeds its share is aborted, so no engine thread ever blocks here.
pub(crate) struct Inbox {
    state: Mutex<State>,
    asleep: AtomicBool,
    /// A thread of the service panicked.
    failed: AtomicBool,
    wake: Wake,
    started_handoffs_max: usize,
}

#[derive(Default)]
struct State {
    queue: Vec<Command>,
    next_key: u64,
    /// Live handoffs that this side began, with the number of queued launches of each.
    begun: BTreeMap<HandoffKey, usize>,
    /// Offers that wait for their answer.
    offered: BTreeSet<HandoffKey>,
    /// Handoffs that peers began here, by request, and those with a queued cancellation.
    offers: BTreeMap<RequestId, Vec<HandoffKey>>,
    cancelled: BTreeSet<HandoffKey>,
    stopped: bool,
}

impl Inbox {
    /// Most queued launches of one handoff: 4096 layers of 16 chunks.
    const LAUNCHES_MAX: usize = 1 << 16;

    pub(crate) fn new(started_handoffs_max: usize, wake: Wake) -> Self {
        Self {
            state: Mutex::default(),
            asleep: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            wake,
            started_handoffs_max,
        }
    }

    pub(crate) fn put(
        &self,
        peer: Peer,
        request: PutRequest,
        outcome: oneshot::Sender<PutOutcome>,
    ) -> Result<HandoffKey, TransferError> {
        self.admit(|key| Command::Put { key, peer, request, outcome })
    }

    pub(crate) fn get(
        &self,
        peer: Peer,
        request: GetRequest,
        outcome: oneshot::Sender<GetOutcome>,
    ) -> Result<HandoffKey, TransferError> {
        self.admit(|key| Command::Get { key, peer, request, outcome })
    }

    fn admit(&self, command: impl FnOnce(HandoffKey) -> Command) -> Result<HandoffKey, TransferError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(TransferError::Stopped);
        }
        if state.begun.len() >= self.started_handoffs_max {
            return Err(TransferError::TooManyHandoffs { limit: self.started_handoffs_max });
        }
        let key = state.new_key();
        state.begun.insert(key, 0);
        state.queue.push(command(key));
        drop(state);
        self.rouse();
        Ok(key)
    }

    /// Counts as a launch towards the bound of the queue.
    pub(crate) fn grown(&self, key: HandoffKey, blocks: BlockTables) {
        self.push_launch(key, Input::Grown(blocks));
    }

    pub(crate) fn launched(&self, key: HandoffKey, layer: u32, tokens_end: usize, fence: Fence) {
        self.push_launch(key, Input::Launched { layer, tokens_end, fence });
    }

    fn push_launch(&self, key: HandoffKey, input: Input) {
        let mut state = self.state.lock();
        let Some(queued) = state.begun.get_mut(&key) else { return };
        *queued += 1;
        let command = match *queued {
            n if n <= Self::LAUNCHES_MAX => Command::Input(key, input),
            n if n == Self::LAUNCHES_MAX + 1 => Command::Input(key, aborted("too many launches are queued".into())),
            _ => return,
        };
        state.queue.push(command);
        drop(state);
        self.rouse();
    }

    pub(crate) fn finish(&self, key: HandoffKey, commit: CommitPayload) {
        self.push_for(key, Input::Finish(commit));
    }

    pub(crate) fn abort(&self, key: HandoffKey, reason: String) {
        self.push_for(key, aborted(reason));
    }

    fn push_for(&self, key: HandoffKey, input: Input) {
        let mut state = self.state.lock();
        if state.begun.contains_key(&key) {
            state.queue.push(Command::Input(key, input));
            drop(state);
            self.rouse();
        }
    }

    /// A handoff that this side began has ended; later commands for it are ignored.
    pub(crate) fn begun_ended(&self, key: HandoffKey) {
        self.state.lock().begun.remove(&key);
    }

    /// Creates the key for a peer's offer of this request; the worker's answer is expected.
    pub(crate) fn offer(&self, request_id: &RequestId) -> HandoffKey {
        let mut state = self.state.lock();
        let key = state.new_key();
        state.offered.insert(key);
        state.offers.entry(request_id.clone()).or_default().push(key);
        key
    }

    /// The offer has ended: its answer is no longer wanted, and it cannot be cancelled.
    pub(crate) fn offer_ended(&self, key: HandoffKey, request_id: &RequestId) {
        let mut state = self.state.lock();
        state.offered.remove(&key);
        if let Some(keys) = state.offers.get_mut(request_id) {
            keys.retain(|k| *k != key);
            if keys.is_empty() {
                state.offers.remove(request_id);
            }
        }
    }

    /// Queues the cancellation of every handoff that peers began here for this request, each once.
    pub(crate) fn cancel(&self, request_id: &RequestId, reason: &str) {
        let keys = self.state.lock().offers.get(request_id).cloned().unwrap_or_default();
        keys.into_iter().for_each(|key| self.cancel_one(key, reason.to_owned()));
    }

    fn cancel_one(&self, key: HandoffKey, reason: String) {
        let mut state = self.state.lock();
        if !state.stopped && state.cancelled.insert(key) {
            state.queue.push(Command::Input(key, aborted(reason)));
            drop(state);
            self.rouse();
        }
    }

    /// Whether the worker's answer to an offer is still wanted.
    pub(crate) fn is_offered(&self, key: HandoffKey) -> bool {
        self.state.lock().offered.contains(&key)
    }

    /// Queues an answer for an open offer, once. Otherwise the answer's contents are dropped here, without the lock.
    pub(crate) fn answered(&self, key: HandoffKey, answer: Input) {
        let mut state = self.state.lock();
        if state.offered.remove(&key) {
            state.queue.push(Command::Input(key, answer));
            drop(state);
            self.rouse();
        }
    }

    /// Something happened to a handoff, on another thread.
    pub(crate) fn input(&self, key: HandoffKey, input: Input) {
        self.push(Command::Input(key, input));
    }

    pub(crate) fn push(&self, command: Command) {
        let mut state = self.state.lock();
        if !state.stopped {
            state.queue.push(command);
            drop(state);
            self.rouse();
        }
    }

    /// Whether something is queued.
    pub(crate) fn has_work(&self) -> bool {
        !self.state.lock().queue.is_empty() || self.has_failed()
    }

    pub(crate) fn drain(&self) -> Vec<Command> {
        let mut state = self.state.lock();
        if state.queue.is_empty() {
            return Vec::new();
        }
        state.begun.values_mut().for_each(|queued| *queued = 0);
        state.cancelled.clear();
        std::mem::take(&mut state.queue)
    }

    /// Requests a wake-up of the thread that runs the driver; `false` if there is work already.
    pub(crate) fn may_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let idle = self.state.lock().queue.is_empty() && !self.has_failed();
        if !idle {
            self.asleep.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// A thread of the service panicked: the progress thread must fail what is open and end.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        self.rouse();
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// Cancels the wake-up request.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Accepts nothing more, and drops what is queued.
    pub(crate) fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            state.stopped = true;
            state.begun.clear();
            state.offered.clear();
            state.offers.clear();
            std::mem::take(&mut state.queue)
        };
        drop(left); // Without the lock: dropping holds runs the worker's code.
    }

    /// Wakes the thread that runs the driver, if it requested that.
    pub(crate) fn rouse(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            (self.wake)();
        }
    }
}

impl State {
    fn new_key(&mut self) -> HandoffKey {
        self.next_key += 1;
        HandoffKey(self.next_key)
    }
}

fn aborted(reason: String) -> Input {
    Input::Abort(HandoffFailure::Aborted(reason))
}

/// An offer in the driver's table.
pub(crate) struct OfferOf {
    pub(crate) inbox: Arc<Inbox>,
    pub(crate) key: HandoffKey,
}

impl StandingOffer for OfferOf {
    fn granted(&self, hold: Box<dyn BlockHold>) {
        self.inbox.answered(self.key, Input::Granted(hold));
    }

    fn refused(&self, reason: RefuseReason, detail: String) {
        self.inbox.answered(self.key, Input::Refused { reason, detail });
    }

    fn is_wanted(&self) -> bool {
        self.inbox.is_offered(self.key)
    }

    #[cfg(any(test, feature = "testing"))]
    fn cancel(&self, reason: String) {
        self.inbox.cancel_one(self.key, reason);
    }
}

#[cfg(test)]
mod tests;
