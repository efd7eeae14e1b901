//! The requests of a fleet, and how each was served from its client's view.

use super::{BEGINS, MODEL, PATIENCE};
use crate::executor::{Executor, Process, Time};
use baton_router::{Core, Event, Generation, Parameters, Prompt as Asked, Request, Segment};
use baton_types::{ErrorKind, RequestId, TenantId, TokenId};
use futures::StreamExt as _;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

/// Returns the tokens of a prompt.
pub(super) type Prompt = dyn Fn(usize) -> Vec<TokenId> + Send + Sync;

/// One request.
#[derive(Clone, Copy, Debug)]
pub struct Ask {
    /// Arrival, relative to the first request.
    pub at: Duration,
    /// Tokens of its answer, exactly.
    pub answer_tokens: u32,
}

/// How one request was served. Times have the same origin as arrivals.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Served {
    /// When the first token arrived.
    pub first_token: Option<Duration>,
    /// Microseconds from each token to the next.
    pub gaps_us: Vec<u32>,
    /// When it ended.
    pub end: Duration,
    /// Tokens of the prompt whose KV was cached on the prefilling worker, or was got for it.
    pub cached_tokens: u32,
    /// Reason of its placement; `None` if it was not placed.
    pub placement: Option<&'static str>,
    /// Why it failed, if it did.
    pub failed: Option<ErrorKind>,
}

/// All requests. Clones share them.
#[derive(Clone)]
pub(super) struct Clients {
    executor: Executor,
    asks: Arc<Vec<Ask>>,
    prompt: Arc<Prompt>,
    served: Arc<Mutex<Vec<Served>>>,
    left: Arc<AtomicUsize>,
    /// The requests as the router prepared them.
    #[cfg(test)]
    pub(super) prepared: Arc<Mutex<Vec<Arc<baton_router::Prepared>>>>,
}

impl Clients {
    pub(super) fn new(executor: &Executor, asks: Vec<Ask>, prompt: Arc<Prompt>) -> Self {
        Self {
            executor: executor.clone(),
            served: Arc::new(Mutex::new(vec![Served::default(); asks.len()])),
            left: Arc::new(AtomicUsize::new(asks.len())),
            asks: Arc::new(asks),
            prompt,
            #[cfg(test)]
            prepared: Arc::default(),
        }
    }

    /// Each request with its arrival. Requests with equal times arrive in order, a microsecond apart.
    pub(super) fn arrivals(&self) -> Vec<(usize, Time)> {
        let mut next = 0;
        let times = self.asks.iter().map(|ask| {
            let at = next.max(ask.at.as_micros() as Time);
            next = at + 1;
            at
        });
        times.enumerate().collect()
    }

    /// Whether all requests have ended.
    pub(super) fn are_over(&self) -> bool {
        self.left.load(Ordering::Relaxed) == 0
    }

    /// The results of all requests.
    pub(super) fn take(&self) -> Vec<Served> {
        std::mem::take(&mut self.served.lock())
    }

    fn now(&self) -> Duration {
        Duration::from_micros(self.executor.time().saturating_sub(BEGINS))
    }

    /// One request, from its arrival to its end.
    pub(super) async fn ask(self, number: usize, core: Arc<Core>, process: Process) {
        let runtime = self.executor.runtime(process);
        let mut parameters = Parameters { model: MODEL.into(), ..Parameters::default() };
        parameters.sampling.max_tokens = Some(self.asks[number].answer_tokens);
        parameters.sampling.temperature = Some(0.0);
        let id = RequestId::try_new(format!("r{number}")).expect("a short name");
        let tenant = TenantId::try_new("t").expect("a short name");
        let now = runtime.now();
        let request = Request::new(id, tenant, now, now + PATIENCE, parameters);
        let prompt = Asked::Segments(vec![Segment::Tokens((self.prompt)(number))]);
        let mut served = Served::default();
        match core.generate(request, prompt, &http::HeaderMap::new()).await {
            Ok(generation) => self.read(generation, &mut served).await,
            Err(refused) => served.failed = Some(refused.error.kind),
        }
        served.end = self.now();
        self.served.lock()[number] = served;
        self.left.fetch_sub(1, Ordering::Relaxed);
    }

    /// Reads an answer to its end.
    async fn read(&self, mut generation: Generation, served: &mut Served) {
        let mut last = None;
        while let Some(event) = generation.events.next().await {
            let now = self.now();
            match event {
                Ok(Event::Delta(delta)) => {
                    served.cached_tokens = delta.cached_tokens.unwrap_or(served.cached_tokens);
                    for _ in &delta.token_ids {
                        match last.replace(now) {
                            None => served.first_token = Some(now),
                            Some(last) => {
                                served.gaps_us.push(u32::try_from((now - last).as_micros()).unwrap_or(u32::MAX));
                            }
                        }
                    }
                }
                Ok(Event::Finished(_)) => {}
                Err(error) => served.failed = Some(error.kind),
            }
        }
        served.placement = generation.request.placed();
        #[cfg(test)]
        self.prepared.lock().push(generation.request.clone());
    }
}
