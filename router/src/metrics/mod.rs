//! Router-side metrics. Labels are bounded: models and pools come from workers' records, everything else from enums.
//! The pool is that of the request's decode worker; it is empty before placement.

mod auth;
mod cache;
mod changes;
mod intake;
mod membership;
mod prefixes;
mod ready;
mod vllm;
mod window;

pub(crate) use auth::AuthMetrics;
pub(crate) use cache::CacheMetrics;
pub(crate) use changes::{MembershipChange, MembershipChanges};
pub(crate) use intake::IntakeMetrics;
pub(crate) use membership::MembershipMetrics;
pub(crate) use prefixes::{IndexMetrics, PrefixMetrics};
pub(crate) use vllm::{VllmKvUsage, VllmMetrics};

use crate::placement::Reason;
use crate::recovery::{GiveUp, Step};
use crate::status::RecentTimes;
use baton_types::{ErrorKind, ModelCard, Usage};
use parking_lot::Mutex;
use prometheus_client::encoding::{EncodeLabelSet, LabelValueEncoder};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::collections::BTreeMap;
use std::fmt::{self, Write as _};
use std::sync::Arc;
use std::time::{Duration, Instant};
use vllm::VllmRequest;

/// Pool of a request that was not placed yet, or never.
const NO_POOL: &str = "";

/// How a request ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Outcome {
    /// With a finish reason.
    Ok,
    /// With an error of this kind.
    Failed(ErrorKind),
}

impl Outcome {
    const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Failed(kind) => kind.name(),
        }
    }
}

/// A label value from a fixed set.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Name(&'static str);

impl prometheus_client::encoding::EncodeLabelValue for Name {
    fn encode(&self, encoder: &mut LabelValueEncoder<'_>) -> Result<(), fmt::Error> {
        encoder.write_str(self.0)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, EncodeLabelSet)]
struct ModelLabels {
    model: String,
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    model: String,
    pool: String,
    outcome: Name,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    model: String,
    pool: String,
    reason: Name,
}

/// Seconds: from one token on a GPU to minutes in a queue.
const SECONDS: [f64; 16] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

fn histogram() -> Histogram {
    Histogram::new(SECONDS)
}

type Histograms = Family<ModelLabels, Histogram, fn() -> Histogram>;

/// All metrics of this router.
#[derive(Clone, Debug)]
pub(crate) struct RouterMetrics {
    requests: Family<OutcomeLabels, Counter>,
    placements: Family<ReasonLabels, Counter>,
    retries: Family<ReasonLabels, Counter>,
    given_up: Family<ReasonLabels, Counter>,
    ignored_fields: Counter,
    replayed_tokens: Family<ModelLabels, Counter>,
    in_flight: Family<ModelLabels, Gauge>,
    prompt_tokens: Family<ModelLabels, Counter>,
    completion_tokens: Family<ModelLabels, Counter>,
    time_to_first_token: Histograms,
    inter_token: Histograms,
    end_to_end: Histograms,
    queue: Histograms,
    recent: Arc<RecentTimes>,
    models: Arc<Mutex<BTreeMap<ModelLabels, Arc<ModelMetrics>>>>,
    /// The same under other names, where they are asked for.
    vllm: Option<VllmMetrics>,
}

/// The metrics of one model in one pool of decode workers.
#[derive(Debug)]
pub(crate) struct ModelMetrics {
    all: RouterMetricsOf,
    /// Requests running or queued.
    in_flight: Gauge,
    prompt_tokens: Counter,
    completion_tokens: Counter,
    /// Tokens that an earlier attempt generated and a later one prefilled again.
    pub(crate) replayed_tokens: Counter,
    /// Request received to first token sent.
    time_to_first_token: Histogram,
    inter_token: Histogram,
    /// Request received to end.
    end_to_end: Histogram,
    /// Request received to its turn.
    pub(crate) queue: Histogram,
}

#[derive(Debug)]
struct RouterMetricsOf {
    labels: ModelLabels,
    requests: Family<OutcomeLabels, Counter>,
    placements: Family<ReasonLabels, Counter>,
    retries: Family<ReasonLabels, Counter>,
    given_up: Family<ReasonLabels, Counter>,
}

impl RouterMetrics {
    /// Registers all metrics; names get the registry's prefix.
    pub(crate) fn register(registry: &mut Registry) -> Self {
        let histograms = || Histograms::new_with_constructor(histogram as fn() -> Histogram);
        let new = Self {
            requests: Family::default(),
            placements: Family::default(),
            retries: Family::default(),
            given_up: Family::default(),
            ignored_fields: Counter::default(),
            replayed_tokens: Family::default(),
            in_flight: Family::default(),
            prompt_tokens: Family::default(),
            completion_tokens: Family::default(),
            time_to_first_token: histograms(),
            inter_token: histograms(),
            end_to_end: histograms(),
            queue: histograms(),
            recent: Arc::default(),
            models: Arc::default(),
            vllm: None,
        };
        registry.register("router_requests", "Requests ended, by outcome", new.requests.clone());
        registry.register("router_placements", "Placement decisions, by reason", new.placements.clone());
        registry.register("router_retries", "Attempts after a failure, by phase of the failure", new.retries.clone());
        let given_up = "Requests not tried again after a failure, by reason";
        registry.register("router_given_up", given_up, new.given_up.clone());
        let ignored = "Fields of request bodies that were ignored, since the API does not have them";
        registry.register("router_ignored_fields", ignored, new.ignored_fields.clone());
        let replayed = "Generated tokens prefilled anew because a worker failed";
        registry.register("router_replayed_tokens", replayed, new.replayed_tokens.clone());
        registry.register("router_requests_in_flight", "Requests running or queued", new.in_flight.clone());
        registry.register("router_prompt_tokens", "Tokens of prompts", new.prompt_tokens.clone());
        registry.register("router_completion_tokens", "Tokens generated", new.completion_tokens.clone());
        let mut seconds = |name: &str, help: &str, family: &Histograms| {
            registry.register_with_unit(name, help, Unit::Seconds, family.clone());
        };
        seconds("router_time_to_first_token", "Request received to first token sent", &new.time_to_first_token);
        seconds("router_inter_token", "Token to token, as sent", &new.inter_token);
        seconds("router_request_duration", "Request received to its end", &new.end_to_end);
        seconds("router_queue", "Request received to its turn", &new.queue);
        new
    }

    /// With the names of vLLM besides.
    pub(crate) fn with_vllm(self, vllm: Option<VllmMetrics>) -> Self {
        Self { vllm, ..self }
    }

    /// Recent times to the first token.
    pub(crate) fn recent(&self) -> &RecentTimes {
        &self.recent
    }

    /// The metrics of a request for a served model that is not placed yet.
    pub(crate) fn of(&self, card: &ModelCard, received: Instant) -> RequestMetrics {
        let current = self.in_pool(&card.id, NO_POOL);
        current.in_flight.inc();
        let vllm = self.vllm.as_ref().map(|vllm| vllm.request(card.public_name(), received));
        RequestMetrics { all: self.clone(), current: Mutex::new(current), vllm }
    }

    fn in_pool(&self, model: &str, pool: &str) -> Arc<ModelMetrics> {
        let labels = ModelLabels { model: model.to_owned(), pool: pool.to_owned() };
        if let Some(metrics) = self.models.lock().get(&labels) {
            return metrics.clone();
        }
        let metrics = Arc::new(ModelMetrics {
            all: RouterMetricsOf {
                labels: labels.clone(),
                requests: self.requests.clone(),
                placements: self.placements.clone(),
                retries: self.retries.clone(),
                given_up: self.given_up.clone(),
            },
            in_flight: self.in_flight.get_or_create(&labels).clone(),
            prompt_tokens: self.prompt_tokens.get_or_create(&labels).clone(),
            completion_tokens: self.completion_tokens.get_or_create(&labels).clone(),
            replayed_tokens: self.replayed_tokens.get_or_create(&labels).clone(),
            time_to_first_token: self.time_to_first_token.get_or_create(&labels).clone(),
            inter_token: self.inter_token.get_or_create(&labels).clone(),
            end_to_end: self.end_to_end.get_or_create(&labels).clone(),
            queue: self.queue.get_or_create(&labels).clone(),
        });
        self.models.lock().entry(labels).or_insert(metrics).clone()
    }

    /// Counts fields that were ignored. Their names are the clients', so no labels.
    pub(crate) fn ignored_fields(&self, count: usize) {
        self.ignored_fields.inc_by(count as u64);
    }

    /// Counts a request that never reached a model. The model name that a client sends is not a label: it is unbounded.
    pub(crate) fn refused(&self, outcome: Outcome) {
        let labels = OutcomeLabels { model: String::new(), pool: NO_POOL.into(), outcome: Name(outcome.name()) };
        self.requests.get_or_create(&labels).inc();
    }
}

impl RouterMetricsOf {
    fn count(&self, family: &Family<ReasonLabels, Counter>, reason: &'static str) {
        let ModelLabels { model, pool } = self.labels.clone();
        family.get_or_create(&ReasonLabels { model, pool, reason: Name(reason) }).inc();
    }
}

impl ModelMetrics {
    /// Counts a request's end.
    fn ended(&self, outcome: Outcome) {
        let ModelLabels { model, pool } = self.all.labels.clone();
        let labels = OutcomeLabels { model, pool, outcome: Name(outcome.name()) };
        self.all.requests.get_or_create(&labels).inc();
    }

    fn placed(&self, reason: Reason) {
        self.all.count(&self.all.placements, reason.name());
    }

    pub(crate) fn retried(&self, failed: Step) {
        self.all.count(&self.all.retries, failed.name());
    }

    /// Counts a failure after which the request was not retried.
    pub(crate) fn gave_up(&self, why: GiveUp) {
        self.all.count(&self.all.given_up, why.name());
    }
}

/// The metrics of one request: in flight while this lives, counted for the pool of its last placement.
#[derive(Debug)]
pub(crate) struct RequestMetrics {
    all: RouterMetrics,
    current: Mutex<Arc<ModelMetrics>>,
    vllm: Option<VllmRequest>,
}

impl RequestMetrics {
    /// A worker has taken the request from its queue.
    pub(crate) fn began(&self, now: Instant) {
        if let Some(vllm) = &self.vllm {
            vllm.began(now);
        }
    }

    /// The first token was sent at `now`, this long after the request arrived.
    pub(crate) fn first_token(&self, after: Duration, now: Instant) {
        self.all.recent.add(after, now);
        self.current().time_to_first_token.observe(after.as_secs_f64());
        if let Some(vllm) = &self.vllm {
            vllm.first_token(now);
        }
    }

    /// A token was sent this long after the one before it.
    pub(crate) fn inter_token(&self, time: Duration) {
        self.current().inter_token.observe(time.as_secs_f64());
        if let Some(vllm) = &self.vllm {
            vllm.inter_token(time);
        }
    }

    /// It ended at `now`, this long after it arrived: with a finish reason, or an error.
    pub(crate) fn ended(&self, usage: &Usage, end: Result<&'static str, ErrorKind>, took: Duration, now: Instant) {
        let current = self.current();
        current.end_to_end.observe(took.as_secs_f64());
        current.prompt_tokens.inc_by(u64::from(usage.prompt_tokens));
        current.completion_tokens.inc_by(u64::from(usage.completion_tokens));
        current.ended(end.map_or_else(Outcome::Failed, |_| Outcome::Ok));
        if let Some(vllm) = &self.vllm {
            vllm.ended(usage, end, now);
        }
    }

    /// The metrics of its current pool.
    pub(crate) fn current(&self) -> Arc<ModelMetrics> {
        self.current.lock().clone()
    }

    /// Moves the request to the pool of a decode worker, and counts the placement there.
    pub(crate) fn placed(&self, pool: &str, reason: Reason) {
        let mut current = self.current.lock();
        let next = self.all.in_pool(&current.all.labels.model, pool);
        next.in_flight.inc();
        current.in_flight.dec();
        next.placed(reason);
        *current = next;
    }
}

impl Drop for RequestMetrics {
    fn drop(&mut self) {
        self.current.get_mut().in_flight.dec();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_counts_for_the_pool_of_its_decode_worker() {
        let mut registry = Registry::default();
        let metrics = RouterMetrics::register(&mut registry);
        let shown = |what: &str| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            let lines = text.lines().filter(|l| l.starts_with(what) && !l.ends_with(" 0"));
            lines.collect::<Vec<_>>().join(" ")
        };
        let card = crate::testing::record(baton_types::Role::Decode, "d").card;
        let request = metrics.of(&card, Instant::now());
        assert_eq!(shown("router_requests_in_flight"), r#"router_requests_in_flight{model="m",pool=""} 1"#);
        request.placed("blue", Reason::LocalPolicy);
        request.placed("green", Reason::LocalNoPrefillWorker);
        request.current().ended(Outcome::Ok);
        assert_eq!(shown("router_requests_in_flight"), r#"router_requests_in_flight{model="m",pool="green"} 1"#);
        assert_eq!(shown("router_requests_total"), r#"router_requests_total{model="m",pool="green",outcome="ok"} 1"#);
        assert!(shown("router_placements").contains(r#"pool="blue",reason="local_policy"} 1"#));
        drop(request);
        assert_eq!(shown("router_requests_in_flight"), "");
    }
}
