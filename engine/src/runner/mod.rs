//! One loop iteration of the engine: finish the oldest step, drain the mailbox, plan, launch the next step. Decisions are in the scheduler;
//! the caller of the iterations is not known here.
//!
//! An asynchronous device always has one step ahead: it is launched while another runs, for sequences that only a sampled end token could
//! stop. Blocks of a sequence that ends meanwhile are released when the last step that uses them is finished.

mod drafts;
mod proposals;
mod sequence;
mod slots;
mod step;
#[cfg(test)]
mod tests;

use crate::api::{SequenceEvent, SubmitError};
use crate::draft_model::DraftRunner;
use crate::gaps::StepGaps;
use crate::gate::{SequenceGate, SequencePhase};
use crate::mailbox::{AdapterChange, Submission, is_counted};
use crate::model::ModelError;
use crate::rates::Rates;
use crate::scheduler::{Conditions, Decisions, End, Scheduler, SchedulerConfig, SequenceKey};
use crate::shared::Shared;
use crate::speculation::Speculation;
use crate::step_model::StepModel;
use baton_kernels::device::STEPS_MAX;
use baton_kv_cache::{ForkCopy, Lease};
use baton_types::{ErrorKind, seeded};
use sequence::Sequence;
pub(crate) use sequence::{Common, start_grammar};
use slots::Slots;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};
use step::{Retired, Step};

/// How soon the engine checks paused or held sequences again: short compared with a token's time, long compared with the check.
const RECHECK: Duration = Duration::from_millis(5);

/// How often expired cache entries are evicted; the scan takes time for each pin.
const EXPIRE_EVERY: Duration = Duration::from_secs(1);

/// Result of a turn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// A step is running. The next turn waits for it and finishes it.
    Launched,
    /// Nothing can run.
    Idle {
        /// Until this instant, or until there is input.
        until: Option<Instant>,
    },
    /// The stop was requested.
    Ended,
}

/// State of a running engine.
pub(crate) struct Runner<M> {
    model: M,
    shared: Arc<Shared>,
    scheduler: Scheduler,
    sequences: BTreeMap<SequenceKey, Sequence>,
    slots: Slots,
    /// The steps that were launched and are not finished, oldest first; at most `steps_max`.
    steps: VecDeque<Step>,
    steps_max: usize,
    /// When the last step was finished.
    finished_at: Option<Instant>,
    /// When the device's last step was finished, while the engine looks for the next one.
    free_from: Option<Instant>,
    gaps: StepGaps,
    rates: Rates,
    /// `None` if it is off.
    speculation: Option<Speculation>,
    /// `None` if there is none, or it failed.
    draft: Option<DraftRunner>,
    /// How long it took for the step that is launched next.
    drafting: Duration,
    generated_tokens: u64,
    cached_tokens: u64,
    preemptions: u64,
    /// When to look for expired cache entries next.
    expires_at: Option<Instant>,
}

/// What tells the runner that it has something to look at.
pub(crate) fn wake(shared: &Arc<Shared>) -> impl FnOnce() + Send + 'static {
    let shared = Arc::downgrade(shared);
    move || {
        if let Some(shared) = shared.upgrade() {
            shared.mailbox.wake();
        }
    }
}

pub(crate) fn common(shared: &Shared) -> Common<'_> {
    let grammars = shared.grammars.read().clone();
    Common { vocab: shared.vocab, end_tokens: &shared.config.end_tokens, grammars }
}

/// Sinks and gates as of one instant.
struct Now<'a> {
    sequences: &'a BTreeMap<SequenceKey, Sequence>,
    len_max: usize,
    gate: Option<Arc<dyn SequenceGate>>,
    is_retiring: bool,
}

impl Conditions for Now<'_> {
    fn has_room(&self, key: SequenceKey) -> bool {
        // For a token or a part of the prompt, and the end, after what launched steps will yield.
        let sequence = &self.sequences[&key];
        sequence.sink.has_room(2 + usize::from(sequence.scores()) + sequence.launched_scores + sequence.launched_tokens)
    }

    fn continues(&self, key: SequenceKey) -> bool {
        self.sequences[&key].continues(self.len_max)
    }

    fn is_open(&self, key: SequenceKey, phase: SequencePhase) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.is_open(&self.sequences[&key].request.id, phase))
    }

    fn is_prepared(&self, key: SequenceKey) -> bool {
        self.sequences[&key].is_prepared()
    }

    fn is_retiring(&self) -> bool {
        self.is_retiring
    }
}

impl<M: StepModel> Runner<M> {
    pub(crate) fn new(model: M, draft: Option<DraftRunner>, shared: Arc<Shared>) -> Self {
        let steps_max = if model.is_asynchronous() { STEPS_MAX } else { 1 };
        let config = SchedulerConfig {
            block_tokens: shared.block_tokens,
            chunk_tokens_max: shared.config.chunk_tokens_max,
            mixed_chunk_tokens_max: shared.config.mixed_chunk_tokens_max,
            steps_max,
            running_max: shared.config.running_max,
            scored_rows_max: shared.config.scored_rows_max(),
            watermark_blocks: shared.config.watermark_blocks as usize,
            stall: shared.config.stall,
            recheck: RECHECK,
        };
        let scheduler = Scheduler::new(config, shared.pool.clone());
        let slots = Slots::new(shared.config.running_max);
        let speculation = Speculation::new(&shared.config.speculation, shared.config.logit_rows_max());
        Self {
            model,
            shared,
            scheduler,
            sequences: BTreeMap::new(),
            slots,
            steps: VecDeque::new(),
            steps_max,
            finished_at: None,
            free_from: None,
            gaps: StepGaps::default(),
            rates: Rates::default(),
            speculation,
            draft,
            drafting: Duration::ZERO,
            generated_tokens: 0,
            cached_tokens: 0,
            preemptions: 0,
            expires_at: None,
        }
    }

    pub(crate) fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    pub(crate) fn leases(&self) -> impl Iterator<Item = &Lease> {
        let retired = self.steps.iter().flat_map(|step| &step.retired).filter_map(|retired| retired.lease.as_ref());
        self.sequences.keys().filter_map(|key| self.scheduler.lease(*key)).chain(retired)
    }

    /// Finishes the oldest step, if any, and launches as many as may run. An error comes from the device or is a defect: no KV can be trusted
    /// after it.
    pub(crate) fn turn(&mut self) -> Result<Turn, ModelError> {
        self.finish_oldest()?;
        loop {
            if self.take_in()? {
                while self.finish_oldest()? {}
                return Ok(Turn::Ended);
            }
            self.end_early();
            let now = self.shared.clock.now();
            self.expire(now);
            if self.awaits_tokens() {
                return Ok(Turn::Launched);
            }
            let Decisions { batch, wake_at, .. } = self.plan(now);
            let is_over = batch.is_empty();
            if !is_over {
                let step = self.launch_step(batch)?;
                self.steps.push_back(step);
            }
            if self.steps.is_empty() {
                self.free_from = None;
                return Ok(Turn::Idle { until: wake_at.into_iter().chain(self.expires_at).min() });
            }
            if is_over || self.steps.len() >= self.steps_max {
                return Ok(Turn::Launched);
            }
        }
    }

    /// Plans a step, and carries out everything but the step itself.
    fn plan(&mut self, now: Instant) -> Decisions {
        let (sequences, len_max) = (&self.sequences, self.shared.len_max());
        let is_retiring = self.steps.iter().any(Step::is_retiring);
        let conditions = Now { sequences, len_max, gate: self.shared.gate.read().clone(), is_retiring };
        self.scheduler.measured(f64::from(self.rates.prefill_tokens_per_s()));
        let mut decisions = self.scheduler.plan(now, &conditions);
        self.shared.starved.store(decisions.starved, Ordering::Release);
        *self.shared.accounts.lock() = Some(self.scheduler.accounts().clone());
        self.apply(&decisions.preempted, &decisions.started, now);
        self.prepare(&decisions.to_prepare);
        self.propose(&mut decisions);
        std::mem::take(&mut decisions.ended)
            .into_iter()
            .for_each(|(key, end, lease)| self.end_overdue(key, end, lease));
        self.publish();
        self.shared.health.alive(now, !decisions.batch.is_empty() || !self.steps.is_empty());
        decisions
    }

    /// Refuses further input, and ends every sequence with the reason: the engine was stopped, or the failure.
    pub(crate) fn end(&mut self, failure: Option<String>) {
        if let Some(failure) = &failure {
            self.shared.health.failed.store(true, Ordering::Release);
            tracing::error!("{failure}; every sequence fails and the engine stays down: restart this worker");
        }
        self.shared.mailbox.stop();
        let (kind, message) = match failure {
            Some(failure) => (ErrorKind::Internal, failure),
            None => (ErrorKind::Unavailable, SubmitError::Stopped.to_string()),
        };
        // Steps that are left failed with the device.
        let retired: Vec<_> = self.steps.drain(..).flat_map(|step| step.retired).collect();
        retired.into_iter().for_each(|retired| self.release(retired));
        // More may have come between the last check and the stop.
        let late = self.shared.mailbox.take().submissions;
        late.into_iter().for_each(|submission| self.accept(submission));
        while let Some(key) = self.sequences.keys().next().copied() {
            let lease = self.scheduler.remove(key);
            self.end_sequence(key, lease, SequenceEvent::Failed { kind, message: message.clone() });
        }
        self.publish();
    }

    /// Evicts expired cache entries at intervals, while the cache is not empty.
    fn expire(&mut self, now: Instant) {
        if self.expires_at.is_some_and(|at| at <= now) {
            self.shared.pool.expire(now);
            self.expires_at = None;
        }
        if self.expires_at.is_none() && self.shared.pool.cache_counts().blocks > 0 {
            self.expires_at = Some(now + EXPIRE_EVERY);
        }
    }

    /// Takes in new input, turns of reservations first; `true` if the stop was requested.
    fn take_in(&mut self) -> Result<bool, ModelError> {
        let taken = self.shared.mailbox.take();
        self.scheduler.keep_for(*self.shared.awaited.lock());
        self.change_adapters(taken.adapters)?;
        for submission in taken.submissions {
            let key = submission.key;
            self.accept(submission);
            if let Some(copy) = self.scheduler.fork_for_new(key) {
                self.copy(&[copy])?;
            }
        }
        Ok(taken.stopped)
    }

    /// Loads and frees adapters. What does not fit is reported to whoever asked.
    fn change_adapters(&mut self, changes: Vec<AdapterChange>) -> Result<(), ModelError> {
        for AdapterChange { slot, adapter, done } in changes {
            // The device keeps an adapter until it knows that the last sequence with it is gone, and an idle engine launches no step.
            self.model.leave(&self.slots.take_left())?;
            let digest = adapter.as_ref().map(|adapter| adapter.digest());
            let changed = self.model.set_adapter(slot, adapter);
            if changed.is_ok() {
                let mut loaded = self.shared.adapters.lock();
                match digest {
                    Some(digest) => loaded.insert(slot, digest),
                    None => loaded.remove(&slot),
                };
            }
            done(changed);
        }
        Ok(())
    }

    /// Runs block copies, which are device work like a step.
    fn copy(&mut self, copies: &[ForkCopy]) -> Result<(), ModelError> {
        copies.iter().try_for_each(|copy| {
            self.shared.health.alive(self.shared.clock.now(), true);
            self.model.copy(copy)
        })
    }

    fn accept(&mut self, submission: Submission) {
        let (key, counted) = (submission.key, is_counted(&submission.run));
        let common = common(&self.shared);
        let (sequence, arrival) = Sequence::new(submission, counted, &common);
        self.scheduler.add(key, arrival);
        self.sequences.insert(key, sequence);
    }

    /// Ends sequences that were cancelled, and those whose grammars failed.
    fn end_early(&mut self) {
        let ends = self.sequences.iter().filter_map(|(key, sequence)| Some((*key, sequence.ends_early()?)));
        for (key, end) in ends.collect::<Vec<_>>() {
            let lease = self.scheduler.remove(key);
            self.end_sequence(key, lease, end);
        }
    }

    fn end_overdue(&mut self, key: SequenceKey, end: End, lease: Option<Lease>) {
        let (kind, message) = match end {
            End::Deadline => (ErrorKind::DeadlineExceeded, "the deadline passed".to_owned()),
            End::Stalled => {
                (ErrorKind::Cancelled, format!("the answer was not read for {:?}", self.shared.config.stall))
            }
        };
        self.end_sequence(key, lease, SequenceEvent::Failed { kind, message });
    }

    fn apply(&mut self, preempted: &[SequenceKey], started: &[SequenceKey], now: Instant) {
        self.preemptions += preempted.len() as u64;
        preempted.iter().for_each(|key| {
            self.slots.leave(*key);
            self.leave_draft(*key);
        });
        for key in started {
            let (Some(sequence), Some(lease)) = (self.sequences.get_mut(key), self.scheduler.lease(*key)) else {
                continue;
            };
            let cached = self.scheduler.computed(*key);
            sequence.start(lease.tables(), cached, &self.shared.layers, now);
            // The turn of an adopted sequence came with its grant.
            if std::mem::take(&mut sequence.counted) {
                self.shared.mailbox.turn_came(*key);
                let unused = std::mem::take(&mut sequence.charged).min(cached);
                self.shared.mailbox.left_queue(*key, sequence.request.share, unused);
            }
        }
    }

    fn prepare(&mut self, keys: &[SequenceKey]) {
        let common = common(&self.shared);
        for key in keys {
            if let Some(sequence) = self.sequences.get_mut(key) {
                sequence.prepare(&common, wake(&self.shared));
            }
        }
    }

    /// Ends a sequence. Its blocks are freed before the event is sent, or with the last launched step that uses them.
    fn end_sequence(&mut self, key: SequenceKey, lease: Option<Lease>, event: SequenceEvent) {
        let Some(mut sequence) = self.sequences.remove(&key) else { return };
        self.slots.leave(key);
        self.leave_draft(key);
        if sequence.counted {
            let charged = self.hand_on_charge(key, &sequence);
            self.shared.mailbox.left_queue(key, sequence.request.share, charged);
        }
        let cold = sequence.cold_hashes().map(<[_]>::to_vec);
        let retired = Retired { observer: sequence.observer.take(), lease, cold };
        match self.steps.iter_mut().rev().find(|step| step.has(key)) {
            Some(last) if !seeded!(EarlyReuse) => last.retired.push(retired),
            _ => self.release(retired),
        }
        // If the receiver is gone, the event is dropped.
        let _ = sequence.sink.send(event);
    }

    /// Releases the blocks of a sequence that ended: to the observer, which may still read them, otherwise to the pool.
    fn release(&self, retired: Retired) {
        let Retired { observer, lease, cold } = retired;
        if let (Some(mut observer), Some(lease)) = (observer, lease) {
            observer.ended(lease);
        }
        if let Some(hashes) = cold {
            self.shared.pool.demote(&hashes);
        }
    }

    /// A waiting sequence ends. If another one with its prompt still waits, that one computes the prompt, and takes the charge over.
    /// Returns the tokens that nobody computes.
    fn hand_on_charge(&mut self, key: SequenceKey, ended: &Sequence) -> usize {
        let is_sibling = |other: &SequenceKey, sequence: &Sequence| {
            let same_turn = (other.priority(), other.start()) == (key.priority(), key.start());
            same_turn && sequence.counted && sequence.is_sibling(ended)
        };
        match self.sequences.iter_mut().find(|(other, sequence)| is_sibling(other, sequence)) {
            Some((_, sibling)) => {
                sibling.charged += ended.charged;
                0
            }
            None => ended.charged,
        }
    }

    fn publish(&self) {
        let totals = self.scheduler.totals();
        let mut load = self.shared.load.lock();
        load.waiting = totals.waiting;
        load.waiting_tokens = totals.waiting_tokens;
        load.running = totals.running;
        load.running_tokens = totals.running_tokens;
        load.prefill_tokens_per_s = self.rates.prefill_tokens_per_s();
        load.decode_steps_per_s = self.rates.decode_steps_per_s();
        load.gaps = self.gaps;
        load.generated_tokens = self.generated_tokens;
        if let Some(speculation) = &self.speculation {
            let (all, drafted) = (speculation.counts(), speculation.draft_counts());
            (load.proposed_tokens, load.accepted_tokens) = (all.proposed, all.accepted);
            (load.draft_proposed_tokens, load.draft_accepted_tokens) = (drafted.proposed, drafted.accepted);
        }
        load.draft_blocks = self.draft.as_ref().map_or(0, DraftRunner::blocks);
        load.cached_tokens = self.cached_tokens;
        load.recomputed_tokens = self.scheduler.recomputed();
        load.slots = totals.blocks * self.shared.block_tokens;
        load.slots_unused = load.slots - totals.held_tokens;
        load.preemptions = self.preemptions;
    }
}
