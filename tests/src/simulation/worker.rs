//! One start of a worker: its pool, its engine, its handoffs, and the streams that routers hold to it.

use super::clock::{Addr, Fifo, Time, ms};
use super::engine::Engine;
use super::event::{Event, Said, Trouble};
use super::handoff::{Pouch, Sending, Shipment};
use super::model::{Memory, layout};
use super::receive::{Incoming, Waiting};
use super::world::World;
use baton_decode_worker::grants::claims::{Claim, ClaimLimits, Claims, OfferError};
use baton_engine::scheduler::{Scheduler, SchedulerConfig, SequenceKey};
use baton_kv_cache::{Lease, SharedPool};
use baton_kv_transfer::HandoffFailure;
use baton_prefill_worker::handoff_error;
use baton_types::{ErrorKind, InstanceRecord, Party, RequestError, RequestId, Role, TokenId};
use std::cell::RefCell;
use std::collections::{BTreeMap, VecDeque};
use std::mem::ManuallyDrop;
use std::rc::Weak;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// The real claims, with the stream behind each.
#[derive(Debug)]
pub(super) struct Booked {
    claims: Claims<usize>,
    sources: BTreeMap<RequestId, (Party, usize)>,
}

impl Booked {
    fn book(&mut self, request: RequestId, claim: Claim<usize>) -> Result<(), RequestError> {
        let named = (claim.source.clone(), claim.stream);
        self.claims.book(request.clone(), claim)?;
        self.sources.insert(request, named);
        Ok(())
    }

    /// Whom a claim names.
    pub(super) fn peek(&self, request: &RequestId) -> Option<Party> {
        self.sources.get(request).map(|(party, _)| party.clone())
    }

    /// Whether no other stream has the claim of this name, as only a defect lets it be.
    fn is_of(&self, request: &RequestId, call: usize) -> bool {
        self.sources.get(request).is_none_or(|(_, stream)| *stream == call)
    }

    pub(super) fn offered(&mut self, request: &RequestId, source: &Party, tokens: u32) -> Result<(), OfferError> {
        self.claims.offered(request, source, tokens).map(|_| ())
    }

    pub(super) fn take(&mut self, request: &RequestId) -> Option<usize> {
        self.sources.remove(request);
        self.claims.take(request).map(|claim| claim.stream)
    }

    fn end(&mut self, request: &RequestId) {
        self.sources.remove(request);
        self.claims.end(request);
    }

    pub(super) fn tokens(&self) -> u64 {
        self.claims.tokens()
    }
}

/// A stream as the worker sees it.
#[derive(Debug, Default)]
pub(super) struct WorkerCall {
    pub(super) sequence: Option<SequenceKey>,
    /// Its KV came from elsewhere.
    pub(super) adopted: bool,
    /// Waits for KV, under a claim.
    is_claim: bool,
    pub(super) shipment: Option<Shipment>,
    /// The prefill's token was said.
    pub(super) first: bool,
}

/// One start of a worker.
#[derive(Debug)]
pub(super) struct Worker {
    pub(super) record: Arc<InstanceRecord>,
    pub(super) memory: Memory,
    pub(super) pool: SharedPool,
    freed: Arc<AtomicBool>,
    pub(super) engine: Engine,
    pub(super) wake: Option<Time>,
    pub(super) ticking: bool,
    pub(super) calls: BTreeMap<usize, WorkerCall>,
    pub(super) claims: Booked,
    pub(super) waiting: VecDeque<Waiting>,
    /// Which offer waits although nobody uses a block, and since when.
    pub(super) stuck: Option<(u64, Time)>,
    /// Blocks on their way from the worker to the transfer.
    pub(super) granting: BTreeMap<u64, Lease>,
    /// Second owners of blocks whose handoffs were committed, kept by a defect.
    pub(super) aliases: BTreeMap<RequestId, ManuallyDrop<Lease>>,
    pub(super) sending: BTreeMap<u64, Sending>,
    pub(super) incoming: BTreeMap<u64, Incoming>,
    /// All that may hold blocks of a prefill.
    pub(super) pouches: Vec<Weak<RefCell<Option<Lease>>>>,
    pub(super) checker: Fifo,
    pub(super) next_key: u64,
}

/// Most sequences in a worker's queue.
pub(super) const WAITING_MAX: usize = 8;

impl World {
    pub(super) fn new_worker(&mut self, w: usize, record: InstanceRecord) -> Worker {
        let block_tokens = record.layout.block_tokens();
        let is_prefill = w < self.shape.routers + self.shape.prefills;
        let blocks = if is_prefill { self.shape.prefill_blocks } else { self.shape.blocks } * 16 / block_tokens;
        let pool = SharedPool::try_new(1, blocks).expect("a small pool");
        let freed = Arc::new(AtomicBool::new(false));
        let told = freed.clone();
        pool.on_freed(move || told.store(true, Ordering::Relaxed));
        let config = SchedulerConfig {
            block_tokens: block_tokens as usize,
            chunk_tokens_max: self.shape.chunk_tokens,
            running_max: self.shape.running_max,
            watermark_blocks: self.shape.watermark,
            stall: self.shape.stall,
            recheck: self.shape.recheck,
        };
        let capacity = u64::from(blocks * block_tokens);
        let claims = Claims::new(ClaimLimits { claims_max: WAITING_MAX, tokens_max: 2 * capacity });
        let next_key = w as u64 * 1_000_000 + self.procs[w].incarnation * 10_000;
        Worker {
            record: Arc::new(InstanceRecord { capacity_tokens: capacity, ..record }),
            memory: Memory::new(block_tokens, blocks),
            engine: Engine::new(Scheduler::new(config, pool.clone())),
            pool,
            freed,
            wake: None,
            ticking: false,
            calls: BTreeMap::new(),
            claims: Booked { claims, sources: BTreeMap::new() },
            waiting: VecDeque::new(),
            stuck: None,
            granting: BTreeMap::new(),
            aliases: BTreeMap::new(),
            sending: BTreeMap::new(),
            incoming: BTreeMap::new(),
            pouches: Vec::new(),
            checker: Fifo::default(),
            next_key,
        }
    }

    /// The pool that prefill workers write to.
    pub(super) fn sink_map(&self) -> baton_types::KvPoolMap {
        let size = self.shape.decode_block_tokens;
        baton_types::KvPoolMap::try_new(layout(size), self.shape.blocks * 16 / size).expect("a small pool")
    }

    /// A router opens a stream.
    pub(super) fn opened(&mut self, w: usize, call: usize) {
        let now = self.clock.now();
        let here = self.addr(w);
        let spec = &mut self.calls[call];
        if !spec.router_open {
            return;
        }
        (spec.worker, spec.worker_open) = (here, true);
        let (deadline, tokens, role) = (spec.deadline, spec.tokens.clone(), spec.role);
        let (name, source) = (spec.name.clone(), spec.source.clone());
        if deadline <= now {
            return self.refuse(w, call, ErrorKind::DeadlineExceeded);
        }
        let (at, reuses_names) = (self.clock.instant(deadline), self.mutant.reuses_names());
        let Some(worker) = self.worker_mut(w) else { return };
        if tokens.len() as u64 >= worker.record.capacity_tokens {
            return self.refuse(w, call, ErrorKind::ContextLengthExceeded);
        }
        let is_full = worker.engine.waiting() >= WAITING_MAX;
        match source {
            Some(source) if role == Role::Decode => {
                let claim = Claim { source, tokens: tokens.len() as u32, deadline: at, offered: false, stream: call };
                if reuses_names {
                    worker.claims.end(&name);
                }
                if let Err(error) = worker.claims.book(name, claim) {
                    self.counts.moved("claim", "none", error.kind.name());
                    return self.refuse(w, call, error.kind);
                }
                worker.calls.insert(call, WorkerCall { is_claim: true, ..Default::default() });
                self.counts.moved("claim", "none", "booked");
                self.say(w, call, Said::Claimed);
            }
            _ if is_full => return self.refuse(w, call, ErrorKind::Overloaded),
            _ => {
                worker.calls.insert(call, WorkerCall::default());
                if role == Role::Decode {
                    self.say(w, call, Said::Claimed);
                }
                self.submit(w, call, tokens, None, role == Role::Prefill);
            }
        }
        self.clock.post(deadline, here, Event::CallDeadline { call });
    }

    fn refuse(&mut self, w: usize, call: usize, kind: ErrorKind) {
        let here = self.addr(w);
        self.send_said(here, call, Said::Error(Trouble::new(kind)));
    }

    /// Tells the router. An error is the last word, and takes everything of the stream with it.
    pub(super) fn say(&mut self, w: usize, call: usize, said: Said) {
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(state) = worker.calls.get_mut(&call) else { return };
        state.first |= matches!(said, Said::Token { .. });
        let is_last = match &said {
            Said::Error(_) | Said::Done => true,
            Said::Token { ends, .. } => *ends && self.calls[call].role == Role::Decode,
            _ => false,
        };
        let here = self.addr(w);
        self.send_said(here, call, said);
        if is_last {
            self.hang_up(w, call);
        }
    }

    /// The end of a stream, whatever the reason: nothing of it stays here.
    pub(super) fn hang_up(&mut self, w: usize, call: usize) {
        let here = self.addr(w);
        let name = self.calls[call].name.clone();
        self.calls[call].worker_open = false;
        let Some(worker) = self.worker_mut(w) else { return };
        let Some(state) = worker.calls.remove(&call) else { return };
        let cancelled = state.sequence.and_then(|key| worker.engine.sequences.get_mut(&key));
        let was_running = cancelled.is_some();
        if let Some(sequence) = cancelled {
            sequence.cancelled = true;
        }
        let waits = worker.claims.peek(&name).is_some();
        if state.is_claim && worker.claims.is_of(&name, call) {
            worker.claims.end(&name);
            if !was_running && !waits {
                worker.aliases.remove(&name); // It was over before.
            }
            self.forget_waiting(w, &name);
            // The transfer has a queue of its own: what comes before this in it finds the claim gone.
            let at = self.clock.now() + self.delay() + self.draw(ms(20) as usize) as Time;
            if !self.mutant.reuses_names() {
                self.clock.post(at, here, Event::CancelIncoming { request: name });
            }
            if waits {
                self.counts.moved("claim", "booked", "ended with its stream");
            }
            if was_running {
                self.counts.add("cancel x commit", "adopted, then cancelled");
            }
        }
        if let Some(shipment) = state.shipment {
            self.abort(w, shipment.key);
        }
        self.post(here, Event::Engine);
    }

    /// The deadline of a stream.
    pub(super) fn call_deadline(&mut self, w: usize, call: usize) {
        self.say(w, call, Said::Error(Trouble::new(ErrorKind::DeadlineExceeded)));
    }

    /// KV arrived whole for a claim: its sequence runs.
    pub(super) fn adopt(&mut self, w: usize, call: usize, tokens: Vec<TokenId>, lease: Lease) {
        let Some(state) = self.worker_mut(w).and_then(|w| w.calls.get_mut(&call)) else { return };
        state.adopted = true;
        self.say(w, call, Said::Adopted);
        self.submit(w, call, tokens, Some(lease), false);
    }

    /// A prefill has its token: its KV goes out, unless the answer ends with it.
    pub(super) fn prefilled(&mut self, w: usize, call: usize, tokens: Vec<TokenId>, ends: bool) {
        let prompt_len = self.calls[call].prompt_len as u32;
        let Some(state) = self.worker_mut(w).and_then(|w| w.calls.get_mut(&call)) else { return };
        let Some(shipment) = &mut state.shipment else { return };
        shipment.sealed = !ends;
        let key = shipment.key;
        if ends {
            self.say(w, call, Said::Done);
        } else {
            self.seal(w, key, tokens, prompt_len);
        }
    }

    /// How a handoff went: before the token the prompt may be served elsewhere, and need not be computed.
    pub(super) fn shipped(&mut self, w: usize, call: usize, key: u64, failure: Option<HandoffFailure>) {
        let Some(state) = self.worker_mut(w).and_then(|w| w.calls.get_mut(&call)) else { return };
        if state.shipment.is_none_or(|s| s.key != key) {
            return;
        }
        let first = state.first;
        state.shipment = None;
        let error = failure.map(|failure| handoff_error(&failure, first));
        let trouble = error.map(|error| Trouble { kind: error.kind, retry_after: error.retry_after });
        self.say(w, call, trouble.map_or(Said::Done, Said::Error));
    }

    /// Deadlines of handoffs are looked at as long as there are any.
    pub(super) fn tick_soon(&mut self, w: usize) {
        let (at, here) = (self.clock.now() + self.shape.tick, self.addr(w));
        let Some(worker) = self.worker_mut(w) else { return };
        if !std::mem::replace(&mut worker.ticking, true) {
            self.clock.post(at, here, Event::Tick);
        }
    }

    pub(super) fn tick(&mut self, w: usize) {
        let Some(worker) = self.worker_mut(w) else { return };
        worker.ticking = false;
        let (sending, incoming): (Vec<u64>, Vec<u64>) =
            (worker.sending.keys().copied().collect(), worker.incoming.keys().copied().collect());
        let idle = sending.is_empty() && worker.incoming.values().all(|i| i.sink.is_quarantined());
        sending.into_iter().for_each(|key| self.source_input(w, key, baton_kv_transfer::pure::SourceInput::Tick));
        incoming.into_iter().for_each(|key| self.sink_input(w, key, baton_kv_transfer::pure::SinkInput::Tick));
        self.ask_waiting(w);
        // The engine keeps room back while it lacks blocks, and says nothing when it no longer does.
        self.grant_waiting(w);
        if !idle {
            self.tick_soon(w);
        }
    }

    /// After whatever happened at a worker: blocks that became free go to who waits for them.
    pub(super) fn settle(&mut self, w: usize) {
        while self.worker(w).is_some_and(|w| w.freed.swap(false, Ordering::Relaxed)) {
            self.grant_waiting(w);
            self.engine_turn(w);
        }
    }

    /// What a worker says of its load.
    pub(super) fn load(&self, w: usize) -> Option<(Party, baton_types::LoadReport)> {
        let worker = self.worker(w)?;
        let (totals, blocks) = (worker.engine.scheduler.totals(), worker.pool.counts());
        let report = baton_types::LoadReport {
            waiting: worker.engine.waiting() as u32,
            waiting_tokens: totals.waiting_tokens as u64,
            running: totals.running as u32,
            claimed_tokens: worker.claims.tokens(),
            healthy: true,
            prefill_tokens_per_s: 4000.0,
            blocks: Some(baton_types::BlockCounts {
                total: blocks.total as u64,
                free: blocks.free as u64,
                referenced: blocks.referenced as u64,
                cached: blocks.cached as u64,
                quarantined: blocks.quarantined as u64,
            }),
            ..Default::default()
        };
        Some((worker.record.party.clone(), report))
    }

    /// The start that runs at a process now.
    pub(super) fn addr(&self, process: usize) -> Addr {
        Addr { process, incarnation: self.procs[process].incarnation }
    }
}

impl Worker {
    /// Pouches that hold blocks, each once.
    pub(super) fn live_pouches(&mut self) -> Vec<Pouch> {
        self.pouches.retain(|pouch| pouch.strong_count() > 0);
        self.pouches.iter().filter_map(Weak::upgrade).collect()
    }
}
