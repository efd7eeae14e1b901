//! A fleet: a cluster whose workers have the speeds of a file of rates, and the requests that it serves until all have ended. There are
//! no faults and no random delays; the seed decides only what the product code draws.

mod clients;
#[cfg(test)]
mod tests;

pub use clients::{Ask, Served};

use crate::cluster::Cluster;
use crate::executor::{Executor, Process, Time, ms};
use crate::invariant::{Breach, Breaches};
use crate::network::{Delays, Lane};
use crate::plan::{ClusterPlan, DevicePlan, RouterPlan, WorkerPlan};
use crate::rated;
use crate::rates::Rates;
use crate::worker::MODEL;
use crate::worker::transfer::Tempo;
use baton_engine::{EngineConfig, PrefixCacheConfig, SpeculationConfig};
use baton_kv_transfer::TransferLimits;
use baton_router::{PlacementPolicy, RouterConfig};
use baton_types::{KvLayout, Role, TokenId};
use clients::Clients;
use std::sync::Arc;
use std::time::Duration;

/// Token ids that prompts may have.
pub const TOKENS: std::ops::RangeInclusive<TokenId> = 0..=rated::VOCAB - 1;
/// The first request arrives after the router has found its workers.
const BEGINS: Time = ms(2_000);
/// Large enough that no queue refuses a request.
const QUEUE_MAX: usize = 1 << 20;
/// Long enough that no request times out, however long the queues are.
const PATIENCE: Duration = Duration::from_secs(30 * 24 * 3_600);
/// Longest step: no step counts as hung, at any rates.
const STEP_MAX: Duration = Duration::from_secs(3_600);
/// Bound of the router's index. Its memory depends only on its contents.
const INDEX_BLOCKS_MAX: usize = 1 << 28;

/// A fleet.
#[derive(Clone, Debug)]
pub struct Fleet {
    pub rates: Arc<Rates>,
    pub policy: PlacementPolicy,
    /// Prefill workers.
    pub prefill: usize,
    /// Decode workers.
    pub decode: usize,
    /// Tokens of a block in every pool; see [`Fleet::block_tokens`].
    pub block_tokens: u32,
    /// Blocks of each prefill worker's pool.
    pub prefill_blocks: u32,
    /// Blocks of each decode worker's pool.
    pub decode_blocks: u32,
    /// Longest request, prompt and answer together.
    pub len_max: u32,
    /// Time without use after which a block is evicted, if there is one.
    pub ttl: Option<Duration>,
    /// Whether prefill workers may get what decode workers have cached.
    pub gets: bool,
    pub seed: u64,
}

/// The results of all requests.
#[derive(Debug)]
pub struct Outcome {
    /// One for each request, in order.
    pub served: Vec<Served>,
    /// Tokens that prefill workers got from decode workers.
    pub got_tokens: u64,
    /// Polls and calls of the simulation.
    pub events: u64,
}

impl Fleet {
    /// The largest block size of a layout that divides blocks of this many tokens, or the smallest one if none does.
    pub fn block_tokens(of: u32) -> u32 {
        let granule = KvLayout::GRANULE_TOKENS;
        let sizes = (1..=KvLayout::BLOCK_TOKENS_MAX / granule).rev().map(|granules| granules * granule);
        sizes.into_iter().find(|size| of.is_multiple_of(*size)).unwrap_or(granule)
    }

    /// Serves all requests. `prompt` returns the tokens of one.
    ///
    /// # Errors
    /// What went wrong: a defect of product code or of the simulation.
    pub fn serve(
        &self,
        asks: Vec<Ask>,
        prompt: impl Fn(usize) -> Vec<TokenId> + Send + Sync + 'static,
    ) -> Result<Outcome, Breach> {
        let (cluster, clients) = self.start(asks, Arc::new(prompt));
        while !clients.are_over() && cluster.executor.step(Time::MAX) {}
        let outcome =
            Outcome { served: clients.take(), got_tokens: self.got_tokens(&cluster), events: cluster.executor.steps() };
        cluster.end();
        cluster.breaches.first().map_or(Ok(outcome), Err)
    }

    /// Starts all processes and schedules the requests.
    fn start(&self, asks: Vec<Ask>, prompt: Arc<clients::Prompt>) -> (Cluster, Clients) {
        let cluster = Cluster::start(Executor::new(self.seed, Duration::ZERO), self.plan(), Breaches::default());
        let clients = Clients::new(&cluster.executor, asks, prompt);
        for (number, at) in clients.arrivals() {
            let (cluster, clients) = (cluster.clone(), clients.clone());
            cluster.executor.clone().call(BEGINS + at, Process::WORLD, move || {
                let (core, process) = cluster.router_at(0);
                cluster.executor.spawn(process, clients.ask(number, core.expect("routers of a fleet run"), process));
            });
        }
        (cluster, clients)
    }

    fn got_tokens(&self, cluster: &Cluster) -> u64 {
        // Decode workers put nothing, so their counters show only what others get from them.
        let owners = cluster.workers().into_iter().filter(|worker| worker.decodes());
        let bytes: u64 = owners.map(|worker| worker.transfer.stats().total.bytes_put).sum();
        bytes / rated::layout(self.block_tokens).bytes_per_token() as u64
    }

    fn plan(&self) -> ClusterPlan {
        let transfer = &self.rates.transfer;
        // A handoff takes at least four messages: offer, grant, flush, acknowledgement.
        let message = micros(transfer.latency_s / 4.0);
        let workers = |role: Role, count: usize| (0..count).map(move |number| self.worker(role, number));
        ClusterPlan {
            routers: vec![RouterPlan { name: "router".into(), config: self.router() }],
            workers: workers(Role::Prefill, self.prefill).chain(workers(Role::Decode, self.decode)).collect(),
            lane: Lane::QueuePair,
            // With and without one-sided reads, the bytes use the owner's wire.
            one_sided_gets: false,
            is_embedded: false,
            delays: Delays::Steady { message, bytes_per_s: self.wire_bytes_per_s() },
            half_trip: Some(micros(self.rates.router.round_trip_s / 2.0)),
        }
    }

    /// The rate at which this small KV moves as many tokens per second as KV of the model's size.
    fn wire_bytes_per_s(&self) -> f64 {
        let ours = rated::layout(self.block_tokens).bytes_per_token() as f64;
        self.rates.transfer.bytes_per_s * ours / f64::from(self.rates.kv.bytes_per_token)
    }

    fn worker(&self, role: Role, number: usize) -> WorkerPlan {
        let (blocks, chunk_tokens) = match role {
            Role::Prefill => (self.prefill_blocks, self.rates.prefill.chunk_tokens),
            Role::Decode => (self.decode_blocks, self.rates.decode.chunk_tokens),
        };
        let engine = EngineConfig {
            model_len_max: self.len_max as usize + 1,
            chunk_tokens_max: chunk_tokens as usize,
            mixed_chunk_tokens_max: chunk_tokens as usize,
            running_max: self.rates.decode.running_max as usize,
            waiting_max: QUEUE_MAX,
            step_max: STEP_MAX,
            // The file's rates are those of steps without proposals.
            speculation: SpeculationConfig::OFF,
            prefix_cache: Some(PrefixCacheConfig { ttl: self.ttl.unwrap_or(PATIENCE), ..PrefixCacheConfig::default() }),
            ..EngineConfig::default()
        };
        let patience_ms = PATIENCE.as_millis() as u64;
        let transfer = TransferLimits {
            started_handoffs_max: QUEUE_MAX,
            accepted_handoffs_max: QUEUE_MAX,
            peers_max: QUEUE_MAX,
            accepted_max: QUEUE_MAX,
            handoff_ms: patience_ms,
            ..TransferLimits::default()
        };
        WorkerPlan {
            name: format!("{}-{number}", role.name()),
            role,
            layout: rated::layout(self.block_tokens),
            blocks,
            states: 0,
            engine,
            transfer,
            tempo: Tempo::STEADY,
            call_max: PATIENCE,
            device: DevicePlan::Rated(self.rates.clone()),
        }
    }

    fn router(&self) -> RouterConfig {
        let mut config = RouterConfig::default();
        (config.limits.running_max, config.limits.queued_max) = (QUEUE_MAX, QUEUE_MAX);
        config.placement.policy = self.policy;
        config.placement.gets = self.gets;
        config.placement.prefill_tokens_per_s_default = self.rates.prefill.tokens_per_s;
        config.placement.prefill_doubles_at_tokens = self.rates.prefill_doubles_at_tokens();
        config.placement.transfer_bytes_per_s_default = self.wire_bytes_per_s();
        config.cache.index_blocks_max = INDEX_BLOCKS_MAX;
        config
    }
}

/// Seconds as microseconds.
fn micros(seconds: f64) -> Time {
    (seconds * 1e6).round() as Time
}
