//! Input of the engine's runner: new sequences, wake-ups and the stop request.

use crate::api::{Run, SequenceRequest, SequenceSink, SubmitError};
use crate::fair::{Entered, FairOrder, is_within};
use crate::grammar::SequenceGrammar;
use crate::model::ModelError;
use crate::scheduler::{Prefix, SequenceKey};
use baton_kernels::adapter::PackedAdapter;
use baton_kernels::step::AdapterSlot;
use baton_kv_cache::PrefixHash;
use baton_types::{Share, TenantLabel};
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::task::{Context, Poll, Waker};

/// An accepted sequence on its way to the runner.
pub(crate) struct Submission {
    pub(crate) key: SequenceKey,
    pub(crate) request: SequenceRequest,
    pub(crate) prefix: Option<Prefix>,
    /// Tokens charged to its tenant.
    pub(crate) charged: usize,
    pub(crate) run: Run,
    pub(crate) sink: Box<dyn SequenceSink>,
    pub(crate) cancelled: Arc<AtomicBool>,
    /// Its grammar, where that starts while a step runs.
    pub(crate) grammar: Option<SequenceGrammar>,
}

/// A change of what is loaded in an adapter's slot.
pub(crate) struct AdapterChange {
    pub(crate) slot: AdapterSlot,
    /// `None` frees the slot.
    pub(crate) adapter: Option<Arc<PackedAdapter>>,
    pub(crate) done: Box<dyn FnOnce(Result<(), ModelError>) + Send>,
}

/// Whether a sequence takes one of the `waiting_max` places until it leaves the queue. An adopted one does not.
pub(crate) fn is_counted(run: &Run) -> bool {
    !matches!(run, Run::Adopted { .. })
}

/// Bounded by `waiting_max`, and by twice as many where several tenants wait, so that other tenants cannot take every place of one that has
/// less than its share. Places are taken at [`Mailbox::submit`] and released by [`Mailbox::left_queue`].
#[derive(Default)]
pub(crate) struct Mailbox {
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    submissions: Vec<Submission>,
    /// At most one for each slot.
    adapters: Vec<AdapterChange>,
    arrivals: u64,
    order: FairOrder,
    waiting: usize,
    /// Places taken by each tenant.
    waiting_of: BTreeMap<TenantLabel, (Share, u64)>,
    woken: bool,
    stopped: bool,
    /// The task that waits for input.
    waiter: Option<Waker>,
}

/// Work requested, for its place in the order.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Asked {
    pub(crate) priority: i32,
    pub(crate) share: Share,
    /// Tokens to compute, from which the charge follows.
    pub(crate) tokens: usize,
    /// Its prompt, where it uses the prefix cache.
    pub(crate) prompt: Option<PrefixHash>,
    /// The place that it has already: nothing more is charged for it.
    pub(crate) turn: Option<SequenceKey>,
}

impl State {
    /// Returns a place in the order, and the tokens charged for it.
    fn enter(&mut self, asked: Asked) -> (SequenceKey, usize) {
        if let Some(turn) = asked.turn {
            return (turn, 0);
        }
        let Entered { start, tokens } = self.order.enter(asked.priority, asked.share, asked.tokens, asked.prompt);
        self.arrivals += 1;
        (SequenceKey::new(asked.priority, start, self.arrivals), tokens)
    }

    fn has_something(&self) -> bool {
        self.woken || self.stopped || !self.submissions.is_empty() || !self.adapters.is_empty()
    }
}

/// What [`Mailbox::take`] returns: queued submissions, and whether to stop.
pub(crate) struct Taken {
    pub(crate) submissions: Vec<Submission>,
    pub(crate) adapters: Vec<AdapterChange>,
    pub(crate) stopped: bool,
}

impl Mailbox {
    /// Queues a sequence; `make` gets its place in the order and its charge.
    pub(crate) fn submit(
        &self,
        waiting_max: usize,
        counted: bool,
        asked: Asked,
        make: impl FnOnce(SequenceKey, usize) -> Submission,
    ) -> Result<(), SubmitError> {
        let mut state = self.state.lock();
        if state.stopped {
            return Err(SubmitError::Stopped);
        }
        if counted && state.waiting >= waiting_max {
            let have = state.waiting_of.values().copied();
            if state.waiting >= 2 * waiting_max || !is_within(have, asked.share, 1, waiting_max as u64) {
                return Err(SubmitError::Full { waiting: state.waiting, waiting_max });
            }
        }
        if counted {
            state.waiting += 1;
            state.waiting_of.entry(asked.share.tenant).or_insert((asked.share, 0)).1 += 1;
        }
        let (key, charged) = state.enter(asked);
        state.submissions.push(make(key, charged));
        wake(state);
        Ok(())
    }

    /// Queues a change of an adapter's slot, in place of one that still waits; dropped if the engine is stopped.
    pub(crate) fn change_adapter(&self, change: AdapterChange) {
        let mut state = self.state.lock();
        if !state.stopped {
            state.adapters.retain(|waiting| waiting.slot != change.slot);
            state.adapters.push(change);
            wake(state);
        }
    }

    /// A place in the order for a request that is not a sequence yet.
    pub(crate) fn take_turn(&self, asked: Asked) -> SequenceKey {
        self.state.lock().enter(asked).0
    }

    /// The request with this place is served.
    pub(crate) fn turn_came(&self, key: SequenceKey) {
        self.state.lock().order.served(key.priority(), key.start());
    }

    /// A sequence left the queue. Refunds the charged tokens that will not be computed.
    pub(crate) fn left_queue(&self, key: SequenceKey, share: Share, unused: usize) {
        let mut state = self.state.lock();
        state.waiting -= 1;
        if let Entry::Occupied(mut of) = state.waiting_of.entry(share.tenant) {
            of.get_mut().1 -= 1;
            if of.get().1 == 0 {
                of.remove();
            }
        }
        state.order.give_back(key.priority(), share, unused);
    }

    /// Refunds tokens of a request that is not a sequence yet.
    pub(crate) fn give_back(&self, key: SequenceKey, share: Share, tokens: usize) {
        self.state.lock().order.give_back(key.priority(), share, tokens);
    }

    /// Makes the runner check its state.
    pub(crate) fn wake(&self) {
        let mut state = self.state.lock();
        state.woken = true;
        wake(state);
    }

    /// Refuses further input and makes the runner end.
    pub(crate) fn stop(&self) {
        let mut state = self.state.lock();
        state.stopped = true;
        wake(state);
    }

    /// Takes the input since the last call.
    pub(crate) fn take(&self) -> Taken {
        let mut state = self.state.lock();
        state.woken = false;
        Taken {
            submissions: std::mem::take(&mut state.submissions),
            adapters: std::mem::take(&mut state.adapters),
            stopped: state.stopped,
        }
    }

    /// Ready if there was input since the last [`Mailbox::take`]; otherwise wakes the task that polled last once there is.
    pub(crate) fn poll_changed(&self, cx: &mut Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.has_something() {
            return Poll::Ready(());
        }
        state.waiter = Some(cx.waker().clone());
        Poll::Pending
    }
}

fn wake(mut state: MutexGuard<'_, State>) {
    let waiter = state.waiter.take();
    drop(state);
    waiter.into_iter().for_each(Waker::wake);
}
