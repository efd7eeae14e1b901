//! The configuration tree of a router.

use crate::auth::AuthConfig;
use crate::cache_scope::CacheConfig;
use crate::flow::Limits;
use crate::http::is_origin;
use crate::output::EVENT_BYTES;
use crate::page::PageConfig;
use crate::placement::{PlacementPolicy, Thresholds};
use crate::prices::PricesConfig;
use crate::recovery::{ProbationLimits, RetryLimits};
use crate::request::{PrefillPolicy, SAMPLES_MAX};
use baton_node::DrainConfig;
use baton_node::admin::AdminConfig;
use baton_node::config::{ByteSize, Check, Checker, list};
use baton_node::grpc::GrpcConfig;
use baton_node::host::memory_bytes;
use baton_node::identity::{IdentityConfig, ServerTlsConfig};
use baton_node::intake::Intake;
use baton_node::membership::embedded::LeaseConfig;
use baton_node::telemetry::TelemetryConfig;
use serde::{Deserialize, Serialize};
use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

/// Memory that parsing takes per byte of a body: the body itself and its parsed form. The worst case is lists of short
/// token ids: two bytes of JSON, or one byte of gRPC, become four.
pub(crate) const READING_COSTS: u64 = 4;

/// Everything that an operator may set.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterConfig {
    /// Log lines, and the traces that are exported.
    pub telemetry: TelemetryConfig,
    /// How the process ends.
    pub drain: DrainConfig,
    /// Health and metrics on a separate address; the HTTP API serves them in any case.
    pub admin: AdminConfig,
    /// Registered workers, and how leases are kept.
    pub membership: LeaseConfig,
    /// Inference, reflection and health over gRPC, for clients; also operator calls if keys are configured.
    pub grpc: GrpcConfig,
    /// The port where workers register and operators with certificates call; clients outside of the cluster must not
    /// reach it.
    pub cluster: GrpcConfig,
    /// How this router authenticates itself to workers and on its cluster port.
    pub identity: IdentityConfig,
    /// The certificate of the ports for clients: `grpc` and `http`.
    pub tls: ServerTlsConfig,
    /// The APIs of OpenAI and Anthropic, health and metrics over HTTP.
    pub http: HttpConfig,
    pub auth: AuthConfig,
    /// What `/metrics` shows besides.
    pub metrics: MetricsConfig,
    /// The page at `/` of the HTTP port.
    pub page: PageConfig,
    pub placement: PlacementConfig,
    /// Retries after a worker fails.
    pub retry: RetryConfig,
    pub limits: LimitsConfig,
    /// How requests use the prefix caches of workers.
    pub cache: CacheConfig,
    pub prices: PricesConfig,
}

impl Default for RouterConfig {
    fn default() -> Self {
        Self {
            telemetry: TelemetryConfig::default(),
            drain: DrainConfig::default(),
            admin: AdminConfig::default(),
            membership: LeaseConfig::default(),
            grpc: GrpcConfig::default().on((Ipv4Addr::LOCALHOST, 50051).into()),
            cluster: GrpcConfig::default().on((Ipv4Addr::LOCALHOST, 50052).into()),
            identity: IdentityConfig::default(),
            tls: ServerTlsConfig::default(),
            http: HttpConfig::default(),
            auth: AuthConfig::default(),
            metrics: MetricsConfig::default(),
            page: PageConfig::default(),
            placement: PlacementConfig::default(),
            retry: RetryConfig::default(),
            limits: LimitsConfig::default(),
            cache: CacheConfig::default(),
            prices: PricesConfig::default(),
        }
    }
}

/// Most origins: each answer is compared with them.
const CORS_ORIGINS_MAX: usize = 64;

/// Settings in the section `http`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HttpConfig {
    /// The listen address; port 0 takes a free one.
    pub listen: SocketAddr,
    /// Largest body of a request, in bytes.
    pub body_bytes_max: ByteSize,
    /// Longest time from the head of a request to the end of its body; slower ones are refused.
    pub body_ms_max: u64,
    /// Most connections at once; further ones wait until one of them closes.
    pub connections_max: u32,
    /// A connection without a complete request head for this long is closed; this applies to the first request and to
    /// later ones.
    pub idle_ms_max: u64,
    /// A stream whose first token takes longer than this is opened without it; comments keep it alive at this interval.
    pub sse_keepalive_ms: u64,
    /// Refuse fields of request bodies that the API does not have. Otherwise they are ignored and named in a header.
    pub strict_fields: bool,
    /// Origins of pages that may call and read answers in a browser, `scheme://host[:port]`, or `*` for all.
    #[serde(deserialize_with = "list")]
    pub cors_origins: Vec<String>,
}

impl Default for HttpConfig {
    fn default() -> Self {
        let listen = (Ipv4Addr::LOCALHOST, 8000).into();
        Self {
            listen,
            body_bytes_max: ByteSize(16 << 20),
            // The largest body, at 4 Mbit/s.
            body_ms_max: 30_000,
            connections_max: 16_384,
            // Longer than the 90 s for which clients' pools keep idle connections: the client should close first, since
            // it might be sending a request.
            idle_ms_max: 120_000,
            sse_keepalive_ms: 10_000,
            strict_fields: false,
            cors_origins: Vec::new(),
        }
    }
}

/// Settings in the section `metrics`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MetricsConfig {
    /// Shows requests also under the names of vLLM's metrics, such as `vllm:num_requests_waiting`.
    pub vllm_names: bool,
}

impl Check for MetricsConfig {
    fn check(&self, _: &mut Checker) {}
}

/// Settings in the section `placement`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PlacementConfig {
    /// How workers are chosen: `cost`; for comparison also `round-robin` or `least-loaded`.
    pub policy: PlacementPolicy,
    /// Where prompts are prefilled: `auto`, `remote` or `local`.
    pub prefill_policy: PrefillPolicy,
    /// With `auto`, prompts of at most this many tokens are prefilled on the decode worker.
    pub local_prefill_tokens_max: u64,
    /// Prefill rate assumed while no worker of the model has measured any.
    pub prefill_tokens_per_s_default: f64,
    /// The position at which a prompt token takes twice as long to prefill as the first one, in tokens; 0: all take the
    /// same time.
    pub prefill_doubles_at_tokens: f64,
    /// Rate at which KV is assumed to move between two workers.
    pub transfer_bytes_per_s_default: f64,
    /// Whether prefill workers get prefixes that decode workers have cached if that is cheaper than computing them.
    pub gets: bool,
    /// No request is placed on a worker whose last load report is older than this. Workers report at least every
    /// second.
    pub load_stale_ms_max: u64,
}

impl Default for PlacementConfig {
    fn default() -> Self {
        Self {
            policy: PlacementPolicy::Cost,
            prefill_policy: PrefillPolicy::Auto,
            local_prefill_tokens_max: 256,
            prefill_tokens_per_s_default: 1000.0,
            // Depends on the model: about 30,000 for Llama-3-8B, a few thousand for small models.
            prefill_doubles_at_tokens: 0.0,
            // 10 Gb/s, a low estimate for a data centre.
            transfer_bytes_per_s_default: 1.25e9,
            gets: true,
            load_stale_ms_max: 5_000,
        }
    }
}

/// Settings in the section `retry`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RetryConfig {
    /// Most attempts at one request, the first one included.
    pub attempts_max: u32,
    /// Wait before the first retry; doubles with each, and is jittered.
    pub backoff_ms_min: u64,
    /// Longest wait before a retry.
    pub backoff_ms_max: u64,
    /// Longest wait for workers that can continue an answer that has begun.
    pub place_ms_max: u64,
    /// Longest wait of a new request for a ready worker if there is none.
    pub ready_ms_max: u64,
    /// With prefill and decode on two workers: if the decode worker has not adopted the KV this long after the prefill
    /// worker reported the handoff, the decode worker counts as failed.
    pub adopted_ms_max: u64,
    /// Size of the burst of retries, all requests together.
    pub burst_max: u32,
    /// Sustained rate of retries per second, all requests together.
    pub per_s: f64,
    /// How long a worker that failed is avoided; doubles with each failure until it completes a request.
    pub probation_ms_min: u64,
    /// The longest time that a worker is avoided.
    pub probation_ms_max: u64,
}

impl Default for RetryConfig {
    fn default() -> Self {
        Self {
            // A long answer may meet several failures; a request that crashes its workers must not meet many.
            attempts_max: 5,
            // Many round trips within a data centre: a shorter wait mostly meets the same failure.
            backoff_ms_min: 20,
            backoff_ms_max: 1_000,
            // A worker process restarts within this time if its model is in the page cache.
            place_ms_max: 10_000,
            // A worker that was briefly unreachable is back within this time; after it, the load balancer tries another
            // router.
            ready_ms_max: 2_000,
            // The decode worker adopts the KV before the prefill worker is notified of it: this only waits for the
            // decode worker's stream, which may be slow on a busy worker.
            adopted_ms_max: 5_000,
            // All requests of one router may lose their worker at the same time.
            burst_max: 1024,
            per_s: 50.0,
            probation_ms_min: 1_000,
            probation_ms_max: 30_000,
        }
    }
}

/// With keys, all callers without one share this fraction (one in four) of `limits.intake_bytes_max`.
const FOR_STRANGERS: u64 = 4;
/// Without keys, calls to gRPC's standard services have memory of this fraction (one in 16) of it besides, a quarter
/// of that for one address. An address needs two megabytes for a call of reflection.
const FOR_STANDARD: u64 = 16;
const STANDARD_BYTES_MIN: u64 = 8 << 20;

/// Memory of one running request: 16 KiB as an open stream (`router_open_stream` of `make bench`). The rest is for
/// text, tokens and prefix hashes of a prompt of about ten thousand tokens, and for output that the client has not
/// read.
const RUNNING_BYTES: u64 = 256 << 10;
/// Running requests may use this fraction (one in four) of the memory: the other budgets below take more than half of a
/// small router's.
const FOR_RUNNING: u64 = 4;
/// Used if the host does not report its memory: the value of a router with 1 GiB.
const RUNNING_MAX_UNKNOWN: usize = 1024;
const RUNNING_MAX: std::ops::RangeInclusive<usize> = 1..=1 << 20;

/// How many requests may run with this much memory.
fn running_max_in(memory: Option<u64>) -> usize {
    let fit = |bytes: u64| usize::try_from(bytes / FOR_RUNNING / RUNNING_BYTES).unwrap_or(usize::MAX);
    memory.map_or(RUNNING_MAX_UNKNOWN, fit).clamp(*RUNNING_MAX.start(), *RUNNING_MAX.end())
}

/// Settings in the section `limits`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LimitsConfig {
    /// Most requests that run at once. The default is a quarter of the process's memory limit, at 256 KiB per request.
    pub running_max: usize,
    /// Most requests that wait for their turn; more are refused.
    pub queued_max: usize,
    /// Most bytes of requests that are not parsed yet, all clients together: partial bodies, and what they are parsed
    /// into. As much again is the most for tokenizing, over all prompts.
    pub intake_bytes_max: ByteSize,
    /// Most of that per client: a tenant, or without keys, an address.
    pub intake_share_bytes_max: ByteSize,
    /// Most bytes of answers, all clients together: deltas that are gathered before they are sent, the bodies built
    /// from them, and streamed output that clients have not read.
    pub answers_bytes_max: ByteSize,
    /// Most of that for one client, as with `intake_share_bytes_max`.
    pub answers_share_bytes_max: ByteSize,
    /// Deadline of requests that state none.
    pub deadline_ms_default: u64,
    /// Longest deadline that a request can state; longer ones are reduced to it.
    pub deadline_ms_max: u64,
    /// Longest wait for a decode worker's claim before another worker is tried.
    pub claim_ack_ms_max: u64,
    /// Over gRPC, how long the head of an answer waits for the first token, since it reports the cached share of the
    /// prompt. After that it is sent without the share. 0: it is sent at once.
    pub head_ms_max: u64,
    /// Events held for a client that does not read; beyond that the workers pause.
    pub client_events_max: usize,
    /// A client that reads nothing for this long is cancelled.
    pub client_stall_ms_max: u64,
}

impl Default for LimitsConfig {
    fn default() -> Self {
        Self {
            running_max: running_max_in(memory_bytes()),
            queued_max: 1024,
            // Three eighths of the memory that the chart gives a router: six of the largest bodies while they are
            // parsed.
            intake_bytes_max: ByteSize(384 << 20),
            intake_share_bytes_max: ByteSize(192 << 20),
            // Half as much: a larger answer should be read as a stream.
            answers_bytes_max: ByteSize(192 << 20),
            answers_share_bytes_max: ByteSize(96 << 20),
            deadline_ms_default: 600_000,
            deadline_ms_max: 3_600_000,
            claim_ack_ms_max: 5_000,
            head_ms_max: 10_000,
            client_events_max: 64,
            client_stall_ms_max: 30_000,
        }
    }
}

impl Check for RouterConfig {
    fn check(&self, at: &mut Checker) {
        at.section("telemetry", &self.telemetry)
            .section("drain", &self.drain)
            .section("admin", &self.admin)
            .section("membership", &self.membership)
            .section("grpc", &self.grpc)
            .section("cluster", &self.cluster)
            .section("identity", &self.identity)
            .section("tls", &self.tls)
            .section("http", &self.http)
            .section("auth", &self.auth)
            .section("metrics", &self.metrics)
            .section("page", &self.page)
            .section("placement", &self.placement)
            .section("retry", &self.retry)
            .section("limits", &self.limits)
            .section("cache", &self.cache)
            .section("prices", &self.prices);
        // The cluster port is separate from the port of clients, who have keys.
        self.identity.check_listeners(&[("cluster.listen", self.cluster.listen.ip())], at);
        self.identity.check_etcd(&self.membership.etcd, at);
        // One request of the largest size must fit beside what is reserved for small ones.
        let largest = self.http.body_bytes_max.0.max(self.grpc.message_bytes_max.0);
        at.require(
            "limits.intake_share_bytes_max",
            self.limits.intake_share_bytes_max.0 / 8 * 7 >= largest.saturating_mul(READING_COSTS),
            "at least 5 times http.body_bytes_max and grpc.message_bytes_max: a body is held as it came and as what it says",
        );
        let events = self.limits.client_events_max as u64 + u64::from(SAMPLES_MAX);
        at.require(
            "limits.answers_share_bytes_max",
            self.limits.answers_share_bytes_max.0 / 8 * 7 >= events.saturating_mul(EVENT_BYTES),
            "at least 600 bytes for each of limits.client_events_max and 128 more: a stream holds what may wait for its reader",
        );
    }
}

impl Check for HttpConfig {
    fn check(&self, at: &mut Checker) {
        at.range("body_bytes_max", self.body_bytes_max.0, 1024..=1 << 30)
            .range("body_ms_max", self.body_ms_max, 10..=3_600_000)
            .range("connections_max", self.connections_max, 1..=1 << 20)
            .range("idle_ms_max", self.idle_ms_max, 100..=3_600_000)
            .range("sse_keepalive_ms", self.sse_keepalive_ms, 10..=300_000)
            .require(
                "cors_origins",
                self.cors_origins.len() <= CORS_ORIGINS_MAX && self.cors_origins.iter().all(|origin| is_origin(origin)),
                "at most 64 origins such as https://chat.example.com, without a path and in lower case, or *",
            );
    }
}

impl Check for PlacementConfig {
    fn check(&self, at: &mut Checker) {
        at.range("prefill_tokens_per_s_default", self.prefill_tokens_per_s_default, 1.0..=1e9)
            .range("prefill_doubles_at_tokens", self.prefill_doubles_at_tokens, 0.0..=1e9)
            .range("transfer_bytes_per_s_default", self.transfer_bytes_per_s_default, 1e6..=1e13)
            .range("load_stale_ms_max", self.load_stale_ms_max, 1_500..=60_000);
    }
}

impl Check for RetryConfig {
    fn check(&self, at: &mut Checker) {
        at.range("attempts_max", self.attempts_max, 1..=16)
            .range("backoff_ms_min", self.backoff_ms_min, 1..=self.backoff_ms_max)
            .range("backoff_ms_max", self.backoff_ms_max, 1..=60_000)
            .range("place_ms_max", self.place_ms_max, 0..=600_000)
            .range("ready_ms_max", self.ready_ms_max, 0..=600_000)
            .range("adopted_ms_max", self.adopted_ms_max, 100..=600_000)
            .range("burst_max", self.burst_max, 0..=1 << 20)
            .range("per_s", self.per_s, 0.0..=1e6)
            .range("probation_ms_min", self.probation_ms_min, 1..=self.probation_ms_max)
            .range("probation_ms_max", self.probation_ms_max, 1..=600_000);
    }
}

impl Check for LimitsConfig {
    fn check(&self, at: &mut Checker) {
        at.range("running_max", self.running_max, RUNNING_MAX)
            .range("queued_max", self.queued_max, 0..=1 << 20)
            .range("intake_bytes_max", self.intake_bytes_max.0, 1 << 20..=1 << 40)
            .range("intake_share_bytes_max", self.intake_share_bytes_max.0, 1 << 20..=self.intake_bytes_max.0)
            .range("answers_bytes_max", self.answers_bytes_max.0, 1 << 20..=1 << 40)
            .range("answers_share_bytes_max", self.answers_share_bytes_max.0, 1 << 20..=self.answers_bytes_max.0)
            .range("deadline_ms_default", self.deadline_ms_default, 1..=self.deadline_ms_max)
            .range("deadline_ms_max", self.deadline_ms_max, 1..=86_400_000)
            .range("claim_ack_ms_max", self.claim_ack_ms_max, 1..=600_000)
            .range("head_ms_max", self.head_ms_max, 0..=600_000)
            .range("client_events_max", self.client_events_max, 1..=4096)
            .range("client_stall_ms_max", self.client_stall_ms_max, 1..=600_000);
    }
}

impl RouterConfig {
    /// The budget of requests that are not parsed yet.
    pub(crate) fn intake(&self) -> Intake {
        let (all, share) = (self.limits.intake_bytes_max.0, self.limits.intake_share_bytes_max.0);
        if self.auth.has_keys() {
            Intake::with_strangers(all, share, all / FOR_STRANGERS)
        } else {
            Intake::new(all, share)
        }
    }

    /// Without keys, the budget of calls to gRPC's standard services. With keys, callers without one have a part of
    /// the other budget, and these calls with them.
    pub(crate) fn standard_intake(&self) -> Option<Intake> {
        let all = (self.limits.intake_bytes_max.0 / FOR_STANDARD).max(STANDARD_BYTES_MIN);
        (!self.auth.has_keys()).then(|| Intake::new(all, all / 4))
    }

    pub(crate) fn flow_limits(&self) -> Limits {
        Limits {
            policy: self.placement.prefill_policy,
            placement: Thresholds {
                local_prefill_tokens_max: self.placement.local_prefill_tokens_max,
                prefill_tokens_per_s_default: self.placement.prefill_tokens_per_s_default,
                policy: self.placement.policy,
                prefill_doubles_at_tokens: self.placement.prefill_doubles_at_tokens,
                transfer_bytes_per_s: self.placement.transfer_bytes_per_s_default,
                gets: self.placement.gets,
            },
            retry: RetryLimits {
                attempts_max: self.retry.attempts_max,
                backoff_min: Duration::from_millis(self.retry.backoff_ms_min),
                backoff_max: Duration::from_millis(self.retry.backoff_ms_max),
                place_max: Duration::from_millis(self.retry.place_ms_max),
                ready_max: Duration::from_millis(self.retry.ready_ms_max),
                adopted_max: Duration::from_millis(self.retry.adopted_ms_max),
            },
            probation: ProbationLimits {
                min: Duration::from_millis(self.retry.probation_ms_min),
                max: Duration::from_millis(self.retry.probation_ms_max),
            },
            claim_max: Duration::from_millis(self.limits.claim_ack_ms_max),
            client_events_max: self.limits.client_events_max,
            client_stall_max: Duration::from_millis(self.limits.client_stall_ms_max),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn as_many_requests_run_as_memory_holds() {
        let cases =
            [(None, 1024), (Some(1 << 30), 1024), (Some(16 << 30), 16_384), (Some(0), 1), (Some(u64::MAX), 1 << 20)];
        for (memory, expected) in cases {
            assert_eq!(running_max_in(memory), expected, "{memory:?}");
        }
    }
}
