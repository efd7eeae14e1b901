//! The cluster of a seeded schedule: its plan, its requests and its faults.

use crate::client::{Client, Ending, Endings};
use crate::cluster::Cluster;
use crate::executor::{Executor, Process};
use crate::invariant::Breaches;
use crate::model;
use crate::network::Delays;
use crate::plan::{ClusterPlan, DevicePlan, RouterPlan, WorkerPlan};
use crate::random::Random;
use crate::schedule::{Fault, HEALED, Schedule, Shape};
use crate::worker::transfer::Tempo;
use baton_engine::{EngineConfig, PrefixCacheConfig};
use baton_kv_transfer::TransferLimits;
use baton_router::RouterConfig;
use baton_types::{Role, TenantId};
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

/// A woken task is polled at most so late.
const LATE_MAX: Duration = Duration::from_micros(300);
/// An attempt to connect that the network swallowed is given up after this, and the next handoff dials again: well before
/// [`WELL`](crate::schedule::WELL), like all that a repair leaves behind.
const CONNECT_MAX: Duration = Duration::from_secs(1);
/// Longest call.
const CALL_MAX: Duration = Duration::from_secs(60);
/// Prompts of the first tenant are pinned for so long.
const PIN_MS: u64 = 1_000;

/// A cluster under a schedule. Clones are the same one.
#[derive(Clone)]
pub struct Scheduled {
    cluster: Cluster,
    schedule: Arc<Schedule>,
    /// How requests ended.
    pub ends: Endings,
}

impl Deref for Scheduled {
    type Target = Cluster;

    fn deref(&self) -> &Cluster {
        &self.cluster
    }
}

impl Scheduled {
    /// Starts everybody.
    pub fn start(seed: u64, draw: impl FnOnce(&mut Random) -> Schedule) -> Self {
        let executor = Executor::new(seed, LATE_MAX);
        let schedule = Arc::new(executor.draw(draw));
        let cluster = Cluster::start(executor, schedule.shape.plan(), Breaches::default());
        let ends = Endings::new(schedule.requests.len());
        let scheduled = Self { cluster, schedule, ends };
        scheduled.plan();
        scheduled
    }

    /// Requests and faults happen when their times come.
    fn plan(&self) {
        for request in 0..self.schedule.requests.len() {
            let (scheduled, at) = (self.clone(), self.schedule.requests[request].at);
            self.executor.call(at, Process::WORLD, move || scheduled.ask(request));
        }
        for &(at, fault) in self.schedule.faults.iter().filter(|(at, fault)| *at < HEALED || *fault == Fault::Heal) {
            let cluster = self.cluster.clone();
            self.executor.call(at, Process::WORLD, move || cluster.trouble(fault));
        }
    }

    /// What the seed decided.
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Whether a worker may fail for a reason inside: its device does, or its bytes are damaged.
    pub fn may_break(&self) -> bool {
        let breaks =
            |fault: &Fault| matches!(fault, Fault::DeviceFails { .. } | Fault::Damage { .. } | Fault::Spoil { .. });
        self.schedule.faults.iter().any(|(_, fault)| breaks(fault))
    }

    /// A client asks the router that it knows.
    fn ask(&self, request: usize) {
        let spec = self.schedule.requests[request].clone();
        let (core, process) = self.router_at(spec.to);
        let Some(core) = core else { return self.ends.add(request, self.executor.time(), Ending::NoRouter) };
        let client = Client {
            executor: self.executor.clone(),
            runtime: self.executor.runtime(process),
            breaches: self.breaches.clone(),
            ends: self.ends.clone(),
            prompts: self.prompts.clone(),
            request,
            spec,
        };
        self.executor.spawn(process, client.ask(core));
    }
}

impl Shape {
    /// The cluster that it describes.
    fn plan(&self) -> ClusterPlan {
        let router = |slot| RouterPlan { name: self.name(slot), config: router_config(self) };
        ClusterPlan {
            routers: (0..self.routers).map(router).collect(),
            workers: (self.routers..self.slots()).map(|slot| self.worker(slot)).collect(),
            lane: self.lane,
            one_sided_gets: self.one_sided_gets,
            is_embedded: self.is_embedded,
            delays: Delays::Drawn { slow_once_in: self.slow_once_in, slow_until: HEALED },
            half_trip: None,
        }
    }

    fn worker(&self, slot: usize) -> WorkerPlan {
        let (role, block_tokens, blocks) = match self.is_decode(slot) {
            true => (Role::Decode, self.decode_block_tokens, self.blocks * 16 / self.decode_block_tokens),
            false => (Role::Prefill, 16, self.prefill_blocks),
        };
        let transfer = TransferLimits {
            put_bytes_max: self.put_bytes_max,
            in_flight_bytes_max: self.in_flight_bytes_max,
            epoch_bytes: self.epoch_bytes as usize,
            connect_ms: CONNECT_MAX.as_millis() as u64,
            handoff_ms: self.handoff_max.as_millis() as u64,
            abort_ms: self.abort_max.as_millis() as u64,
            pin_ms: self.pin_max.as_millis() as u64,
            quarantined_blocks_max: self.quarantined_max(blocks),
            ..TransferLimits::default()
        };
        WorkerPlan {
            name: self.name(slot),
            role,
            layout: match self.states {
                0 => model::layout(block_tokens),
                _ => model::layout_with_states(block_tokens),
            },
            blocks,
            states: self.states,
            engine: engine_config(self),
            transfer,
            tempo: Tempo::DRAWN,
            call_max: CALL_MAX,
            device: DevicePlan::Checked,
        }
    }
}

fn engine_config(shape: &Shape) -> EngineConfig {
    EngineConfig {
        model_len_max: 512,
        chunk_tokens_max: shape.chunk_tokens,
        mixed_chunk_tokens_max: shape.mixed_chunk_tokens(),
        running_max: shape.running_max,
        waiting_max: shape.waiting_max,
        watermark_blocks: shape.watermark_blocks,
        stall: shape.stall_max,
        end_tokens: model::end_tokens(),
        prefix_cache: shape.caches.then(|| PrefixCacheConfig {
            pinned_percent_max: 50,
            pinned_percent_of_one_max: 50,
            ..PrefixCacheConfig::default()
        }),
        ..EngineConfig::default()
    }
}

pub(crate) fn router_config(shape: &Shape) -> RouterConfig {
    let mut config = RouterConfig::default();
    (config.limits.running_max, config.limits.queued_max) = shape.admits;
    config.limits.claim_ack_ms_max = 400;
    config.limits.client_stall_ms_max = 600;
    config.limits.client_events_max = shape.client_events;
    config.retry.attempts_max = shape.attempts_max;
    (config.retry.burst_max, config.retry.per_s) = shape.retries;
    config.retry.ready_ms_max = shape.ready_max.as_millis() as u64;
    config.retry.adopted_ms_max = 1_000;
    config.retry.probation_ms_max = 1_000;
    config.placement.local_prefill_tokens_max = 24;
    config.placement.gets = shape.gets;
    let pinned = TenantId::try_new("t0").expect("a short name");
    config.cache.pins.insert(pinned, PIN_MS);
    config
}
