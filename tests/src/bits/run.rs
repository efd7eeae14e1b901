//! Serves a world's requests, one at a time or as a case says, and compares the results.

use super::case::{Arrivals, Caching, Case, Route, Setup};
use super::coverage::Coverage;
use super::handoff::{Link, Shipment};
use super::ledger::{Compared, Difference, Ledger};
use super::side::{Events, Place, Said, Side};
use super::world::{Family, PATIENCE, World, index_of, prefix};
use anyhow::{Context, bail, ensure};
use baton_engine::{Run, SequenceEvent, SequencePhase, SequenceRequest};
use baton_kernels::cpu::SimdLevel;
use baton_kv_cache::SharedPool;
use baton_kv_transfer::PutHandle;
use baton_types::{GroupKind, KvGroup, RequestId, TokenId};
use baton_worker::prefix_get::CachedPrefix;
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How often waiting offers are checked.
const LOOK_AGAIN: Duration = Duration::from_millis(2);
/// How often a churned cache is emptied: several times a step.
const CHURN: Duration = Duration::from_micros(300);

/// The reference: results of a world's requests when each runs alone, on one thread, with its whole prompt in one chunk.
pub struct Truth {
    world: World,
    ledger: Ledger,
}

impl Truth {
    pub fn compute(mut world: World) -> anyhow::Result<Self> {
        let family = world.family;
        // A recorded GPU must have the bits of the CPU's kernels.
        if family == Family::Recorded {
            world.family = Family::Cpu;
        }
        let chunk = world.len_max();
        let setup = Setup {
            block_tokens: 16,
            chunk,
            running: 1,
            threads: 1,
            simd: None,
            lagging: false,
            tight: false,
            cache: Caching::Off,
            copies: true,
        };
        let ledger = new_ledger(&world);
        let side = Side::start(&world, &setup, &ledger)?;
        for (index, request) in world.requests.iter().enumerate() {
            let (sender, said) = channel();
            let events = Events { place: Place::D, index, sender };
            side.engine.submit(request.clone(), Run::Full, Box::new(events))?.detach();
            while let Some(token) = next_token(&said)? {
                ledger.lock().outputs[index].push(token);
            }
        }
        side.engine.set_logit_observer(None);
        let ledger = std::mem::take(&mut *ledger.lock());
        world.family = family;
        ensure!(!ledger.has_nan(), "{} yields NaN", world.model());
        Ok(Self { world, ledger })
    }

    /// The world of these results.
    pub fn world(&self) -> &World {
        &self.world
    }

    /// Tokens of each request's prompt and output.
    pub fn sizes(&self) -> Vec<(usize, u32)> {
        let outputs = self.ledger.outputs.iter().map(|tokens| tokens.len() as u32);
        self.world.requests.iter().map(|request| request.prompt_len).zip(outputs).collect()
    }

    /// Serves all requests as `case` says. An error is one of the harness or the system; whether bits are equal is in the result.
    pub fn observe(&self, case: &Case) -> anyhow::Result<Observed> {
        Running::start(self, case)?.finish()
    }

    /// `case`'s version of a request.
    fn request(&self, case: &Case, index: usize) -> SequenceRequest {
        let mut request = self.world.requests[index].clone();
        let continued = case.plans[index].continued as usize;
        request.tokens.extend_from_slice(&self.ledger.outputs[index][..continued]);
        request.prefix = Some(prefix(&request.tokens));
        request.deadline = Instant::now() + PATIENCE;
        request
    }

    fn compare(&self, case: &Case, ledger: &Ledger) -> Result<Compared, Difference> {
        let mut total = Compared::default();
        for (index, (request, plan)) in self.world.requests.iter().zip(&case.plans).enumerate() {
            let (prompt, continued) = (request.prompt_len, plan.continued as usize);
            let positions = prompt + continued..prompt + self.ledger.outputs[index].len();
            let compared = ledger.compare(&self.ledger, index, positions, continued)?;
            total.rows += compared.rows;
            total.kv += compared.kv;
        }
        Ok(total)
    }
}

/// The results of a case.
#[derive(Clone, Debug)]
pub struct Observed {
    /// Whether every row and all KV equal the reference.
    pub equal: Result<Compared, Difference>,
    /// What the case actually exercised.
    pub coverage: Coverage,
}

fn new_ledger(world: &World) -> Arc<Mutex<Ledger>> {
    Arc::new(Mutex::new(Ledger::new(world.requests())))
}

fn next_token(said: &Receiver<Said>) -> anyhow::Result<Option<TokenId>> {
    loop {
        match said.recv_timeout(PATIENCE)?.event {
            SequenceEvent::Token { token, .. } => return Ok(Some(token)),
            SequenceEvent::Finished { .. } => return Ok(None),
            SequenceEvent::Failed { message, .. } => bail!(message),
            SequenceEvent::Started { .. } | SequenceEvent::Prompt(_) | SequenceEvent::Prefilled { .. } => {}
        }
    }
}

/// Requests that wait for each other before they decode.
type Gathering = Arc<Mutex<HashSet<RequestId>>>;

/// Requests that prefill again on D, after D had all their KV.
type Preempted = Arc<Mutex<HashSet<usize>>>;

/// Evicts everything that can be evicted from a cache, repeatedly, until it is dropped.
struct Churn(Arc<AtomicBool>, Option<JoinHandle<()>>);

impl Churn {
    fn start(pool: SharedPool) -> Self {
        let over = Arc::<AtomicBool>::default();
        let seen = over.clone();
        let work = move || {
            while !seen.load(Ordering::Relaxed) {
                pool.clear_cache();
                std::thread::sleep(CHURN);
            }
        };
        Self(over, Some(std::thread::spawn(work)))
    }
}

impl Drop for Churn {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
        if let Some(thread) = self.1.take() {
            thread.join().ok(); // A panic there was reported by its own hook.
        }
    }
}

/// A running case.
struct Running<'a> {
    truth: &'a Truth,
    case: &'a Case,
    ledger: Arc<Mutex<Ledger>>,
    p: Side,
    d: Side,
    link: Link,
    sender: Sender<Said>,
    said: Receiver<Said>,
    submitted: usize,
    shipments: HashMap<usize, Shipment>,
    shipped: Vec<(usize, PutHandle)>,
    gathering: Gathering,
    preempted: Preempted,
    finished: usize,
    /// Prefixes got for prompts that have not begun.
    reading: HashMap<usize, Option<CachedPrefix>>,
    got: usize,
    churn: Vec<Churn>,
}

impl<'a> Running<'a> {
    fn start(truth: &'a Truth, case: &'a Case) -> anyhow::Result<Self> {
        let ledger = new_ledger(&truth.world);
        let (p, d) = (Side::start(&truth.world, &case.p, &ledger)?, Side::start(&truth.world, &case.d, &ledger)?);
        let (sender, said) = channel();
        let link = Link::start(&p, &d, case, sender.clone())?;
        let gathering = Gathering::default();
        if case.arrivals == Arrivals::Gathered {
            ensure!(case.can_gather(), "D has no room to gather {} requests", case.plans.len());
            gathering.lock().extend(truth.world.requests.iter().map(|r| r.id.clone()));
        }
        let preempted = Preempted::default();
        let (held, seen) = (gathering.clone(), preempted.clone());
        // Indexes of the requests whose KV D has received with a put.
        let shipped = |index: &usize| case.plans[*index].route.is_shipped();
        let had: Mutex<HashSet<_>> = Mutex::new((0..case.plans.len()).filter(shipped).collect());
        let gate = move |id: &RequestId, phase| {
            let index = index_of(id);
            match phase {
                SequencePhase::Queue => {}
                SequencePhase::Prefill if had.lock().contains(&index) => drop(seen.lock().insert(index)),
                SequencePhase::Prefill => {}
                SequencePhase::Decode => drop(had.lock().insert(index)),
            }
            phase != SequencePhase::Decode || held.lock().is_empty()
        };
        d.engine.set_gate(Some(Arc::new(gate)));
        let (shipments, shipped) = (HashMap::new(), Vec::new());
        let sides = [(&case.p, &p), (&case.d, &d)].into_iter();
        let churned = sides.filter(|(setup, _)| setup.cache == Caching::Churned);
        let churn = churned.map(|(_, side)| Churn::start(side.engine.pool())).collect();
        Ok(Self {
            truth,
            case,
            ledger,
            p,
            d,
            link,
            sender,
            said,
            submitted: 0,
            shipments,
            shipped,
            gathering,
            preempted,
            finished: 0,
            reading: HashMap::new(),
            got: 0,
            churn,
        })
    }

    fn finish(mut self) -> anyhow::Result<Observed> {
        let all = self.case.order.len();
        let first = match self.case.arrivals {
            Arrivals::Staggered => all.min(2),
            Arrivals::InTurn => 1,
            Arrivals::Together | Arrivals::Gathered => all,
        };
        (0..first).try_for_each(|_| self.submit_next())?;
        let deadline = Instant::now() + PATIENCE;
        while self.finished < all {
            ensure!(
                Instant::now() < deadline,
                "{} of {all} requests ended in {PATIENCE:?}: {:?}",
                self.finished,
                self.case
            );
            self.link.adopter.grant_waiting();
            if self.link.adopter.is_full() && !std::mem::take(&mut *self.gathering.lock()).is_empty() {
                self.d.engine.wake();
            }
            match self.said.recv_timeout(LOOK_AGAIN) {
                Ok(said) => self.take(said).with_context(|| format!("in {:?}", self.case))?,
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => bail!("the engines are gone"),
            }
        }
        let (mut coverage, mut moved) = (self.coverage(), 0);
        for (index, outgoing) in std::mem::take(&mut self.shipped) {
            let report = outgoing.wait().map_err(|failure| anyhow::anyhow!("{failure}"))?;
            coverage.note("shipped over", report.transport);
            let (tokens, of) = (self.truth.request(self.case, index).tokens.len(), report.tokens_moved as usize);
            let (needed, all) = (self.needed_bytes(tokens, of), of * self.p.map.layout().bytes_per_token());
            ensure!(report.bytes == needed as u64, "request {index}: {} bytes moved, not {needed}", report.bytes);
            coverage.add("handoffs", "without what left a window", usize::from(needed < all));
            moved += of;
        }
        let sizes = self.case.plans.iter().enumerate().filter(|(_, plan)| plan.route.is_shipped());
        let whole: usize = sizes.map(|(index, _)| self.truth.request(self.case, index).tokens.len()).sum();
        coverage.add("handoffs", "tokens left out", whole - moved);
        self.churn.clear();
        self.until_quiet()?;
        self.link.stop();
        let equal = self.truth.compare(self.case, &self.ledger.lock());
        Ok(Observed { equal, coverage })
    }

    /// Bytes of the last `moved` of so many tokens; of a window, only those in blocks that the next token attends to; of states that of the last.
    fn needed_bytes(&self, tokens: usize, moved: usize) -> usize {
        let block = self.case.p.block_tokens.min(self.case.d.block_tokens) as usize;
        let bytes = |group: &KvGroup| {
            let attended = match group.kind {
                GroupKind::Window(window) => (tokens + 1).saturating_sub(window as usize),
                _ => 0,
            };
            let first = (tokens - moved).max(attended / block * block);
            group.layers.len() * group.token_bytes() * group.rows(tokens - first)
        };
        self.p.map.layout().groups().iter().map(bytes).sum()
    }

    fn submit_next(&mut self) -> anyhow::Result<()> {
        let Some(&index) = self.case.order.get(self.submitted) else { return Ok(()) };
        self.submitted += 1;
        let request = self.truth.request(self.case, index);
        let (place, engine, run) = match self.case.plans[index].route {
            Route::Local => (Place::D, &self.d.engine, Run::Full),
            route => {
                if route == Route::Got {
                    let got = self.link.get(&request)?;
                    self.got += got.as_ref().map_or(0, |got| got.tokens);
                    self.reading.insert(index, got);
                }
                let (run, shipment) = self.link.ship(request.clone());
                self.shipments.insert(index, shipment);
                (Place::P, &self.p.engine, run)
            }
        };
        engine.submit(request, run, Box::new(Events { place, index, sender: self.sender.clone() }))?.detach();
        Ok(())
    }

    fn take(&mut self, said: Said) -> anyhow::Result<()> {
        let Said { place, index, event } = said;
        match event {
            SequenceEvent::Started { .. } => {
                if place == Place::P {
                    self.reading.remove(&index);
                }
                // KV that arrives at D from P is ready to decode at once.
                if place == Place::D && self.case.plans[index].route.is_shipped() {
                    self.gathered(index);
                }
            }
            SequenceEvent::Prompt(_) => bail!("request {index} on {place:?} did not ask for it"),
            SequenceEvent::Token { token, .. } => {
                self.ledger.lock().outputs[index].push(token);
                if place == Place::D {
                    self.gathered(index);
                }
                if self.case.arrivals != Arrivals::InTurn {
                    self.submit_next()?;
                }
            }
            SequenceEvent::Prefilled { .. } => {
                let shipment = self.shipments.remove(&index).context("a prefill that was not asked for")?;
                let request = self.truth.request(self.case, index);
                let mut tokens = request.tokens;
                tokens.extend_from_slice(&self.ledger.lock().outputs[index]);
                self.shipped.push((index, shipment.commit(tokens, request.prompt_len)?));
            }
            SequenceEvent::Finished { .. } => {
                self.finished += 1;
                self.submit_next()?;
            }
            SequenceEvent::Failed { message, .. } => bail!("request {index} failed on {place:?}: {message}"),
        }
        Ok(())
    }

    /// Request `index` is ready to decode. When all are ready, the gate opens.
    fn gathered(&self, index: usize) {
        if self.gathering.lock().remove(&self.truth.world.requests[index].id) {
            self.d.engine.wake();
        }
    }

    /// Waits until the blocks of put sequences are free: the transfer drops its hold soon after the acknowledgement.
    fn until_quiet(&self) -> anyhow::Result<()> {
        let deadline = Instant::now() + crate::quiet::QUIET_MAX;
        loop {
            let counts = [&self.p, &self.d].map(|side| side.engine.pool().counts());
            if counts.iter().all(|c| c.referenced == 0 && c.quarantined == 0) {
                return Ok(());
            }
            ensure!(Instant::now() < deadline, "blocks are still held: {counts:?}");
            std::thread::sleep(LOOK_AGAIN);
        }
    }

    fn coverage(&self) -> Coverage {
        let (mut coverage, case) = (Coverage::default(), self.case);
        let names =
            [["P block", "P chunk", "P threads", "P backend"], ["D block", "D chunk", "D threads", "D backend"]];
        for ([block, chunk, threads, backend], setup) in names.into_iter().zip([&case.p, &case.d]) {
            coverage.note(block, setup.block_tokens);
            coverage.note(chunk, setup.chunk);
            coverage.note(threads, setup.threads);
            coverage.note(backend, if setup.lagging { "lagging" } else { "plain" });
        }
        let instructions = [case.p.simd, case.d.simd].map(|simd| match simd.map_or_else(SimdLevel::detect, Ok) {
            Ok(level) => format!("{level:?}"),
            Err(error) => error.to_string(),
        });
        coverage.note("P instructions", instructions[0].clone());
        coverage.note("D instructions", instructions[1].clone());
        coverage.note("P and D instructions", if instructions[0] == instructions[1] { "same" } else { "different" });
        coverage.note("P and D blocks", if case.p.block_tokens == case.d.block_tokens { "same" } else { "different" });
        coverage.note("arrivals", format!("{:?}", case.arrivals));
        for plan in &case.plans {
            let tokens = if plan.continued > 0 { "continued" } else { "fresh" };
            coverage.note("requests", format!("{:?} {tokens}", plan.route));
        }
        for (name, setup, side) in [("P caches", &case.p, &self.p), ("D caches", &case.d, &self.d)] {
            coverage.note(name, format!("{:?}", setup.cache));
            coverage.add(name, "tokens found", side.engine.load().cached_tokens as usize);
            coverage.add(name, "blocks evicted", side.engine.pool().cache_counts().evicted as usize);
        }
        coverage.add("gets", "tokens", self.got);
        coverage.add("gets", "of evicted blocks", self.link.evicted.load(Ordering::SeqCst));
        coverage.add("gets", "of blocks that were gone", self.link.gone.load(Ordering::SeqCst));
        let preemptions = self.d.engine.load().preemptions;
        let happened = if preemptions > 0 { "preempting" } else { "calm" };
        coverage.note("D", happened);
        coverage.note("D preempting, block", format!("{} {happened}", case.d.block_tokens));
        coverage.add("D", "preemptions", preemptions as usize);
        self.preempted.lock().iter().for_each(|&i| coverage.note("D preempts", format!("{:?}", case.plans[i].route)));
        coverage.note("class", self.truth.world.numerics);
        self.truth.world.formats.iter().for_each(|format| coverage.note("weights", format!("{format:?}")));
        for (dimension, [parts, slabs]) in ["attention output", "MLP down"].into_iter().zip(self.truth.world.splits()) {
            coverage.note(dimension, format!("{parts} partitions of {slabs} slabs"));
        }
        let (p, d) = (*self.p.seen.lock(), *self.d.seen.lock());
        coverage.note("D widest step", d.widest);
        coverage.add("P copies", "where samples part", p.copies);
        coverage.add("D copies", "where samples part", d.copies);
        coverage.add("steps", "of prefill and decode", p.mixed + d.mixed);
        coverage.add("chunks", "that start inside a slab", p.ragged_chunks + d.ragged_chunks);
        coverage.add("chunks", "behind a split", p.chunks_behind_split + d.chunks_behind_split);
        coverage
    }
}
