//! The metrics of a worker at `/metrics`: read from engine and transfer at each scrape, so nothing is counted twice.

use crate::lora::{AdapterCounts, Adapters};
use baton_engine::api::Load;
use baton_engine::{EngineHandle, StepGaps};
use baton_kernels::device::{Device, DeviceMemory};
use baton_kv_cache::{BlockCounts, CacheCounts};
use baton_kv_transfer::{KvTransfer, PeerStats};
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::metrics::{MetricType, TypedMetric};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How often a GPU's driver is asked for its memory at most: the question waits for the launches of steps, and they for it.
const MEMORY_EVERY: Duration = Duration::from_secs(1);

/// Labels of every series.
type Labels<'a> = Vec<(&'a str, &'a str)>;

/// The collector of one worker.
pub struct WorkerMetrics {
    engine: EngineHandle,
    device: Arc<dyn Device>,
    /// As last read, and when.
    memory: Mutex<Option<(Instant, DeviceMemory)>>,
    transfer: KvTransfer,
    adapters: Option<Adapters>,
    model: String,
    pool: String,
}

impl fmt::Debug for WorkerMetrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WorkerMetrics").field("model", &self.model).finish_non_exhaustive()
    }
}

impl WorkerMetrics {
    /// For this engine with its device, and this transfer.
    pub fn new(engine: EngineHandle, device: Arc<dyn Device>, transfer: KvTransfer, model: &str, pool: &str) -> Self {
        let (model, pool) = (model.into(), pool.into());
        Self { engine, device, memory: Mutex::default(), transfer, adapters: None, model, pool }
    }

    /// With these adapters, if there are any.
    #[must_use]
    pub fn with_adapters(self, adapters: Option<Adapters>) -> Self {
        Self { adapters, ..self }
    }

    fn labels<'a>(&'a self, more: &[(&'a str, &'a str)]) -> Labels<'a> {
        [("model", self.model.as_str()), ("pool", self.pool.as_str())].into_iter().chain(more.iter().copied()).collect()
    }

    fn gauge(&self, to: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: f64) -> fmt::Result {
        self.gauges(to, name, help, &[(vec![], value)])
    }

    fn gauges(&self, to: &mut DescriptorEncoder<'_>, name: &str, help: &str, of: &[(Labels<'_>, f64)]) -> fmt::Result {
        self.family(to, name, help, of, ConstGauge::new)
    }

    fn counters(
        &self,
        to: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        of: &[(Labels<'_>, u64)],
    ) -> fmt::Result {
        self.family(to, name, help, of, ConstCounter::new)
    }

    fn family<V: Copy, M: EncodeMetric + TypedMetric>(
        &self,
        to: &mut DescriptorEncoder<'_>,
        name: &str,
        help: &str,
        series: &[(Labels<'_>, V)],
        metric: fn(V) -> M,
    ) -> fmt::Result {
        let mut family = to.encode_descriptor(name, help, None, M::TYPE)?;
        series.iter().try_for_each(|(labels, value)| {
            let labels = self.labels(labels);
            metric(*value).encode(family.encode_family(&labels)?)
        })
    }
}

impl Collector for WorkerMetrics {
    fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
        let load = self.engine.load();
        let to = &mut to;
        let states = [
            ("free", load.blocks.free),
            ("referenced", load.blocks.referenced),
            ("cached", load.blocks.cached),
            ("quarantined", load.blocks.quarantined),
        ];
        let states = states.map(|(state, blocks)| (vec![("state", state)], blocks as f64));
        self.gauges(to, "kv_blocks", "KV blocks by state", &states)?;
        let help = "Share of the KV pool that new sequences cannot have: referenced or quarantined";
        self.gauge(to, "kv_used_ratio", help, used_ratio(&load.blocks))?;
        self.gauge(to, "sequences_waiting", "Sequences that wait for the engine", load.waiting as f64)?;
        self.gauge(to, "sequences_running", "Sequences in the running batch", load.running as f64)?;
        self.gauge(
            to,
            "waiting_tokens",
            "Prompt tokens neither computed nor known to be cached",
            load.waiting_tokens as f64,
        )?;
        self.gauge(to, "prefill_tokens_per_second", "Recent rate of prefill", f64::from(load.prefill_tokens_per_s))?;
        self.gauge(to, "decode_steps_per_second", "Recent rate of decode steps", f64::from(load.decode_steps_per_s))?;
        self.gauge(
            to,
            "engine_healthy",
            "1 while the engine's loop moves",
            f64::from(u8::from(self.engine.healthy())),
        )?;
        self.counters(to, "engine_steps", "Steps of the engine", &[(vec![], load.steps)])?;
        let rows = [(vec![("kind", "prefill")], load.prefill_rows), (vec![("kind", "decode")], load.decode_rows)];
        self.counters(to, "engine_rows", "Rows of all steps: the batch size is their rate by that of steps", &rows)?;
        let help = "For how long the engine's loop has not moved while it had work";
        self.gauge(to, "engine_step_age_seconds", help, self.engine.still().as_secs_f64())?;
        self.counters(to, "generated_tokens", "Tokens sampled", &[(vec![], load.generated_tokens)])?;
        let proposer = |kind, tokens: u64| (vec![("kind", kind)], tokens);
        let by_kind = |all: u64, draft: u64| [proposer("ngram", all - draft), proposer("draft", draft)];
        let proposed = by_kind(load.proposed_tokens, load.draft_proposed_tokens);
        let help = "Tokens proposed: each took a row of a step";
        self.counters(to, "speculation_proposed_tokens", help, &proposed)?;
        let accepted = by_kind(load.accepted_tokens, load.draft_accepted_tokens);
        let help = "Proposed tokens that were sampled";
        self.counters(to, "speculation_accepted_tokens", help, &accepted)?;
        let help = "KV blocks of the draft model that sequences hold";
        self.gauge(to, "speculation_draft_blocks", help, load.draft_blocks as f64)?;
        self.counters(to, "preemptions", "Sequences that gave their blocks back", &[(vec![], load.preemptions)])?;
        self.device(to, &load)?;
        self.prefix_cache(to, &load)?;
        self.transfer(to)?;
        self.adapters.as_ref().map_or(Ok(()), |adapters| self.adapters(to, &adapters.counts()))
    }
}

impl WorkerMetrics {
    fn adapters(&self, to: &mut DescriptorEncoder<'_>, counts: &AdapterCounts) -> fmt::Result {
        self.gauge(to, "adapters", "LoRA adapters that can be served", counts.known as f64)?;
        self.gauge(to, "adapters_loaded", "LoRA adapters that are loaded", counts.loaded as f64)?;
        self.gauge(to, "adapters_bytes", "Memory of loaded LoRA adapters", counts.bytes as f64)?;
        self.gauge(to, "adapters_waiting", "Requests that wait for a slot of an adapter", counts.waiting as f64)?;
        let loads = [(vec![("result", "ok")], counts.loads), (vec![("result", "failed")], counts.failures)];
        self.counters(to, "adapter_loads", "Loads of LoRA adapters", &loads)
    }
}

/// What a device's memory is used for: all of it.
fn uses(memory: DeviceMemory) -> [(&'static str, u64); 5] {
    [
        ("weights", memory.weights),
        ("pool", memory.pool),
        ("workspace", memory.workspace),
        ("other", memory.other()),
        ("free", memory.free),
    ]
}

/// Gaps between steps as a histogram, in seconds.
struct Gaps(StepGaps);

impl TypedMetric for Gaps {
    const TYPE: MetricType = MetricType::Histogram;
}

impl EncodeMetric for Gaps {
    fn encode(&self, mut to: MetricEncoder<'_>) -> fmt::Result {
        let bounds = StepGaps::BOUNDS.iter().map(Duration::as_secs_f64).chain([f64::INFINITY]);
        let buckets: Vec<(f64, u64)> = bounds.zip(self.0.counts).collect();
        to.encode_histogram::<NoLabelSet>(self.0.total.as_secs_f64(), self.0.count(), &buckets, None)
    }

    fn metric_type(&self) -> MetricType {
        Self::TYPE
    }
}

/// Share of the blocks that are in use, 0 to 1.
fn used_ratio(blocks: &BlockCounts) -> f64 {
    let used = blocks.referenced + blocks.quarantined;
    if blocks.total == 0 { 0.0 } else { used as f64 / blocks.total as f64 }
}

impl WorkerMetrics {
    fn device(&self, to: &mut DescriptorEncoder<'_>, load: &Load) -> fmt::Result {
        let help = "From the end of a step to the launch of the next, while there was work and no step on the device";
        self.family(to, "engine_step_gap_seconds", help, &[(vec![], load.gaps)], Gaps)?;
        let uses = recent(&self.memory, Instant::now(), || self.device.memory()).map(uses).into_iter().flatten();
        let uses: Vec<_> = uses.map(|(kind, bytes)| (vec![("kind", kind)], bytes as f64)).collect();
        let help = "Memory of the GPU that this worker computes on, by what it is used for";
        self.gauges(to, "device_memory_bytes", help, &uses)
    }

    fn prefix_cache(&self, to: &mut DescriptorEncoder<'_>, load: &Load) -> fmt::Result {
        let CacheCounts { blocks, evictable, pinned, stored, evicted, expired, unpinned } =
            self.engine.pool().cache_counts();
        let gauges = [
            ("prefix_cache_blocks", "KV blocks that the prefix cache knows, in use or not", blocks),
            ("prefix_cache_evictable_blocks", "Those of them that make room when it is needed", evictable),
            ("prefix_cache_pinned_blocks", "Those of them that are pinned", pinned),
            ("kv_slots", "Token slots in blocks of running sequences", load.slots),
            ("kv_slots_unused", "Those of them behind the last token so far", load.slots_unused),
        ];
        gauges.into_iter().try_for_each(|(name, help, n)| self.gauge(to, name, help, n as f64))?;
        let removed = [(vec![("reason", "evicted")], evicted), (vec![("reason", "expired")], expired)];
        self.counters(to, "prefix_cache_stored_blocks", "KV blocks that became cached", &[(vec![], stored)])?;
        self.counters(to, "prefix_cache_removed_blocks", "KV blocks that are cached no more, by reason", &removed)?;
        let help = "KV blocks that were to be pinned, and were not for want of quota";
        self.counters(to, "prefix_cache_unpinned_blocks", help, &[(vec![], unpinned)])?;
        let help = "Tokens of sequences whose KV was cached, as of their first token here";
        self.counters(to, "engine_cached_tokens", help, &[(vec![], load.cached_tokens)])?;
        let help = "Rows computed once more, of sequences that had lost their blocks";
        self.counters(to, "engine_recomputed_tokens", help, &[(vec![], load.recomputed_tokens)])
    }

    fn transfer(&self, to: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let stats = self.transfer.stats();
        let PeerStats {
            bytes_put,
            bytes_adopted,
            puts,
            flushes,
            puts_refused,
            stale_messages,
            sources,
            sinks,
            refused,
            ..
        } = stats.total;
        let bytes = [(vec![("direction", "sent")], bytes_put), (vec![("direction", "adopted")], bytes_adopted)];
        self.counters(to, "kv_transfer_bytes", "KV bytes moved", &bytes)?;
        self.counters(to, "kv_puts", "One-sided writes posted", &[(vec![], puts)])?;
        self.counters(to, "kv_flushes", "Flushes completed", &[(vec![], flushes)])?;
        let outcomes = |direction, of: BTreeMap<&'static str, u64>| {
            of.into_iter().map(move |(outcome, n)| (vec![("direction", direction), ("outcome", outcome)], n))
        };
        let handoffs: Vec<_> = outcomes("sent", sources).chain(outcomes("received", sinks)).collect();
        self.counters(to, "kv_handoffs", "Handoffs ended, by outcome", &handoffs)?;
        // A peer's series end with its last connection, so the bound on peers also bounds their number.
        let mut by_peer: BTreeMap<_, u64> = BTreeMap::new();
        for (party, peer) in &stats.peers {
            for (direction, of) in [("sent", &peer.sources), ("received", &peer.sinks)] {
                for (outcome, n) in of {
                    *by_peer.entry((party.instance.as_str(), direction, *outcome)).or_default() += n;
                }
            }
        }
        let by_peer = by_peer.into_iter().map(|((peer, direction, outcome), n)| {
            (vec![("peer", peer), ("direction", direction), ("outcome", outcome)], n)
        });
        let help = "Handoffs ended with peers that are connected, by outcome";
        self.counters(to, "kv_peer_handoffs", help, &by_peer.collect::<Vec<_>>())?;
        let refused: Vec<_> = refused.into_iter().map(|(reason, n)| (vec![("reason", reason)], n)).collect();
        self.counters(to, "kv_refused", "Handoffs refused here, by reason", &refused)?;
        let by_itself = [
            ("kv_puts_refused", "Writes refused here, since no live ticket covers them", puts_refused),
            ("kv_stale_messages", "Messages of peers that named no live handoff", stale_messages),
        ];
        by_itself.into_iter().try_for_each(|(name, help, n)| self.counters(to, name, help, &[(vec![], n)]))?;
        let quarantined = stats.quarantined.iter().map(|(peer, n)| (vec![("peer", peer.as_str())], *n as f64));
        let help = "KV blocks that a lost peer could still write, by peer";
        self.gauges(to, "kv_quarantined_blocks", help, &quarantined.collect::<Vec<_>>())?;
        // Two starts of one peer may be connected for a moment.
        let lanes: BTreeSet<_> = stats.peers.iter().map(|(p, of)| (p.instance.as_str(), of.lanes.as_str())).collect();
        let lanes = lanes.into_iter().map(|(peer, lanes)| (vec![("peer", peer), ("lanes", lanes)], 1.0));
        self.gauges(
            to,
            "kv_peer_lanes",
            "1 for each connected peer and what carries its KV",
            &lanes.collect::<Vec<_>>(),
        )?;
        self.gauge(to, "kv_tickets", "Tickets granted here and not ended", stats.tickets as f64)?;
        self.gauge(to, "kv_put_sources", "Puts whose source this worker is", stats.sources as f64)?;
        self.gauge(to, "kv_put_sinks", "Puts whose sink this worker is", stats.sinks as f64)
    }
}

/// What was read within [`MEMORY_EVERY`] before `now`, or is read now.
fn recent(
    last: &Mutex<Option<(Instant, DeviceMemory)>>,
    now: Instant,
    read: impl FnOnce() -> Option<DeviceMemory>,
) -> Option<DeviceMemory> {
    let mut last = last.lock();
    if last.is_none_or(|(at, _)| now.duration_since(at) >= MEMORY_EVERY) {
        *last = read().map(|memory| (now, memory));
    }
    last.map(|(_, memory)| memory)
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::registry::Registry;

    #[test]
    fn a_driver_is_asked_for_memory_once_a_second() {
        let of = |free| DeviceMemory { total: 100, free, weights: 0, pool: 0, workspace: 0, beside_pool: 0 };
        let (last, start) = (Mutex::default(), Instant::now());
        let told =
            |ms, free| recent(&last, start + Duration::from_millis(ms), || Some(of(free))).map(|memory| memory.free);
        assert_eq!([(0, 9), (999, 8), (1_000, 7), (1_500, 6)].map(|(ms, free)| told(ms, free)), [9, 9, 7, 7].map(Some));
        assert_eq!(recent(&Mutex::default(), start, || None).map(|memory| memory.free), None, "a CPU has none");
    }

    #[test]
    fn every_byte_of_a_gpu_is_told_once() {
        let memory = DeviceMemory { total: 100, free: 30, weights: 40, pool: 20, workspace: 5, beside_pool: 3 };
        assert_eq!(uses(memory), [("weights", 40), ("pool", 20), ("workspace", 5), ("other", 5), ("free", 30)]);
        // The driver may count less as used than was asked for.
        assert_eq!(DeviceMemory { free: 40, ..memory }.other(), 0);
    }

    #[derive(Debug)]
    struct OfGaps(StepGaps);

    impl Collector for OfGaps {
        fn encode(&self, mut to: DescriptorEncoder<'_>) -> fmt::Result {
            Gaps(self.0).encode(to.encode_descriptor("gap_seconds", "Gaps", None, Gaps::TYPE)?)
        }
    }

    #[test]
    fn gaps_are_a_histogram_of_seconds() {
        let gaps = StepGaps { counts: [0, 2, 0, 0, 0, 0, 0, 0, 0, 1], total: Duration::from_micros(2_000_040) };
        let (mut registry, mut text) = (Registry::default(), String::new());
        registry.register_collector(Box::new(OfGaps(gaps)));
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        for line in [
            "gap_seconds_sum 2.00004",
            "gap_seconds_count 3",
            "gap_seconds_bucket{le=\"0.00001\"} 0",
            "gap_seconds_bucket{le=\"0.00003\"} 2",
            "gap_seconds_bucket{le=\"1.0\"} 2",
            "gap_seconds_bucket{le=\"+Inf\"} 3",
        ] {
            assert!(text.lines().any(|told| told == line), "no {line:?} in {text}");
        }
    }

    #[test]
    fn what_a_new_sequence_cannot_have_is_used() {
        // total, referenced, cached, quarantined, share
        let cases = [(0, 0, 0, 0, 0.0), (8, 0, 8, 0, 0.0), (8, 2, 4, 2, 0.5), (8, 8, 0, 0, 1.0)];
        for (total, referenced, cached, quarantined, share) in cases {
            let free = total - referenced - cached - quarantined;
            assert_eq!(used_ratio(&BlockCounts { total, free, referenced, cached, quarantined }), share);
        }
    }
}
