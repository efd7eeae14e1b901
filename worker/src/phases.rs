//! Histograms of how long the phases of requests take on a worker, recorded when a phase ends.
//!
//! Engine and transfer count their own work; only the calls of the services know when a phase of a request began and ended.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use std::time::{Duration, Instant};

/// A phase of a request on a worker, named like its span.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorkerPhase {
    /// From the call until a cached prefix arrived from another worker, or the get failed.
    PrefillGet,
    /// From the call, or from the end of the get, to the first step.
    PrefillQueue,
    /// From the first step to the first token.
    PrefillCompute,
    /// From the first step to the grant of the decode worker: it overlaps with the compute.
    DecodeReserve,
    /// From the first write to the last flush.
    KvTransfer,
    /// From the last flush to the acknowledgement.
    KvCommit,
    /// From the claim to the adoption of the KV.
    DecodeAwaitKv,
    /// From the adoption, or from the first token if the prompt was prefilled here, to the end.
    DecodeGenerate,
}

impl WorkerPhase {
    /// All phases, in the order of a request.
    pub const ALL: [Self; 8] = [
        Self::PrefillGet,
        Self::PrefillQueue,
        Self::PrefillCompute,
        Self::DecodeReserve,
        Self::KvTransfer,
        Self::KvCommit,
        Self::DecodeAwaitKv,
        Self::DecodeGenerate,
    ];

    /// Value of the label `phase`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::PrefillGet => "prefill.get",
            Self::PrefillQueue => "prefill.queue",
            Self::PrefillCompute => "prefill.compute",
            Self::DecodeReserve => "decode.reserve",
            Self::KvTransfer => "kv.transfer",
            Self::KvCommit => "kv.commit",
            Self::DecodeAwaitKv => "decode.await_kv",
            Self::DecodeGenerate => "decode.generate",
        }
    }
}

/// Seconds, from a commit on a fast network to an answer of minutes.
const SECONDS: [f64; 16] =
    [0.0001, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 60.0, 300.0];
/// Bytes per second, from a slow network to several fast ones together.
const RATES: [f64; 12] = [1e6, 1e7, 3e7, 1e8, 3e8, 1e9, 3e9, 6e9, 1.2e10, 2.5e10, 5e10, 1e11];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Labels {
    model: String,
    pool: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabels {
    model: String,
    pool: String,
    phase: String,
}

/// The histograms of one worker. Cloning shares them.
#[derive(Clone, Debug)]
pub struct Phases {
    phases: [Histogram; 8],
    exposed: Histogram,
    rate: Histogram,
}

impl Phases {
    /// Registers all histograms. Every phase exists from the start, so that its rate is zero instead of absent.
    pub fn register(registry: &mut Registry, model: &str, pool: &str) -> Self {
        let (model, pool) = (model.to_owned(), pool.to_owned());
        let seconds: fn() -> Histogram = || Histogram::new(SECONDS);
        let phases = Family::<PhaseLabels, Histogram, _>::new_with_constructor(seconds);
        let exposed = Family::<Labels, Histogram, _>::new_with_constructor(seconds);
        let rates: fn() -> Histogram = || Histogram::new(RATES);
        let rate = Family::<Labels, Histogram, _>::new_with_constructor(rates);
        let help = "Phases of requests that ended here";
        registry.register_with_unit("worker_phase", help, Unit::Seconds, phases.clone());
        let help = "Part of a transfer that no compute hid: from the first token to the acknowledgement";
        registry.register_with_unit("kv_exposed", help, Unit::Seconds, exposed.clone());
        let help = "Rate of a handoff while its bytes moved";
        registry.register("kv_transfer_rate_bytes_per_second", help, rate.clone());
        let labels = Labels { model: model.clone(), pool: pool.clone() };
        let of = |phase: WorkerPhase| {
            let labels = PhaseLabels { model: model.clone(), pool: pool.clone(), phase: phase.name().into() };
            phases.get_or_create_owned(&labels)
        };
        Self {
            phases: WorkerPhase::ALL.map(of),
            exposed: exposed.get_or_create_owned(&labels),
            rate: rate.get_or_create_owned(&labels),
        }
    }

    /// Records a phase that has ended.
    pub fn over(&self, phase: WorkerPhase, start: Instant, end: Instant) {
        self.phases[phase as usize].observe(end.saturating_duration_since(start).as_secs_f64());
    }

    /// Records an acknowledged put: its bytes, its duration, and the part that did not overlap with compute.
    pub fn put_over(&self, bytes: u64, moving: Duration, exposed: Duration) {
        self.exposed.observe(exposed.as_secs_f64());
        if !moving.is_zero() {
            self.rate.observe(bytes as f64 / moving.as_secs_f64());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phases_are_there_from_the_start_and_count_under_their_own_name() {
        let mut registry = Registry::default();
        let phases = Phases::register(&mut registry, "m", "p");
        let shown = |what: &str| {
            let mut text = String::new();
            prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
            text.lines().find_map(|l| l.strip_prefix(what)).unwrap_or_default().trim().to_owned()
        };
        for (index, phase) in WorkerPhase::ALL.into_iter().enumerate() {
            let count = format!(r#"worker_phase_seconds_count{{model="m",pool="p",phase="{}"}}"#, phase.name());
            assert_eq!(shown(&count), "0");
            let start = Instant::now();
            for _ in 0..=index {
                phases.over(phase, start, start + Duration::from_millis(3));
            }
            assert_eq!(shown(&count), (index + 1).to_string());
        }
        phases.put_over(3_000_000, Duration::from_millis(1), Duration::from_millis(20));
        // All bytes were there before the first measurement: no time, no rate.
        phases.put_over(1, Duration::ZERO, Duration::ZERO);
        assert_eq!(shown(r#"kv_exposed_seconds_sum{model="m",pool="p"}"#), "0.02");
        assert_eq!(shown(r#"kv_transfer_rate_bytes_per_second_sum{model="m",pool="p"}"#), "3000000000.0");
        assert_eq!(shown(r#"kv_transfer_rate_bytes_per_second_bucket{le="3000000000.0",model="m",pool="p"}"#), "1");
        assert_eq!(shown(r#"kv_transfer_rate_bytes_per_second_bucket{le="1000000000.0",model="m",pool="p"}"#), "0");
    }
}
