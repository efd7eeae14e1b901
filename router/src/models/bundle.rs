//! Text bundles: fetched by digest from a worker, verified, loaded once and shared.

use super::ModelText;
use super::turns::Turns;
use crate::port::{CallError, Link};
use baton_node::runtime::blocking;
use baton_text::{TextError, bundle};
use baton_types::{Digest, RequestError, Runtime};
use parking_lot::Mutex;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::OnceCell;

/// Longest wait for a whole bundle: tens of megabytes on a slow link.
const FETCH_MAX: Duration = Duration::from_secs(60);
/// Most bundles that are fetched or loaded in turns: each takes up to [`bundle::BYTES_MAX`] and what it is parsed into.
const LOADS_MAX: usize = 2;
/// A load that takes longer gives its turn back: vocabularies of 256,000 tokens take a few seconds.
const LOAD_MAX: Duration = Duration::from_secs(60);
/// Most loads that go on without a turn.
const LATE_MAX: usize = 4;
/// Unused bundles that are kept: a restarted worker finds its text loaded.
const IDLE_MAX: usize = 8;

/// Why a bundle is not available.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BundleError {
    /// The worker did not send it.
    #[error("the worker does not give bundle {digest}: {error}")]
    Fetch { digest: Digest, error: RequestError },
    /// It took too long.
    #[error("bundle {0} was not complete after {FETCH_MAX:?}")]
    Timeout(Digest),
    /// It takes longer than [`LOAD_MAX`], or the worker that it was fetched from has left.
    #[error("bundle {0} is still being loaded")]
    Loading(Digest),
    /// Too large to be a bundle.
    #[error("bundle {0} is over the limit of {max} bytes", max = bundle::BYTES_MAX)]
    TooLarge(Digest),
    /// Its digest is not the requested one.
    #[error("bundle {asked} came with digest {got}: the worker's copy is damaged")]
    Digest {
        asked: Digest,
        /// Digest of the received bytes.
        got: Digest,
    },
    /// Its content cannot be served.
    #[error("bundle {digest}: {source}")]
    Content { digest: Digest, source: TextError },
}

/// Loaded bundles by digest.
#[derive(Debug)]
pub(crate) struct TextCache {
    slots: Mutex<HashMap<Digest, Arc<OnceCell<Arc<ModelText>>>>>,
    /// Turns to fetch and load a bundle.
    turns: Turns,
    /// Bundles that a thread loads, even if nobody waits for it.
    loading: Arc<Mutex<HashSet<Digest>>>,
}

impl Default for TextCache {
    fn default() -> Self {
        Self { slots: Mutex::default(), turns: Turns::new(LOADS_MAX, LATE_MAX), loading: Arc::default() }
    }
}

/// Marks a bundle as being loaded.
struct Loading(Digest, Arc<Mutex<HashSet<Digest>>>);

impl Drop for Loading {
    fn drop(&mut self) {
        self.1.lock().remove(&self.0);
    }
}

impl TextCache {
    /// The text with this digest, from the cache or from the worker behind `link`. Concurrent callers wait for one
    /// load. If it fails, the next caller asks its own worker. A load that nobody waits for any more is not begun again:
    /// its text is there when it ends. At most [`LOADS_MAX`] bundles are in flight, beside [`LATE_MAX`] late ones.
    pub(crate) async fn get(
        &self,
        digest: Digest,
        link: &dyn Link,
        runtime: &dyn Runtime,
    ) -> Result<Arc<ModelText>, BundleError> {
        let load = |bytes: Vec<u8>| {
            let bundle = bundle::decode(&bytes)?;
            drop(bytes);
            // The worker that wrote it may be another program than ours.
            bundle::check_ids(&bundle, bundle::VOCAB_MAX)?;
            ModelText::load(&bundle)
        };
        self.get_or(digest, || self.load(digest, link, runtime, load)).await
    }

    async fn get_or<F>(&self, digest: Digest, load: impl FnOnce() -> F) -> Result<Arc<ModelText>, BundleError>
    where
        F: Future<Output = Result<Arc<ModelText>, BundleError>>,
    {
        self.slot(digest).get_or_try_init(load).await.cloned()
    }

    /// Fetches the bundle and has a thread load it.
    async fn load(
        &self,
        digest: Digest,
        link: &dyn Link,
        runtime: &dyn Runtime,
        load: impl FnOnce(Vec<u8>) -> Result<ModelText, TextError> + Send + 'static,
    ) -> Result<Arc<ModelText>, BundleError> {
        if self.loading.lock().contains(&digest) {
            return Err(BundleError::Loading(digest));
        }
        let turn = self.turns.take().await;
        let bytes = runtime.until(runtime.now() + FETCH_MAX, fetch(digest, link)).await;
        let bytes = bytes.ok_or(BundleError::Timeout(digest))??;
        self.loading.lock().insert(digest);
        let loading = Loading(digest, self.loading.clone());
        let (held, slot) = (self.turns.limit(turn, LOAD_MAX, runtime), self.slot(digest));
        let work = move || {
            // Until the end of this thread.
            let (_loading, _held) = (loading, held);
            let text = load(bytes).map(Arc::new);
            if let Ok(text) = &text {
                // Refused while a caller waits, who gets it below.
                let _ = slot.set(text.clone());
            }
            text
        };
        let text = runtime.until(runtime.now() + LOAD_MAX, blocking(runtime, work)).await;
        let text = text.ok_or(BundleError::Loading(digest))?;
        let text = text.unwrap_or_else(|| Err(TextError::Broken("it cannot be loaded".into())));
        text.map_err(|source| BundleError::Content { digest, source })
    }

    /// The cell of the text, loaded or not. Drops cells that have no users or waiters.
    fn slot(&self, digest: Digest) -> Arc<OnceCell<Arc<ModelText>>> {
        let mut slots = self.slots.lock();
        let slot = slots.entry(digest).or_default().clone();
        let mut idle = 0;
        slots.retain(|_, slot| {
            let is_used = Arc::strong_count(slot) > 1 || slot.get().is_some_and(|text| Arc::strong_count(text) > 1);
            idle += usize::from(!is_used && slot.initialized());
            is_used || slot.initialized() && idle <= IDLE_MAX
        });
        slot
    }
}

async fn fetch(digest: Digest, link: &dyn Link) -> Result<Vec<u8>, BundleError> {
    let bytes = match link.bundle(digest, bundle::BYTES_MAX).await {
        Ok(bytes) => bytes,
        Err(CallError::Refused(error) | CallError::Lost(error)) => return Err(BundleError::Fetch { digest, error }),
    };
    if bytes.len() > bundle::BYTES_MAX {
        return Err(BundleError::TooLarge(digest));
    }
    let got = bundle::digest(&bytes);
    if got == digest { Ok(bytes) } else { Err(BundleError::Digest { asked: digest, got }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::port::{DecodeCall, PrefillCall, WorkerEvents, WorkerReport};
    use crate::testing::clock::ByHand;
    use crate::testing::nobody;
    use crate::testing::text::byte_bundle;
    use baton_node::runtime::TokioRuntime;
    use baton_node::telemetry::TraceId;
    use baton_types::{DecodeEvent, PrefillEvent};
    use futures::FutureExt as _;
    use futures::future::{BoxFuture, join_all};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tokio::sync::{Barrier, Semaphore};

    fn text() -> Arc<ModelText> {
        Arc::new(ModelText::load(&bundle::decode(&byte_bundle("")).unwrap()).unwrap())
    }

    /// Counts builds, and the highest number of concurrent ones.
    #[derive(Default)]
    struct Builds {
        all: AtomicUsize,
        now: AtomicUsize,
        peak: AtomicUsize,
    }

    impl Builds {
        /// Builds a text as a load does, on a thread of its own.
        async fn build(&self) -> Result<Arc<ModelText>, BundleError> {
            self.all.fetch_add(1, Ordering::Relaxed);
            self.peak.fetch_max(self.now.fetch_add(1, Ordering::Relaxed) + 1, Ordering::Relaxed);
            let built = tokio::task::spawn_blocking(text).await.unwrap();
            self.now.fetch_sub(1, Ordering::Relaxed);
            Ok(built)
        }
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 4)]
    async fn many_workers_that_begin_at_once_build_one_text_for_each_digest() {
        const WORKERS: usize = 64;
        const DIGESTS: usize = 2;
        let (cache, builds) = (Arc::new(TextCache::default()), Arc::new(Builds::default()));
        let begin = Arc::new(Barrier::new(WORKERS));
        let workers = (0..WORKERS).map(|worker| {
            let (cache, builds, begin) = (cache.clone(), builds.clone(), begin.clone());
            tokio::spawn(async move {
                begin.wait().await;
                let digest = Digest([(worker % DIGESTS) as u8; 32]);
                cache.get_or(digest, || builds.build()).await.unwrap()
            })
        });
        let texts: Vec<_> = join_all(workers).await.into_iter().map(Result::unwrap).collect();
        let count = |of: &AtomicUsize| of.load(Ordering::Relaxed);
        assert_eq!(count(&builds.all), DIGESTS);
        assert!(count(&builds.peak) <= DIGESTS);
        for (worker, text) in texts.iter().enumerate() {
            assert!(Arc::ptr_eq(text, &texts[worker % DIGESTS]), "worker {worker} has a text of its own");
        }
        // The cache's own reference, and one for each worker.
        assert_eq!(Arc::strong_count(&texts[0]), WORKERS / DIGESTS + 1);
    }

    #[tokio::test]
    async fn where_one_worker_fails_the_next_is_asked() {
        let (cache, digest) = (TextCache::default(), Digest([1; 32]));
        let damaged = BundleError::Digest { asked: digest, got: Digest([3; 32]) };
        let fails = cache.get_or(digest, async || {
            tokio::task::yield_now().await;
            Err(damaged)
        });
        let waits = cache.get_or(digest, async || Ok(text()));
        let (failed, loaded) = tokio::join!(fails, waits);
        assert!(matches!(failed, Err(BundleError::Digest { .. })), "its own worker is not admitted");
        let again = cache.get_or(digest, async || panic!("it is there")).await.unwrap();
        assert!(Arc::ptr_eq(&loaded.unwrap(), &again));
    }

    #[tokio::test]
    async fn some_texts_outlast_their_workers() {
        let cache = TextCache::default();
        for number in 0..=2 * IDLE_MAX as u8 {
            cache.get_or(Digest([number; 32]), async || Ok(text())).await.unwrap();
        }
        assert_eq!(cache.slots.lock().len(), IDLE_MAX + 1, "beside the last one");
    }

    /// A worker that sends these bytes as any bundle, once `gate` has a permit.
    #[derive(Debug)]
    struct Gives {
        bytes: Vec<u8>,
        gate: Arc<Semaphore>,
        asked: AtomicUsize,
    }

    impl Gives {
        fn new(bytes: Vec<u8>, at_once: usize) -> Self {
            Self { bytes, gate: Arc::new(Semaphore::new(at_once)), asked: AtomicUsize::new(0) }
        }
    }

    impl Link for Gives {
        fn bundle(&self, _: Digest, _: usize) -> BoxFuture<'static, Result<Vec<u8>, CallError>> {
            self.asked.fetch_add(1, Ordering::Relaxed);
            let (bytes, gate) = (self.bytes.clone(), self.gate.clone());
            async move {
                gate.acquire().await.unwrap().forget();
                Ok(bytes)
            }
            .boxed()
        }

        fn decode(&self, _: DecodeCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<DecodeEvent>, CallError>> {
            nobody()
        }

        fn prefill(&self, _: PrefillCall<'_>) -> BoxFuture<'static, Result<WorkerEvents<PrefillEvent>, CallError>> {
            nobody()
        }

        fn watch(&self, _: &str, _: bool) -> BoxFuture<'static, Result<WorkerEvents<WorkerReport>, CallError>> {
            nobody()
        }

        fn keep(&self, _: Vec<TraceId>) -> BoxFuture<'static, Result<(), CallError>> {
            nobody()
        }
    }

    #[tokio::test]
    async fn ids_that_no_vocabulary_has_are_refused() {
        for id in [bundle::VOCAB_MAX as u32, u32::MAX - 1, u32::MAX] {
            let mut bundle = bundle::decode(&byte_bundle("")).unwrap();
            let with = format!("\"vocab\":{{\"abc\":{id},");
            bundle.tokenizer_json = bundle.tokenizer_json.replace("\"vocab\":{", &with);
            let worker = Gives::new(bundle::encode(&bundle), 1);
            let runtime = TokioRuntime::current();
            let got = TextCache::default().get(bundle::digest(&worker.bytes), &worker, &runtime).await;
            let error = got.unwrap_err();
            assert!(matches!(error, BundleError::Content { .. }), "{error}");
            assert!(error.to_string().contains(&format!("has id {id}, but")), "{error}");
        }
    }

    #[tokio::test]
    async fn a_late_load_goes_on_without_its_turn_and_is_not_begun_again() {
        let cache = TextCache::default();
        let worker = Gives::new(byte_bundle(""), 8);
        let (digest, runtime) = (bundle::digest(&worker.bytes), ByHand::new());
        let (go_on, waits) = std::sync::mpsc::channel::<()>();
        let slow = move |bytes: Vec<u8>| {
            let _ = waits.recv();
            ModelText::load(&bundle::decode(&bytes)?)
        };
        let late = cache.get_or(digest, || cache.load(digest, &worker, &runtime, slow));
        let (late, turns) = tokio::join!(late, async {
            runtime.advance(LOAD_MAX - Duration::from_secs(1)).await;
            assert!(join_all((0..LOADS_MAX).map(|_| cache.turns.take())).now_or_never().is_none());
            runtime.advance(Duration::from_secs(1)).await;
            join_all((0..LOADS_MAX).map(|_| cache.turns.take())).now_or_never()
        });
        assert!(matches!(late, Err(BundleError::Loading(_))), "{late:?}");
        assert!(turns.is_some(), "it gave its turn back");
        let again = cache.get(digest, &worker, &runtime).now_or_never().expect("it waits for no turn");
        assert!(matches!(again, Err(BundleError::Loading(_))), "{again:?}");
        go_on.send(()).unwrap();
        while cache.loading.lock().contains(&digest) {
            tokio::task::yield_now().await;
        }
        cache.get_or(digest, async || panic!("it is there")).await.unwrap();
        assert_eq!(worker.asked.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn few_bundles_are_in_flight() {
        let cache = TextCache::default();
        let (worker, runtime) = (Gives::new(Vec::new(), 0), TokioRuntime::current());
        let asked = || worker.asked.load(Ordering::Relaxed);
        let ask = |n: u8| cache.get(Digest([n; 32]), &worker, &runtime);
        let count = async {
            for done in 0..=2 {
                // All others get their turns on this thread.
                for _ in 0..20 {
                    tokio::task::yield_now().await;
                }
                assert_eq!(asked(), (LOADS_MAX + done).min(4));
                worker.gate.add_permits(1);
            }
            worker.gate.add_permits(1);
        };
        let (a, b, c, d, ()) = tokio::join!(ask(1), ask(2), ask(3), ask(4), count);
        assert!([a, b, c, d].iter().all(|got| matches!(got, Err(BundleError::Digest { .. }))));
    }
}
