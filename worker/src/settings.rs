//! Settings of a worker's model, engine and data plane. Checked when the worker starts.

pub use crate::device_kind::DeviceKind;
pub use crate::lora::LoraSettings;
pub use crate::model_dtype::ModelDtype;
pub use crate::speculation::SpeculationSettings;
pub use crate::threads::ThreadCount;
use baton_engine::{EngineConfig, PrefixCacheConfig};
use baton_kv_transfer::TransferLimits;
use baton_node::config::{ByteSize, Check, Checker, Secret};
use baton_types::Dtype;
use serde::{Deserialize, Serialize};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::time::Duration;

/// Which model to serve, and how.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSettings {
    /// A path (GGUF file or Hugging Face folder), a hub id `org/name[@revision]`, `smollm2-135m-instruct`, or `random:…`.
    pub model: String,
    /// Names under which clients may request it, besides its id.
    pub served_names: Vec<String>,
    /// Longest context served, in tokens; 0 takes the model's own.
    pub max_model_len: u32,
    /// Where fetched models are kept; empty takes the user's cache folder.
    pub cache_dir: PathBuf,
    /// Base address of the model hub; empty takes `HF_ENDPOINT`, or Hugging Face.
    pub hub_endpoint: String,
    /// Token for the model hub; `HF_TOKEN` if unset.
    pub hub_token: Option<Secret>,
}

impl Default for ModelSettings {
    fn default() -> Self {
        Self {
            model: "smollm2-135m-instruct".into(),
            served_names: Vec::new(),
            max_model_len: 0,
            cache_dir: PathBuf::new(),
            hub_endpoint: String::new(),
            hub_token: None,
        }
    }
}

/// Device, memory and bounds of the engine.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineSettings {
    /// `cpu` or `cuda:N`; `reference` is the slow scalar reference, for tests.
    pub device: DeviceKind,
    /// Part of a GPU's memory that this process may take, weights included: the KV pool gets what they leave, in place of `kv_cache_bytes`.
    pub gpu_memory_utilization: f64,
    /// Folder of the files of GPU kernels; empty takes `kernels` beside this program.
    pub cuda_kernels: PathBuf,
    /// Compute threads; `auto` takes all cores.
    pub threads: ThreadCount,
    /// Numerics class: `auto` takes the model's.
    pub numerics: NumericsChoice,
    /// Format of weights in the GEMMs of class `f32fma`, and on GPUs, where KV has the same.
    pub weights: Dtype,
    /// Element type of KV.
    pub kv: Dtype,
    /// Tokens per KV block: a multiple of 16, up to 128.
    pub block_tokens: u32,
    /// Size of the KV pool; rounded down to whole blocks.
    pub kv_cache_bytes: ByteSize,
    /// Most rows of one step: prefill is cut into chunks of this many tokens.
    pub chunk_tokens_max: usize,
    /// Most tokens of prefill in a step that also continues answers, whose next tokens wait for it; 0 takes 32 on a CPU, and
    /// `chunk_tokens_max` on a GPU.
    pub mixed_chunk_tokens_max: usize,
    /// Most sequences in the running batch.
    pub running_max: usize,
    /// Most sequences that wait at once.
    pub waiting_max: usize,
    /// A sequence whose reader does not read is cancelled after this time.
    pub stall_ms_max: u64,
    /// A step that takes longer counts as hung: routers continue this worker's requests on other workers. Well above the longest chunk of
    /// prefill.
    pub step_ms_max: u64,
    pub prefix_cache: PrefixCacheSettings,
    /// Proposed tokens.
    pub speculation: SpeculationSettings,
    pub packed_cache: PackedCacheSettings,
    pub lora: LoraSettings,
}

/// Packed weights on disk: what this worker packs, the next one that starts reads.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PackedCacheSettings {
    /// The folder, of this user alone; empty takes `baton/packed` in the user's cache folder.
    pub dir: PathBuf,
    /// Most bytes that it may hold: what was not used for longest is removed. 0: nothing is kept.
    pub bytes_max: ByteSize,
}

impl Default for PackedCacheSettings {
    fn default() -> Self {
        // As much as one model of 16 billion parameters in bf16.
        Self { dir: PathBuf::new(), bytes_max: ByteSize(32 << 30) }
    }
}

/// Caching of prefixes for later sequences that begin in the same way. It takes no memory of its own: blocks of the pool stay cached
/// until they are needed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefixCacheSettings {
    /// Whether prefixes are cached.
    pub enabled: bool,
    /// Time without use after which blocks are evicted, unless their request stated one.
    pub ttl_ms: u64,
    /// Most of the pool that may be pinned, in percent: pinned blocks are not evicted.
    pub pinned_percent_max: u32,
    /// Most of the pool that one tenant may pin, in percent.
    pub pinned_percent_of_one_max: u32,
}

impl Default for PrefixCacheSettings {
    fn default() -> Self {
        let PrefixCacheConfig { ttl, pinned_percent_max, pinned_percent_of_one_max } = PrefixCacheConfig::default();
        Self { enabled: true, ttl_ms: ttl.as_millis() as u64, pinned_percent_max, pinned_percent_of_one_max }
    }
}

impl PrefixCacheSettings {
    /// As the engine's type.
    pub(crate) fn config(&self) -> Option<PrefixCacheConfig> {
        self.enabled.then(|| PrefixCacheConfig {
            ttl: Duration::from_millis(self.ttl_ms),
            pinned_percent_max: self.pinned_percent_max,
            pinned_percent_of_one_max: self.pinned_percent_of_one_max,
        })
    }
}

impl EngineSettings {
    /// Most tokens of prefill beside decode rows. On a GPU a few hundred rows take hardly longer than one: it reads the weights either way.
    pub(crate) fn mixed_chunk_tokens_max(&self) -> usize {
        match self.device {
            _ if self.mixed_chunk_tokens_max > 0 => self.mixed_chunk_tokens_max,
            DeviceKind::Cuda(_) => self.chunk_tokens_max,
            _ => EngineConfig::default().mixed_chunk_tokens_max,
        }
    }
}

impl Default for EngineSettings {
    fn default() -> Self {
        let engine = EngineConfig::default();
        Self {
            device: DeviceKind::Cpu,
            gpu_memory_utilization: 0.9,
            cuda_kernels: PathBuf::new(),
            threads: ThreadCount::Auto,
            numerics: NumericsChoice::Auto,
            weights: Dtype::Bf16,
            kv: engine.kv,
            block_tokens: 16,
            kv_cache_bytes: ByteSize(engine.kv_cache_bytes),
            chunk_tokens_max: engine.chunk_tokens_max,
            mixed_chunk_tokens_max: 0,
            running_max: engine.running_max,
            waiting_max: engine.waiting_max,
            stall_ms_max: engine.stall.as_millis() as u64,
            step_ms_max: engine.step_max.as_millis() as u64,
            prefix_cache: PrefixCacheSettings::default(),
            speculation: SpeculationSettings::default(),
            packed_cache: PackedCacheSettings::default(),
            lora: LoraSettings::default(),
        }
    }
}

/// The numerics class that the engine computes, see `docs/numerics.md`. All workers of a model should have the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum NumericsChoice {
    /// On the CPU `bf16x32`, which passes the gate for every stored format. It is one class for all hosts, so that bits do not depend on the
    /// host. On a GPU the class of its tensor cores.
    Auto,
    /// f32 activations; the most exact.
    F32Fma,
    /// bf16 activations and weights.
    Bf16x32,
    /// int8 activations, weights as they are stored; for files of 4 to 8 bits.
    I8x32,
    /// The arithmetic of the tensor cores of sm_90.
    Tc16f25,
    /// The arithmetic of the tensor cores of sm_80 to sm_89.
    Tc8f24,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TransferSettings {
    /// How KV moves between workers: `auto`, `ucx` or `tcp`.
    pub transport: TransportKind,
    /// Address at which peers reach the data plane, an IP of this host: it listens only there.
    pub bind: IpAddr,
    /// Address to publish instead of `bind`, if peers reach this host by another one. If `bind` is `0.0.0.0` and this is absent, it is
    /// the one from which this host reaches others.
    pub advertise: Option<IpAddr>,
    /// Whether KV is encrypted between workers with an identity. If not, workers still prove their identity and encrypt all other
    /// messages; use that only on networks reserved for this cluster. All workers must have the same setting. UCX lanes never encrypt.
    pub encrypt: bool,
    /// `UCX_TLS` for the UCX transport: its lanes, none of which may be `tcp`. Empty takes those of RDMA, or shared memory if there are
    /// none and `bind` is loopback.
    pub ucx_tls: String,
    /// `UCX_NET_DEVICES` for the UCX transport, e.g. `mlx5_0:1`. Empty takes all RDMA devices.
    pub ucx_net_devices: String,
    /// Bounds of the data plane.
    pub limits: TransferLimits,
}

impl Default for TransferSettings {
    fn default() -> Self {
        Self {
            transport: TransportKind::Auto,
            bind: Ipv4Addr::LOCALHOST.into(),
            encrypt: true,
            ucx_tls: String::new(),
            advertise: None,
            ucx_net_devices: String::new(),
            limits: TransferLimits::default(),
        }
    }
}

/// Transports of the data plane.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransportKind {
    /// UCX if it finds RDMA lanes, else TCP. All workers that exchange KV must choose the same.
    Auto,
    /// UCX: RDMA, or shared memory within one host.
    Ucx,
    /// Baton's own TCP transport.
    Tcp,
}

impl Check for ModelSettings {
    fn check(&self, at: &mut Checker) {
        at.require("model", !self.model.is_empty(), "a path, a hub id, smollm2-135m-instruct or random:…");
    }
}

impl Check for EngineSettings {
    fn check(&self, at: &mut Checker) {
        let any_size = !matches!(self.device, DeviceKind::Cuda(_));
        at.range("threads", self.threads.of(1), 1..=1024)
            .range("block_tokens", self.block_tokens, 16..=128)
            .require("block_tokens", self.block_tokens.is_multiple_of(16), "a multiple of 16")
            .require("block_tokens", any_size || self.block_tokens.is_power_of_two(), "a power of two on GPUs")
            .range("kv_cache_bytes", self.kv_cache_bytes, ByteSize(1 << 16)..=ByteSize(1 << 44))
            .range("gpu_memory_utilization", self.gpu_memory_utilization, 0.01..=0.99)
            .range("chunk_tokens_max", self.chunk_tokens_max, 1..=1 << 16)
            .range("mixed_chunk_tokens_max", self.mixed_chunk_tokens_max, 0..=1 << 16)
            .range("running_max", self.running_max, 1..=1 << 16)
            .range("waiting_max", self.waiting_max, 1..=1 << 20)
            .range("stall_ms_max", self.stall_ms_max, 1..=3_600_000)
            .range("step_ms_max", self.step_ms_max, 100..=3_600_000)
            .range("packed_cache.bytes_max", self.packed_cache.bytes_max, ByteSize(0)..=ByteSize(1 << 50))
            .section("prefix_cache", &self.prefix_cache)
            .section("speculation", &self.speculation)
            .section("lora", &self.lora);
    }
}

impl Check for PrefixCacheSettings {
    fn check(&self, at: &mut Checker) {
        // More than a week is taken for a mistake. A tenth of the pool must stay unpinned, or running sequences would have no room.
        at.range("ttl_ms", self.ttl_ms, 0..=7 * 24 * 3_600_000)
            .range("pinned_percent_max", self.pinned_percent_max, 0..=90)
            .range("pinned_percent_of_one_max", self.pinned_percent_of_one_max, 0..=self.pinned_percent_max);
    }
}

impl Check for TransferSettings {
    fn check(&self, at: &mut Checker) {
        let reachable = !self.advertise.is_some_and(|a| a.is_unspecified());
        at.require("advertise", reachable, "an address that peers can connect to");
        if let Err(error) = self.limits.check() {
            at.problem("limits", error.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn problems(settings: serde_json::Value) -> Vec<String> {
        let settings: TransferSettings = serde_json::from_value(settings).unwrap();
        let mut checker = Checker::default();
        settings.check(&mut checker);
        checker.into_problems().into_iter().map(|(key, _)| key).collect()
    }

    #[test]
    fn prefill_beside_answers_is_bounded_by_the_setting_or_by_the_device() {
        for (device, own, expected) in [
            (DeviceKind::Cpu, 0, 32),
            (DeviceKind::Cpu, 8, 8),
            (DeviceKind::Cuda(1), 0, 512),
            (DeviceKind::Cuda(1), 8, 8),
        ] {
            let settings = EngineSettings {
                device,
                chunk_tokens_max: 512,
                mixed_chunk_tokens_max: own,
                ..EngineSettings::default()
            };
            assert_eq!(settings.mixed_chunk_tokens_max(), expected, "{device:?} {own}");
        }
    }

    #[test]
    fn what_no_peer_could_reach_is_refused() {
        let cases = [
            (serde_json::json!({}), vec![]),
            (serde_json::json!({"bind": "0.0.0.0"}), vec![]),
            (serde_json::json!({"transport": "tcp", "bind": "0.0.0.0", "advertise": "10.0.0.1"}), vec![]),
            (serde_json::json!({"transport": "tcp", "bind": "::", "advertise": "0.0.0.0"}), vec!["advertise"]),
            (serde_json::json!({"transport": "ucx", "bind": "0.0.0.0", "advertise": "10.0.0.1"}), vec![]),
            (serde_json::json!({"limits": {"peers_max": 9}}), vec![]),
            (serde_json::json!({"limits": {"peers_max": 0}}), vec!["limits"]),
        ];
        for (settings, expected) in cases {
            assert_eq!(problems(settings.clone()), expected, "{settings}");
        }
    }

    /// Kernels of GPUs find a token's block by a shift.
    #[test]
    fn blocks_have_sizes_that_the_device_computes_with() {
        let problems = |device: &str, block_tokens: u32| {
            let settings = serde_json::json!({"device": device, "block_tokens": block_tokens});
            let settings: EngineSettings = serde_json::from_value(settings).unwrap();
            let mut checker = Checker::default();
            settings.check(&mut checker);
            checker.into_problems()
        };
        for block_tokens in [16, 32, 64, 128] {
            assert_eq!([problems("cpu", block_tokens), problems("cuda:1", block_tokens)], [vec![], vec![]]);
        }
        for block_tokens in [48, 80, 96, 112] {
            assert_eq!(problems("cpu", block_tokens), []);
            assert!(
                matches!(&problems("cuda:1", block_tokens)[..], [(key, why)] if key == "block_tokens" && why.contains("power of two"))
            );
        }
    }

    #[test]
    fn the_prefix_cache_is_as_it_is_set() {
        let check = |settings: serde_json::Value| {
            let settings: EngineSettings = serde_json::from_value(settings).unwrap();
            let mut checker = Checker::default();
            settings.check(&mut checker);
            let problems: Vec<String> = checker.into_problems().into_iter().map(|(key, _)| key).collect();
            (settings.prefix_cache.config(), problems)
        };
        let set = |ttl_s, pinned_percent_max, pinned_percent_of_one_max| {
            let ttl = Duration::from_secs(ttl_s);
            Some(PrefixCacheConfig { ttl, pinned_percent_max, pinned_percent_of_one_max })
        };
        assert_eq!(check(serde_json::json!({})), (set(300, 25, 10), vec![]));
        let all = serde_json::json!({"ttl_ms": 1_000, "pinned_percent_max": 40, "pinned_percent_of_one_max": 40});
        assert_eq!(check(serde_json::json!({"prefix_cache": all})), (set(1, 40, 40), vec![]));
        assert_eq!(check(serde_json::json!({"prefix_cache": {"enabled": false}})), (None, vec![]));
        for (key, value) in [("ttl_ms", 604_800_001), ("pinned_percent_max", 91), ("pinned_percent_of_one_max", 26)] {
            assert_eq!(check(serde_json::json!({"prefix_cache": {key: value}})).1, [format!("prefix_cache.{key}")]);
        }
    }
}
