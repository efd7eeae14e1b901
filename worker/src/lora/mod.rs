//! LoRA adapters of a worker: which ones it can load, which ones are loaded, and the slots that requests wait for.
//!
//! ```text
//! folder ── read again ──> Known ── cards ──> load reports ──> routers
//!                            │ read, check the digest, pack: a thread beside the engine's
//! request ── hold ──> Slots ─┴─> engine: set_adapter between two steps
//! ```
//!
//! A sequence holds its adapter from before it is submitted until the engine has dropped it, so a loaded adapter is never replaced under it.

mod known;
mod settings;
mod slots;
#[cfg(test)]
mod tests;

pub use known::AdapterError;
pub use settings::LoraSettings;

use crate::call::CallContext;
use crate::error::WorkerError;
use baton_engine::families::DecoderSpec;
use baton_engine::formats::AdapterLimits;
use baton_engine::{AdapterUse, EngineHandle};
use baton_kernels::step::AdapterSlot;
use baton_node::runtime::blocking;
use baton_types::{AdapterCard, Digest, ErrorKind, RequestError, Runtime, TenantLabel};
use known::{Known, Reader};
use parking_lot::Mutex;
use slots::{Answer, Slots, Ticket};
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};
use tokio::sync::{Notify, mpsc, oneshot, watch};

/// A client that found no slot may come again after this.
const RETRY_AFTER: Duration = Duration::from_secs(1);

/// The adapters of one worker, in numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AdapterCounts {
    /// That can be served.
    pub known: usize,
    pub loaded: usize,
    /// Memory of those that are loaded or being loaded.
    pub bytes: u64,
    /// Requests that wait for a slot.
    pub waiting: usize,
    /// Loads since the start, and those that failed.
    pub loads: u64,
    pub failures: u64,
}

/// The adapters of one worker. Clones are the same.
#[derive(Clone)]
pub struct Adapters(Arc<Inner>);

struct Inner {
    engine: EngineHandle,
    reader: Reader,
    known: Mutex<Known>,
    /// What is announced.
    cards: watch::Sender<Arc<[AdapterCard]>>,
    slots: Arc<SharedSlots>,
    loads: AtomicU64,
    failures: AtomicU64,
    wait_max: Duration,
    runtime: Arc<dyn Runtime>,
}

/// The slots, and who is told of changes. Sequences hold it, so it does not hold the engine.
struct SharedSlots {
    slots: Mutex<Slots>,
    changed: Notify,
}

impl SharedSlots {
    fn change<T>(&self, change: impl FnOnce(&mut Slots) -> T) -> T {
        let result = change(&mut self.slots.lock());
        self.changed.notify_waiters();
        result
    }
}

/// One use of the adapter in a slot.
struct Kept {
    shared: Arc<SharedSlots>,
    slot: usize,
    tenant: TenantLabel,
}

impl Drop for Kept {
    fn drop(&mut self) {
        self.shared.change(|slots| slots.release(self.slot, self.tenant));
    }
}

/// A request's place among those that wait.
struct Place {
    shared: Arc<SharedSlots>,
    ticket: Ticket,
}

impl Drop for Place {
    fn drop(&mut self) {
        self.shared.change(|slots| slots.leave(self.ticket));
    }
}

impl Adapters {
    /// Reads all adapters of the settings; takes time with their number and size. `None` where none are set.
    ///
    /// # Errors
    /// If one that is named in the settings cannot be served.
    pub fn start(
        settings: &LoraSettings,
        engine: &EngineHandle,
        spec: Arc<DecoderSpec>,
        names: Vec<String>,
        runtime: Arc<dyn Runtime>,
    ) -> Result<Option<Self>, WorkerError> {
        if !settings.is_on() {
            return Ok(None);
        }
        let limits = AdapterLimits { rank_max: settings.max_rank, bytes_max: settings.memory_bytes_max.0 };
        let reader = Reader { spec, limits, one: Arc::default() };
        let known = Known::start(settings, names, &reader)?;
        tracing::info!(adapters = known.cards().len(), slots = settings.max_loras, "serves adapters");
        let slots = Slots::new(settings.max_loras, settings.memory_bytes_max.0, engine.config().waiting_max);
        Ok(Some(Self(Arc::new(Inner {
            engine: engine.clone(),
            reader,
            cards: watch::Sender::new(known.cards()),
            known: Mutex::new(known),
            slots: Arc::new(SharedSlots { slots: Mutex::new(slots), changed: Notify::new() }),
            loads: AtomicU64::new(0),
            failures: AtomicU64::new(0),
            wait_max: Duration::from_millis(settings.wait_ms_max),
            runtime,
        }))))
    }

    /// The adapters that can be served now; changes with the folder.
    pub fn cards(&self) -> watch::Receiver<Arc<[AdapterCard]>> {
        self.0.cards.subscribe()
    }

    /// Counts for metrics.
    pub fn counts(&self) -> AdapterCounts {
        let (known, slots) = (self.0.cards.borrow().len(), self.0.slots.slots.lock());
        let (loaded, bytes) = slots.loaded_bytes();
        AdapterCounts {
            known,
            loaded,
            bytes,
            waiting: slots.waiting(),
            loads: self.0.loads.load(Ordering::Relaxed),
            failures: self.0.failures.load(Ordering::Relaxed),
        }
    }

    /// Reads the folder again at intervals, for ever.
    pub(crate) async fn follow_folder(self, every: Duration) {
        let inner = self.0;
        let mut failed = false;
        loop {
            inner.runtime.sleep_until(inner.runtime.now() + every).await;
            let (mut known, reader) = (inner.known.lock().clone(), inner.reader.clone());
            let read = blocking(&*inner.runtime, move || known.read_again(&reader).map(|()| known)).await;
            match read {
                Some(Ok(known)) => {
                    let cards = known.cards();
                    *inner.known.lock() = known;
                    inner.cards.send_if_modified(|announced| {
                        let is_new = *announced != cards;
                        *announced = cards;
                        is_new
                    });
                    failed = false;
                }
                Some(Err(error)) if !failed => {
                    tracing::warn!(%error, "cannot read the folder of adapters: those that were there are served on");
                    failed = true;
                }
                Some(Err(_)) | None => {}
            }
        }
    }

    /// The adapter in a slot, where it stays while the returned value lives. Loads it if necessary, and waits for a slot if it must: until
    /// `deadline`, and no longer than the settings say. At most `engine.waiting_max` requests wait; slots and places are shared out
    /// among tenants.
    ///
    /// # Errors
    /// If no slot becomes free, or the adapter is not here or cannot be loaded. Another worker may serve it.
    pub async fn hold(
        &self,
        digest: Digest,
        tenant: TenantLabel,
        deadline: Instant,
    ) -> Result<AdapterUse, RequestError> {
        let inner = &self.0;
        let runtime = &*inner.runtime;
        let bytes = inner.known.lock().find(&digest).map(|known| known.bytes);
        let (shared, loads) = (&inner.slots, AtomicBool::new(false));
        let held = async {
            let ticket = shared.slots.lock().enter(digest, tenant, bytes.unwrap_or_default()).ok_or_else(no_slot)?;
            let place = Place { shared: shared.clone(), ticket };
            loop {
                let mut changed = pin!(shared.changed.notified());
                changed.as_mut().enable();
                let answer = {
                    let mut slots = shared.slots.lock();
                    // One whose folder is gone serves on while it is loaded.
                    if bytes.is_none() && !slots.has(&digest) {
                        let message = format!("this worker has no adapter {digest}: its folder is gone or has changed");
                        return Err(RequestError::new(ErrorKind::Unavailable, message));
                    }
                    slots.ask(place.ticket)
                };
                match answer {
                    Answer::Use(slot) => {
                        let kept = Arc::new(Kept { shared: shared.clone(), slot, tenant });
                        return Ok(AdapterUse { slot: AdapterSlot(slot as u32), digest, kept });
                    }
                    Answer::Load { slot, evicted } => {
                        loads.store(true, Ordering::Relaxed);
                        self.load(digest, slot, &evicted).await?;
                    }
                    Answer::Wait => changed.await,
                }
            }
        };
        let until = deadline.min(runtime.now() + inner.wait_max);
        let late = || if loads.load(Ordering::Relaxed) { slow_load() } else { no_slot() };
        runtime.until(until, held).await.unwrap_or_else(|| Err(late()))
    }

    /// Loads an adapter into a slot that [`Slots`] gave for it. Goes on if the caller gives up.
    async fn load(&self, digest: Digest, slot: usize, evicted: &[usize]) -> Result<(), RequestError> {
        let inner = self.0.clone();
        for slot in evicted {
            // A failure leaves the adapter where it is: the next one that comes replaces it.
            inner.engine.set_adapter(AdapterSlot(*slot as u32), None, |_| ());
        }
        let (loaded, result) = oneshot::channel();
        let runtime = inner.runtime.clone();
        runtime.spawn(Box::pin(async move {
            let outcome = inner.load(digest, slot).await;
            let count = if outcome.is_ok() { &inner.loads } else { &inner.failures };
            count.fetch_add(1, Ordering::Relaxed);
            if outcome.is_err() {
                // The device may still have the adapter that the slot had before, which no longer counts.
                inner.engine.set_adapter(AdapterSlot(slot as u32), None, |_| ());
            }
            inner.slots.change(|slots| slots.loaded(slot, outcome.is_ok()));
            // The caller may be gone.
            let _ = loaded.send(outcome);
        }));
        result.await.unwrap_or_else(|_| Err("the worker is stopping".into())).map_err(|reason| {
            let message = format!("this worker cannot load the adapter: {reason}");
            RequestError::new(ErrorKind::Unavailable, message)
        })
    }
}

impl Inner {
    /// Reads the adapter beside the engine, and has the engine load it.
    async fn load(&self, digest: Digest, slot: usize) -> Result<(), String> {
        let since = self.runtime.now();
        let folder = self.known.lock().find(&digest).map(|known| known.folder.clone());
        let folder = folder.ok_or("its folder is gone or has changed")?;
        let (reader, from) = (self.reader.clone(), folder.clone());
        let adapter = blocking(&*self.runtime, move || reader.read_again(&from, digest)).await;
        let adapter = adapter.ok_or("reading it failed")?.map_err(|error| {
            tracing::warn!(%error, "cannot load an adapter");
            // Paths are told to no client.
            "its files cannot be read, or have changed; the worker's log has the reason".to_owned()
        })?;
        let (done, changed) = oneshot::channel();
        self.engine.set_adapter(AdapterSlot(slot as u32), Some(Arc::new(adapter)), move |result| {
            let _ = done.send(result.map_err(|error| error.to_string()));
        });
        changed.await.unwrap_or_else(|_| Err("the engine is stopped".into()))?;
        let took = self.runtime.now().saturating_duration_since(since);
        tracing::info!(folder = %folder.display(), slot, ?took, "loads an adapter");
        Ok(())
    }
}

/// No slot became free in time.
fn no_slot() -> RequestError {
    let message = "other adapters have all slots of this worker, or all of their memory; try again later, or raise \
                   engine.lora.max_loras (--max-loras) and engine.lora.memory_bytes_max";
    RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
}

/// The load did not end in time. It goes on.
fn slow_load() -> RequestError {
    let message =
        "the adapter takes longer to load than this request may wait; try again, or raise engine.lora.wait_ms_max";
    RequestError::new(ErrorKind::Overloaded, message).retry_after(RETRY_AFTER)
}

/// Starts a call: at once without an adapter, else once its sequence has it, in a task that ends with the receiver of `replies`. What `start`
/// refuses there becomes the last reply.
pub fn start_with<T: Send + 'static>(
    adapters: Option<&Adapters>,
    digest: Option<Digest>,
    tenant: TenantLabel,
    call: CallContext,
    runtime: &Arc<dyn Runtime>,
    replies: mpsc::Sender<Result<T, RequestError>>,
    start: impl FnOnce(CallContext, Option<AdapterUse>, mpsc::Sender<Result<T, RequestError>>) -> Result<(), RequestError>
    + Send
    + 'static,
) -> Result<(), RequestError> {
    let Some(digest) = digest else { return start(call, None, replies) };
    let adapters = adapters.cloned().ok_or_else(|| {
        let message = "this worker serves no adapters; set engine.lora.folder or engine.lora.modules there";
        RequestError::new(ErrorKind::Unavailable, message)
    })?;
    runtime.spawn(Box::pin(async move {
        let held = tokio::select! {
            biased;
            () = replies.closed() => return,
            error = call.running.cut_off() => Err(error),
            held = adapters.hold(digest, tenant, call.deadline) => held,
        };
        let last = replies.clone();
        if let Err(error) = held.and_then(|adapter| start(call, Some(adapter), replies)) {
            let _ = last.send(Err(error)).await;
        }
    }));
    Ok(())
}
