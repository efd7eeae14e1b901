//! What other threads ask of the progress thread.

use crate::message::SumRun;
use crate::transport::Wake;
use crate::{
    BlockHold, CommitPayload, FetchOutcome, FetchRequest, HandoffFailure, OpenRequest, Party, Peer, RefuseReason,
    TransferError, TransferReport,
};
use baton_types::{Fence, GroupBlocks, RequestId};
use parking_lot::Mutex;
use std::any::Any;
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;
use tokio::sync::oneshot;

/// Where the outcome of a handoff is told.
pub(crate) type OutcomeSender = oneshot::Sender<Result<TransferReport, HandoffFailure>>;

/// One thing to do.
pub(crate) enum Command {
    /// Offer a sequence to a peer.
    Open { key: u64, peer: Peer, request: OpenRequest, outcome: OutcomeSender },
    /// Read from a peer.
    Fetch { key: u64, peer: Peer, request: FetchRequest, outcome: oneshot::Sender<FetchOutcome> },
    /// A layer was launched.
    Launched { key: u64, layer: u32, tokens_end: usize, fence: Fence },
    /// Everything was launched.
    Finish { key: u64, commit: CommitPayload },
    /// The source, or the reader of a get, gives up.
    Abort { key: u64, reason: String },
    /// The worker reserved blocks.
    Granted { key: u64, hold: Box<dyn BlockHold> },
    /// The worker pinned blocks to be read.
    Pinned { key: u64, blocks: GroupBlocks, hold: Box<dyn Any + Send> },
    /// The worker has no room, or nothing to be read.
    Refused { key: u64, reason: RefuseReason, detail: String },
    /// The worker no longer wants a request that is being received.
    CancelIncoming { keys: Vec<u64>, reason: String },
    /// The worker's late answer to what arrived.
    Adopted { key: u64, answer: Result<(), String> },
    /// Checksums of something that is being sent.
    Summed { key: u64, epoch: u32, run: SumRun },
    /// Checksums compared: how many were right, or where one was wrong.
    Checked { key: u64, result: Result<u64, String> },
    /// The process of this party is proven dead.
    PeerDead(Party),
    /// Wind down by this instant.
    Stop(Instant),
}

/// The queue in front of the progress thread.
///
/// Bounded by what may be open: `outgoing_max` handoffs of `launches_max` commands each, and one answer and one cancellation for each
/// handoff that is being received. A handoff that exceeds its share is aborted, so no engine thread ever waits here.
pub(crate) struct Inbox {
    state: Mutex<State>,
    asleep: AtomicBool,
    /// A thread of the service panicked.
    failed: AtomicBool,
    wake: Wake,
    outgoing_max: usize,
}

#[derive(Default)]
struct State {
    queue: Vec<Command>,
    next_key: u64,
    /// Live outgoing handoffs, with the number of launches queued for each.
    outgoing: HashMap<u64, usize>,
    /// Offers that wait for their answer.
    offered: HashSet<u64>,
    /// Handoffs being received, by request, and those whose cancellation is queued.
    incoming: HashMap<RequestId, Vec<u64>>,
    cancelled: HashSet<u64>,
    stopped: bool,
}

impl Inbox {
    /// Most launches of one handoff that wait for the progress thread: 4096 layers of 16 chunks.
    const LAUNCHES_MAX: usize = 1 << 16;

    pub(crate) fn new(outgoing_max: usize, wake: Wake) -> Self {
        Self {
            state: Mutex::default(),
            asleep: AtomicBool::new(false),
            failed: AtomicBool::new(false),
            wake,
            outgoing_max,
        }
    }

    pub(crate) fn open(&self, peer: Peer, request: OpenRequest, outcome: OutcomeSender) -> Result<u64, TransferError> {
        self.admit(|key| Command::Open { key, peer, request, outcome })
    }

    pub(crate) fn fetch(
        &self,
        peer: Peer,
        request: FetchRequest,
        outcome: oneshot::Sender<FetchOutcome>,
    ) -> Result<u64, TransferError> {
        self.admit(|key| Command::Fetch { key, peer, request, outcome })
    }

    fn admit(&self, command: impl FnOnce(u64) -> Command) -> Result<u64, TransferError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(TransferError::Stopped);
        }
        if state.outgoing.len() >= self.outgoing_max {
            return Err(TransferError::TooManyHandoffs { limit: self.outgoing_max });
        }
        let key = state.new_key();
        state.outgoing.insert(key, 0);
        state.queue.push(command(key));
        drop(state);
        self.rouse();
        Ok(key)
    }

    pub(crate) fn launched(&self, key: u64, layer: u32, tokens_end: usize, fence: Fence) {
        let mut state = self.state.lock();
        let Some(queued) = state.outgoing.get_mut(&key) else { return };
        *queued += 1;
        let command = match *queued {
            n if n <= Self::LAUNCHES_MAX => Command::Launched { key, layer, tokens_end, fence },
            n if n == Self::LAUNCHES_MAX + 1 => Command::Abort { key, reason: "too many launches are queued".into() },
            _ => return,
        };
        state.queue.push(command);
        drop(state);
        self.rouse();
    }

    pub(crate) fn finish(&self, key: u64, commit: CommitPayload) {
        self.push_for(key, Command::Finish { key, commit });
    }

    pub(crate) fn abort(&self, key: u64, reason: String) {
        self.push_for(key, Command::Abort { key, reason });
    }

    fn push_for(&self, key: u64, command: Command) {
        let mut state = self.state.lock();
        if state.outgoing.contains_key(&key) {
            state.queue.push(command);
            drop(state);
            self.rouse();
        }
    }

    /// The outgoing handoff ended; whatever comes for it from now on is ignored.
    pub(crate) fn outgoing_ended(&self, key: u64) {
        self.state.lock().outgoing.remove(&key);
    }

    /// A key for an offer of this request, whose answer is awaited.
    pub(crate) fn offer(&self, request_id: &RequestId) -> u64 {
        let mut state = self.state.lock();
        let key = state.new_key();
        state.offered.insert(key);
        state.incoming.entry(request_id.clone()).or_default().push(key);
        key
    }

    /// The offer ended; its answer is no longer wanted, and there is nothing to cancel.
    pub(crate) fn offer_ended(&self, key: u64, request_id: &RequestId) {
        let mut state = self.state.lock();
        state.offered.remove(&key);
        if let Some(keys) = state.incoming.get_mut(request_id) {
            keys.retain(|k| *k != key);
            if keys.is_empty() {
                state.incoming.remove(request_id);
            }
        }
    }

    /// Queues the cancellation of what is being received of this request, each handoff once.
    pub(crate) fn cancel_incoming(&self, request_id: &RequestId, reason: String) {
        let mut state = self.state.lock();
        let State { queue, incoming, cancelled, .. } = &mut *state;
        let known = incoming.get(request_id).into_iter().flatten();
        let keys: Vec<u64> = known.copied().filter(|key| cancelled.insert(*key)).collect();
        if !keys.is_empty() {
            queue.push(Command::CancelIncoming { keys, reason });
            drop(state);
            self.rouse();
        }
    }

    pub(crate) fn is_offered(&self, key: u64) -> bool {
        self.state.lock().offered.contains(&key)
    }

    /// An answer for a live offer is queued; otherwise the hold is dropped, here and outside of the lock.
    pub(crate) fn granted(&self, key: u64, hold: Box<dyn BlockHold>) {
        let mut state = self.state.lock();
        if state.offered.remove(&key) {
            state.queue.push(Command::Granted { key, hold });
            drop(state);
            self.rouse();
        }
    }

    /// As [`Inbox::granted`], for a question for blocks to read.
    pub(crate) fn pinned(&self, key: u64, blocks: GroupBlocks, hold: Box<dyn Any + Send>) {
        let mut state = self.state.lock();
        if state.offered.remove(&key) {
            state.queue.push(Command::Pinned { key, blocks, hold });
            drop(state);
            self.rouse();
        }
    }

    pub(crate) fn adopted(&self, key: u64, answer: Result<(), String>) {
        self.push(Command::Adopted { key, answer });
    }

    pub(crate) fn refused(&self, key: u64, reason: RefuseReason, detail: String) {
        let mut state = self.state.lock();
        if state.offered.remove(&key) {
            state.queue.push(Command::Refused { key, reason, detail });
            drop(state);
            self.rouse();
        }
    }

    pub(crate) fn push(&self, command: Command) {
        let mut state = self.state.lock();
        if !state.stopped {
            state.queue.push(command);
            drop(state);
            self.rouse();
        }
    }

    /// Takes everything queued.
    pub(crate) fn drain(&self) -> Vec<Command> {
        let mut state = self.state.lock();
        if state.queue.is_empty() {
            return Vec::new();
        }
        state.outgoing.values_mut().for_each(|queued| *queued = 0);
        state.cancelled.clear();
        std::mem::take(&mut state.queue)
    }

    /// Announces that the progress thread is about to sleep; `false` if there is work after all.
    pub(crate) fn may_sleep(&self) -> bool {
        self.asleep.store(true, Ordering::SeqCst);
        let idle = self.state.lock().queue.is_empty() && !self.has_failed();
        if !idle {
            self.asleep.store(false, Ordering::SeqCst);
        }
        idle
    }

    /// A thread of the service panicked: the progress thread is to fail what is open and end.
    pub(crate) fn fail(&self) {
        self.failed.store(true, Ordering::SeqCst);
        self.rouse();
    }

    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::SeqCst)
    }

    /// The progress thread is awake.
    pub(crate) fn awake(&self) {
        self.asleep.store(false, Ordering::SeqCst);
    }

    /// Takes nothing more, and drops what is queued.
    pub(crate) fn close(&self) {
        let left = {
            let mut state = self.state.lock();
            state.stopped = true;
            state.outgoing.clear();
            state.offered.clear();
            state.incoming.clear();
            std::mem::take(&mut state.queue)
        };
        drop(left); // Outside of the lock: holds run the worker's code.
    }

    /// Wakes the progress thread if it sleeps.
    pub(crate) fn rouse(&self) {
        if self.asleep.swap(false, Ordering::SeqCst) {
            (self.wake)();
        }
    }
}

impl State {
    fn new_key(&mut self) -> u64 {
        self.next_key += 1;
        self.next_key
    }
}

#[cfg(test)]
#[path = "inbox_tests.rs"]
mod tests;
