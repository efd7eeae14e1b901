//! The same events under the names of vLLM's metrics, for dashboards and endpoint pickers that know those. Gauges and
//! histograms are of this router's requests, so sums over routers are those of the cluster.

use super::histogram;
use crate::status::ClusterStatus;
use baton_types::{ErrorKind, Usage};
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::{ConstGauge, Gauge};
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Tokens of a request: from one to the longest contexts.
const TOKENS: [f64; 17] =
    [1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1e3, 2e3, 5e3, 1e4, 2e4, 5e4, 1e5, 2e5];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model_name: String,
    /// Queries of dashboards select by it; there is one router in this process.
    engine: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct FinishLabels {
    model_name: String,
    engine: &'static str,
    finished_reason: &'static str,
}

type Histograms = Family<Labels, Histogram, fn() -> Histogram>;

fn labels(model: &str) -> Labels {
    Labels { model_name: model.to_owned(), engine: "0" }
}

fn tokens() -> Histogram {
    Histogram::new(TOKENS)
}

/// All of them, by model.
#[derive(Clone, Debug)]
pub(crate) struct VllmMetrics {
    running: Family<Labels, Gauge>,
    waiting: Family<Labels, Gauge>,
    success: Family<FinishLabels, Counter>,
    prompt_tokens: Family<Labels, Counter>,
    generation_tokens: Family<Labels, Counter>,
    prefix_queries: Family<Labels, Counter>,
    prefix_hits: Family<Labels, Counter>,
    request_prompt: Histograms,
    request_generation: Histograms,
    time_to_first_token: Histograms,
    inter_token: Histograms,
    per_output_token: Histograms,
    end_to_end: Histograms,
    queue: Histograms,
    prefill: Histograms,
    decode: Histograms,
    inference: Histograms,
    /// Whether cached tokens are exported; see [`CacheMetrics`](super::CacheMetrics).
    shows_cache: bool,
}

impl VllmMetrics {
    pub(crate) fn register(registry: &mut Registry, shows_cache: bool) -> Self {
        let seconds = || Histograms::new_with_constructor(histogram as fn() -> Histogram);
        let counts = || Histograms::new_with_constructor(tokens as fn() -> Histogram);
        let new = Self {
            running: Family::default(),
            waiting: Family::default(),
            success: Family::default(),
            prompt_tokens: Family::default(),
            generation_tokens: Family::default(),
            prefix_queries: Family::default(),
            prefix_hits: Family::default(),
            request_prompt: counts(),
            request_generation: counts(),
            time_to_first_token: seconds(),
            inter_token: seconds(),
            per_output_token: seconds(),
            end_to_end: seconds(),
            queue: seconds(),
            prefill: seconds(),
            decode: seconds(),
            inference: seconds(),
            shows_cache,
        };
        registry.register("vllm:num_requests_running", "Requests that a worker computes", new.running.clone());
        registry.register("vllm:num_requests_waiting", "Requests in queues", new.waiting.clone());
        registry.register("vllm:request_success", "Requests that ended with a finish reason", new.success.clone());
        registry.register("vllm:prompt_tokens", "Tokens of prompts", new.prompt_tokens.clone());
        registry.register("vllm:generation_tokens", "Tokens generated", new.generation_tokens.clone());
        if shows_cache {
            let looked = "Prompt tokens looked up in prefix caches";
            registry.register("vllm:prefix_cache_queries", looked, new.prefix_queries.clone());
            registry.register("vllm:prefix_cache_hits", "Prompt tokens found there", new.prefix_hits.clone());
        }
        for (name, help, family) in [
            ("request_prompt_tokens", "Prompt tokens of a request", &new.request_prompt),
            ("request_generation_tokens", "Tokens generated for a request", &new.request_generation),
            ("time_to_first_token_seconds", "Request received to first token sent", &new.time_to_first_token),
            ("inter_token_latency_seconds", "Token to token, as sent", &new.inter_token),
            ("request_time_per_output_token_seconds", "Mean of a request's", &new.per_output_token),
            ("e2e_request_latency_seconds", "Request received to its end", &new.end_to_end),
            ("request_queue_time_seconds", "Time in the queues of router and worker", &new.queue),
            ("request_prefill_time_seconds", "End of the queues to first token sent", &new.prefill),
            ("request_decode_time_seconds", "First token sent to end", &new.decode),
            ("request_inference_time_seconds", "End of the queues to end", &new.inference),
        ] {
            registry.register(format!("vllm:{name}"), help, family.clone());
        }
        new
    }

    /// A new request, which waits.
    pub(super) fn request(&self, model: &str, received: Instant) -> VllmRequest {
        self.waiting.get_or_create(&labels(model)).inc();
        VllmRequest {
            all: self.clone(),
            labels: labels(model),
            received,
            began: AtomicBool::new(false),
            times: parking_lot::Mutex::default(),
        }
    }
}

/// When the phases of a request began.
#[derive(Clone, Copy, Debug, Default)]
struct Times {
    began: Option<Instant>,
    first_token: Option<Instant>,
}

/// One request: waiting until its compute begins, then running until this is dropped.
#[derive(Debug)]
pub(super) struct VllmRequest {
    all: VllmMetrics,
    labels: Labels,
    received: Instant,
    began: AtomicBool,
    times: parking_lot::Mutex<Times>,
}

impl VllmRequest {
    fn observe(&self, family: &Histograms, time: Duration) {
        family.get_or_create(&self.labels).observe(time.as_secs_f64());
    }

    /// A worker has taken it from its queue. Later attempts change nothing.
    pub(super) fn began(&self, now: Instant) {
        if self.began.swap(true, Ordering::Relaxed) {
            return;
        }
        self.times.lock().began = Some(now);
        self.all.waiting.get_or_create(&self.labels).dec();
        self.all.running.get_or_create(&self.labels).inc();
        self.observe(&self.all.queue, now.saturating_duration_since(self.received));
    }

    pub(super) fn first_token(&self, now: Instant) {
        self.began(now);
        let mut times = self.times.lock();
        times.first_token = Some(now);
        self.observe(&self.all.time_to_first_token, now.saturating_duration_since(self.received));
        let began = times.began.unwrap_or(now);
        self.observe(&self.all.prefill, now.saturating_duration_since(began));
    }

    pub(super) fn inter_token(&self, time: Duration) {
        self.observe(&self.all.inter_token, time);
    }

    /// Its end: the finish reason, or the error.
    pub(super) fn ended(&self, usage: &Usage, end: Result<&'static str, ErrorKind>, now: Instant) {
        let times = *self.times.lock();
        let finished_reason = match end {
            Ok("cancelled") | Err(ErrorKind::Cancelled) => "abort",
            Ok(reason) => reason,
            Err(_) => "error",
        };
        let labels = FinishLabels { model_name: self.labels.model_name.clone(), engine: "0", finished_reason };
        self.all.success.get_or_create(&labels).inc();
        let (prompt, generated) = (usage.prompt_tokens, usage.completion_tokens);
        let count = |family: &Family<Labels, Counter>, tokens: u32| {
            family.get_or_create(&self.labels).inc_by(u64::from(tokens));
        };
        count(&self.all.prompt_tokens, prompt);
        count(&self.all.generation_tokens, generated);
        if self.all.shows_cache && times.first_token.is_some() {
            count(&self.all.prefix_queries, prompt);
            count(&self.all.prefix_hits, usage.cached_tokens);
        }
        self.all.request_prompt.get_or_create(&self.labels).observe(f64::from(prompt));
        self.all.request_generation.get_or_create(&self.labels).observe(f64::from(generated));
        self.observe(&self.all.end_to_end, now.saturating_duration_since(self.received));
        if let Some(began) = times.began {
            self.observe(&self.all.inference, now.saturating_duration_since(began));
        }
        if let Some(first) = times.first_token {
            let decode = now.saturating_duration_since(first);
            self.observe(&self.all.decode, decode);
            if let Some(later) = generated.checked_sub(1).filter(|later| *later > 0) {
                self.observe(&self.all.per_output_token, decode / later);
            }
        }
    }
}

impl Drop for VllmRequest {
    fn drop(&mut self) {
        let began = *self.began.get_mut();
        let gauge = if began { &self.all.running } else { &self.all.waiting };
        gauge.get_or_create(&self.labels).dec();
    }
}

/// `vllm:kv_cache_usage_perc`, computed at each scrape: the share of the blocks of all decode workers of a model that
/// sequences use.
#[derive(Debug)]
pub(crate) struct VllmKvUsage(pub(crate) ClusterStatus);

impl Collector for VllmKvUsage {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let mut models: BTreeMap<String, (u64, u64)> = BTreeMap::new();
        for (model, used, total) in self.0.decode_blocks(Instant::now()) {
            let of = models.entry(model).or_default();
            *of = (of.0 + used, of.1 + total);
        }
        let help = "Share of the KV blocks of decode workers that sequences use, 0 to 1";
        let mut family = to.encode_descriptor("vllm:kv_cache_usage_perc", help, None, MetricType::Gauge)?;
        for (model, (used, total)) in models.into_iter().filter(|(_, (_, total))| *total > 0) {
            let share = ConstGauge::new(used as f64 / total as f64);
            share.encode(family.encode_family(&labels(&model))?)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_waits_runs_and_ends_under_vllms_names() {
        let mut registry = Registry::default();
        let metrics = VllmMetrics::register(&mut registry, true);
        let shown = || {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text
        };
        let value = |line: &str| {
            let text = shown();
            let value = text.lines().find_map(|l| l.strip_prefix(line)).map(|v| v.trim().parse::<f64>().unwrap());
            value.unwrap_or_else(|| panic!("no {line} in:\n{text}"))
        };
        let of = r#"{model_name="m",engine="0"}"#;
        let start = Instant::now();
        let at = |ms: u64| start + Duration::from_millis(ms);
        let request = metrics.request("m", start);
        assert_eq!(value(&format!("vllm:num_requests_waiting{of}")), 1.0);
        request.began(at(100));
        request.began(at(900));
        assert_eq!(value(&format!("vllm:num_requests_waiting{of}")), 0.0);
        assert_eq!(value(&format!("vllm:num_requests_running{of}")), 1.0);
        request.first_token(at(300));
        request.inter_token(Duration::from_millis(10));
        let usage = Usage { prompt_tokens: 40, completion_tokens: 5, cached_tokens: 16, ..Usage::default() };
        request.ended(&usage, Ok("stop"), at(700));
        drop(request);
        for (name, sum) in [
            ("request_queue_time_seconds", 0.1),
            ("time_to_first_token_seconds", 0.3),
            ("request_prefill_time_seconds", 0.2),
            ("request_decode_time_seconds", 0.4),
            ("request_inference_time_seconds", 0.6),
            ("e2e_request_latency_seconds", 0.7),
            ("request_time_per_output_token_seconds", 0.1),
            ("inter_token_latency_seconds", 0.01),
            ("request_prompt_tokens", 40.0),
            ("request_generation_tokens", 5.0),
        ] {
            let got = value(&format!("vllm:{name}_sum{of}"));
            assert!((got - sum).abs() < 1e-9, "{name}: {got}");
            assert_eq!(value(&format!("vllm:{name}_count{of}")), 1.0, "{name}");
        }
        for (name, count) in [
            ("prompt_tokens", 40.0),
            ("generation_tokens", 5.0),
            ("prefix_cache_queries", 40.0),
            ("prefix_cache_hits", 16.0),
        ] {
            assert_eq!(value(&format!("vllm:{name}_total{of}")), count);
        }
        let success = r#"vllm:request_success_total{model_name="m",engine="0",finished_reason="stop"}"#;
        assert_eq!(value(success), 1.0);
        assert_eq!(value(&format!("vllm:num_requests_running{of}")), 0.0);

        // A request that never began leaves the queue.
        let request = metrics.request("m", start);
        request.ended(&Usage::default(), Err(ErrorKind::Cancelled), at(1));
        drop(request);
        assert_eq!(value(&format!("vllm:num_requests_waiting{of}")), 0.0);
        assert_eq!(value(&success.replace("stop", "abort")), 1.0);
        let request = metrics.request("m", start);
        request.ended(&Usage::default(), Ok("cancelled"), at(1));
        drop(request);
        assert_eq!(value(&success.replace("stop", "abort")), 2.0);
        assert!(!shown().contains("cancelled"), "it is no reason of vLLM's");
    }
}
