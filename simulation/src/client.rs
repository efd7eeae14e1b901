//! Clients: they ask a router, read what comes, compare it with the right answer, and note how it ended.

use crate::executor::{Executor, Time};
use crate::invariant::{Breaches, Invariant};
use crate::model::{self, Oracle};
use crate::prompts::Prompts;
use crate::schedule::{self, Policy, WEIGHTS};
use crate::worker::MODEL;
use baton_kernels::sampling::Sampled;
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
        parameters.sampling.presence_penalty = Some(spec.penalties.presence);
        parameters.sampling.frequency_penalty = Some(spec.penalties.frequency);
        parameters.sampling.repetition_penalty = Some(spec.penalties.repetition);
        parameters.sampling.logprobs = spec.logprobs;
        parameters.sampling.ignore_eos = spec.ignore_eos;
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

    /// Reads to the end: each token is the right one, with its log-probabilities, and so are ends and counts.
    async fn compare(&self, mut generation: Generation) -> Ending {
        let sampling = generation.request.sampling.clone();
        let right = |sample| Oracle::of(&self.spec.prompt).answer(&sampling, sample);
        let right: Vec<Vec<Sampled>> = (0..self.spec.samples).map(right).collect();
        let (mut read, mut cached) = (vec![0; right.len()], Vec::new());
        let wrong =
            |what: String| self.breaches.add(Invariant::RightAnswer, format!("request {} {what}", self.request));
        while let Some(event) = generation.events.next().await {
            match event {
                Ok(Event::Delta(delta)) => {
                    let sample = delta.sample as usize;
                    let next = &right[sample][read[sample]..];
                    let next = &next[..delta.token_ids.len().min(next.len())];
                    let tokens: Vec<TokenId> = next.iter().map(|sampled| sampled.token).collect();
                    let logprobs: Vec<_> = next.iter().filter_map(|sampled| sampled.logprobs.clone()).collect();
                    if tokens != delta.token_ids || logprobs != delta.logprobs {
                        wrong(format!("is sent {delta:?}, and {next:?} is right"));
                        return Ending::Whole;
                    }
                    if delta.cached_tokens.is_some() != (read[sample] == 0) {
                        wrong(format!("is told of its cached tokens with {delta:?}, of which it had {}", read[sample]));
                    }
                    cached.extend(delta.cached_tokens);
                    read[sample] += delta.token_ids.len();
                    self.ends.begin(self.request, self.executor.time());
                    if read[sample] == 2 {
                        self.runtime.sleep_until(self.executor.instant(self.executor.time() + self.spec.pause)).await;
                    }
                }
                Ok(Event::Finished(finished)) => {
                    let answer = &right[finished.sample as usize];
                    let is_stop = finished.reason == FinishReason::Stop;
                    let ends_by_itself =
                        answer.last().is_some_and(|last| model::is_end(last.token)) && !sampling.ignore_eos;
                    if read[finished.sample as usize] != answer.len() || is_stop != ends_by_itself {
                        wrong(format!("ends with {read:?} tokens of {answer:?}: {finished:?}"));
                    }
                    if let Some(total) = finished.total {
                        let usage = total.usage;
                        let prompt = self.spec.prompt.len() as u32;
                        let tokens: usize = right.iter().map(Vec::len).sum();
                        let counts = (usage.prompt_tokens, usage.completion_tokens as usize, Some(usage.cached_tokens));
                        if counts != (prompt, tokens, cached.iter().min().copied())
                            || usage.cached_tokens + usage.cache_write_tokens > prompt
                        {
                            wrong(format!("of {prompt} and {tokens} tokens, {cached:?} cached, is charged {usage:?}"));
                        }
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
