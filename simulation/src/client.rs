//! Clients: they ask a router, read what comes, compare it with the right answer, and note how it ended.

use crate::executor::{Executor, Time};
use crate::invariant::{Breaches, Invariant};
use crate::model::Oracle;
use crate::prompts::Prompts;
use crate::schedule::{self, Policy, WEIGHTS};
use crate::worker::MODEL;
use baton_router::{Core, Event, Generation, Parameters, PrefillPolicy, Prompt, Request, Segment};
use baton_types::{ErrorKind, FinishReason, RequestId, Runtime, TenantId, TokenId, Weight};
use futures::StreamExt as _;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;

/// How a request ended.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Ending {
    /// With all of its answer.
    Whole,
    /// With a typed error, and what it says.
    Failed(ErrorKind, String),
    /// With the router that served it.
    WithRouter,
    /// No router was there to ask.
    NoRouter,
    /// Its client went.
    Gone,
}

/// When and how a request ended, if it did.
pub type AtEnd = Option<(Time, Ending)>;

/// Endings of the requests of a schedule, and their first tokens, with the times. Clones are the same ones.
#[derive(Clone, Default)]
pub struct Endings {
    ends: Arc<Mutex<Vec<AtEnd>>>,
    begins: Arc<Mutex<BTreeMap<usize, Time>>>,
}

impl Endings {
    /// None of so many ended.
    pub fn new(requests: usize) -> Self {
        Self { ends: Arc::new(Mutex::new(vec![None; requests])), begins: Arc::default() }
    }

    /// A request ended: the first end counts.
    pub fn add(&self, request: usize, at: Time, end: Ending) {
        self.ends.lock()[request].get_or_insert((at, end));
    }

    /// All, by request.
    pub fn all(&self) -> Vec<AtEnd> {
        self.ends.lock().clone()
    }

    /// A request has its first token.
    pub fn begin(&self, request: usize, at: Time) {
        self.begins.lock().entry(request).or_insert(at);
    }

    /// When requests had their first token.
    pub fn begins(&self) -> BTreeMap<usize, Time> {
        self.begins.lock().clone()
    }

    /// Whether all ended.
    pub fn are_all(&self) -> bool {
        self.ends.lock().iter().all(Option::is_some)
    }
}

/// Dropping a client before it has an answer is the end of the router that it asks.
impl Drop for Client {
    fn drop(&mut self) {
        self.ends.add(self.request, self.executor.time(), Ending::WithRouter);
    }
}

/// What a client stands on.
#[allow(missing_docs)] // The types say it.
pub struct Client {
    pub executor: Executor,
    pub runtime: Arc<dyn Runtime>,
    pub breaches: Breaches,
    pub ends: Endings,
    /// What routers made of requests.
    pub prompts: Prompts,
    pub request: usize,
    pub spec: schedule::Request,
}

impl Client {
    /// Asks, reads and compares. To be run in the process of the router that is asked.
    pub async fn ask(self, core: Arc<Core>) {
        let gone = async {
            match self.spec.gone {
                Some(at) => self.runtime.sleep_until(self.executor.instant(at)).await,
                None => std::future::pending().await,
            }
        };
        let end = tokio::select! {
            biased;
            end = self.read(&core) => end,
            () = gone => Ending::Gone,
        };
        self.ends.add(self.request, self.executor.time(), end);
    }

    async fn read(&self, core: &Arc<Core>) -> Ending {
        let spec = &self.spec;
        let mut parameters = Parameters { model: MODEL.into(), samples: spec.samples, ..Parameters::default() };
        parameters.sampling.max_tokens = Some(spec.max_tokens);
        parameters.sampling.temperature = Some(spec.temperature);
        parameters.sampling.seed = Some(spec.seed);
        parameters.priority = spec.priority;
        parameters.prefill_policy = Some(match spec.policy {
            Policy::Auto => PrefillPolicy::Auto,
            Policy::Remote => PrefillPolicy::Remote,
            Policy::Local => PrefillPolicy::Local,
        });
        let id = RequestId::try_new(format!("r{}", self.request)).expect("a short name");
        let tenant = TenantId::try_new(format!("t{}", spec.tenant)).expect("a short name");
        let deadline = self.executor.instant(spec.deadline);
        let weight = Weight::try_new(WEIGHTS[spec.tenant]).expect("1 to 1000");
        let request = Request::new(id, tenant, self.runtime.now(), deadline, parameters).with_weight(weight);
        let prompt = Prompt::Segments(vec![Segment::Tokens(spec.prompt.clone())]);
        match core.generate(request, prompt, &http::HeaderMap::new()).await {
            Ok(generation) => {
                self.prompts.add(&generation.request);
                self.compare(generation).await
            }
            Err(refused) => Ending::Failed(refused.error.kind, refused.error.message),
        }
    }

    /// Reads to the end; each token is the right one.
    async fn compare(&self, mut generation: Generation) -> Ending {
        let sampling = generation.request.sampling.clone();
        let right = |sample| Oracle::of(&self.spec.prompt).answer(&sampling, sample);
        let right: Vec<Vec<TokenId>> = (0..self.spec.samples).map(right).collect();
        let mut read = vec![0; right.len()];
        while let Some(event) = generation.events.next().await {
            match event {
                Ok(Event::Delta(delta)) => {
                    let sample = delta.sample as usize;
                    let next = &right[sample][read[sample]..];
                    if !next.starts_with(&delta.token_ids) {
                        let what =
                            format!("request {} is sent {:?}, and {next:?} is right", self.request, delta.token_ids);
                        self.breaches.add(Invariant::RightAnswer, what);
                        return Ending::Whole;
                    }
                    read[sample] += delta.token_ids.len();
                    self.ends.begin(self.request, self.executor.time());
                    if read[sample] == 2 {
                        self.runtime.sleep_until(self.executor.instant(self.executor.time() + self.spec.pause)).await;
                    }
                }
                Ok(Event::Finished(finished)) => {
                    let sample = finished.sample as usize;
                    let is_stop = finished.reason == FinishReason::Stop;
                    let ends_by_itself = right[sample].last().is_some_and(|token| crate::model::is_end(*token));
                    if read[sample] != right[sample].len() || is_stop != ends_by_itself {
                        let (sent, all) = (read[sample], right[sample].len());
                        let what = format!("request {} ends with {sent} of {all} tokens: {finished:?}", self.request);
                        self.breaches.add(Invariant::RightAnswer, what);
                    }
                    if finished.total.is_some() {
                        return Ending::Whole;
                    }
                }
                Err(error) => return Ending::Failed(error.kind, error.message),
            }
        }
        self.breaches.add(Invariant::EveryEnd, format!("request {} has a stream without an end", self.request));
        Ending::Whole
    }
}
