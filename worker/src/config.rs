//! The configuration tree of a worker, and its flags.

use crate::settings::{
    DeviceKind, EngineSettings, ModelDtype, ModelSettings, NumericsChoice, SpeculationSettings, ThreadCount,
    TransferSettings, TransportKind,
};
use baton_node::DrainConfig;
use baton_node::admin::AdminConfig;
use baton_node::config::{ByteSize, Check, Checker, CommonArgs, Overlay};
use baton_node::grpc::GrpcConfig;
use baton_node::identity::IdentityConfig;
use baton_node::membership::embedded::JoinConfig;
use baton_node::telemetry::TelemetryConfig;
use baton_types::{Dtype, InstanceId, Role};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

/// Every setting of a worker.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct WorkerConfig {
    /// Log lines, and the traces that are exported.
    pub telemetry: TelemetryConfig,
    /// How the process ends.
    pub drain: DrainConfig,
    /// Where health and metrics are served.
    pub admin: AdminConfig,
    /// The gRPC server for routers.
    pub grpc: GrpcConfig,
    /// How this worker proves its identity, to routers and to other workers.
    pub identity: IdentityConfig,
    /// Where the worker registers, and how.
    pub membership: JoinConfig,
    /// Name and place in the cluster.
    pub instance: InstanceSettings,
    pub model: ModelSettings,
    /// Device, memory and bounds of the engine.
    pub engine: EngineSettings,
    /// How KV moves between workers.
    pub transfer: TransferSettings,
}

impl WorkerConfig {
    /// What a worker of this role uses of it. A prefill worker samples one token of a sequence, so it has no draft model.
    #[must_use]
    pub(crate) fn of_role(mut self, role: Role) -> Self {
        if role == Role::Prefill {
            self.engine.speculation.draft_model.clear();
        }
        self
    }
}

/// Name and place of an instance.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct InstanceSettings {
    /// Name, unique in the cluster; derived from role, host and process if unset.
    pub id: Option<InstanceId>,
    /// Pool of replicas that it belongs to.
    pub pool: String,
    /// Zone, fabric and the like.
    pub labels: BTreeMap<String, String>,
    /// Deadline of calls that state no timeout, and the longest timeout that is accepted.
    pub call_ms_max: u64,
}

impl Default for InstanceSettings {
    fn default() -> Self {
        Self { id: None, pool: "default".into(), labels: BTreeMap::new(), call_ms_max: 3_600_000 }
    }
}

impl Check for InstanceSettings {
    fn check(&self, at: &mut Checker) {
        at.require("pool", !self.pool.is_empty(), "a name").range("call_ms_max", self.call_ms_max, 1..=86_400_000);
    }
}

impl Check for WorkerConfig {
    fn check(&self, at: &mut Checker) {
        at.section("telemetry", &self.telemetry)
            .section("drain", &self.drain)
            .section("admin", &self.admin)
            .section("grpc", &self.grpc)
            .section("identity", &self.identity)
            .section("membership", &self.membership)
            .section("instance", &self.instance)
            .section("model", &self.model)
            .section("engine", &self.engine)
            .section("transfer", &self.transfer);
        let listens = [("grpc.listen", self.grpc.listen.ip()), ("transfer.bind", self.transfer.bind)];
        self.identity.check_listeners(&listens, at);
        self.identity.check_etcd(&self.membership.etcd, at);
    }
}

/// Flags of both workers.
#[derive(Clone, Debug, clap::Args)]
pub struct WorkerArgs {
    /// Flags of every process.
    #[command(flatten)]
    pub common: CommonArgs,
    /// A GGUF file, a Hugging Face folder, a hub id `org/name[@revision]`, `smollm2-135m-instruct` or `random:…`
    #[arg(long)]
    pub model: Option<String>,
    /// A further name under which clients ask for the model; may be repeated
    #[arg(long, value_name = "NAME", value_delimiter = ',')]
    pub served_model_name: Vec<String>,
    /// Format of weights and KV. What is not bfloat16 takes class f32fma on a CPU
    #[arg(long, conflicts_with_all = ["weights", "kv", "numerics"])]
    pub dtype: Option<ModelDtype>,
    /// Longest context in tokens. Default: the model's own
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// Size of the KV pool, e.g. 2GiB
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_bytes: Option<ByteSize>,
    /// Tokens per KV block: 16, 32, 48 … 128
    #[arg(long, value_name = "TOKENS")]
    pub block_tokens: Option<u32>,
    /// Compute device: "cpu", or "cuda:N" for a GPU; "reference" and "lagging" are for tests
    #[arg(long)]
    pub device: Option<DeviceKind>,
    /// Part of a GPU's memory that this process may take, 0.01 to 0.99. Default: 0.9
    #[arg(long, value_name = "PART")]
    pub gpu_memory_utilization: Option<f64>,
    /// Compute threads. Default: "auto", which is all cores
    #[arg(long)]
    pub threads: Option<ThreadCount>,
    /// Numerics class: "auto", "f32fma", "bf16x32" or "i8x32", of GPUs "tc16f25" or "tc8f24". Default: "auto", which is bf16x32 on CPUs
    /// and the class of its tensor cores on a GPU
    #[arg(long, value_parser = parse::<NumericsChoice>)]
    pub numerics: Option<NumericsChoice>,
    /// Format of weights in class f32fma: "bf16", "f16" or "f32"
    #[arg(long, value_parser = parse::<Dtype>)]
    pub weights: Option<Dtype>,
    /// Element type of KV: "bf16"; in class f32fma also "f16" or "f32"
    #[arg(long, value_parser = parse::<Dtype>)]
    pub kv: Option<Dtype>,
    /// Proposed tokens: "off", "ngram", or JSON such as {"method": "ngram", "num_speculative_tokens": 8, "model": "org/draft"}
    #[arg(long, value_name = "METHOD")]
    pub speculative_config: Option<SpeculationSettings>,
    /// A smaller model with the same tokens that proposes tokens on decode workers; named like --model
    #[arg(long, value_name = "MODEL")]
    pub draft_model: Option<String>,
    /// LoRA adapters as name=folder, separated by commas
    #[arg(long, value_name = "NAME=FOLDER", value_delimiter = ',')]
    pub lora_modules: Vec<String>,
    /// Folder of LoRA adapters, each a folder named like the adapter; read again while the worker runs
    #[arg(long, value_name = "FOLDER")]
    pub lora_folder: Option<PathBuf>,
    /// Most LoRA adapters that are loaded at once. Default: 8
    #[arg(long, value_name = "COUNT")]
    pub max_loras: Option<usize>,
    /// Largest rank of a LoRA adapter. Default: 64
    #[arg(long, value_name = "RANK")]
    pub max_lora_rank: Option<usize>,
    /// Cluster ports of all routers: host:port, separated by commas
    #[arg(long, value_delimiter = ',')]
    pub routers: Vec<String>,
    /// gRPC listen address; port 0 picks a free one
    #[arg(long, value_name = "ADDRESS")]
    pub grpc_listen: Option<SocketAddr>,
    /// host:port at which routers reach this worker
    #[arg(long, value_name = "ADDRESS")]
    pub advertise: Option<String>,
    /// Transport of KV: "auto", "ucx" or "tcp"
    #[arg(long, value_parser = parse::<TransportKind>)]
    pub transport: Option<TransportKind>,
    /// IP address of this host at which other workers reach the data plane
    #[arg(long, value_name = "IP")]
    pub transfer_bind: Option<IpAddr>,
    /// IP address that other workers connect to, if it differs from --transfer-bind
    #[arg(long, value_name = "IP")]
    pub transfer_advertise: Option<IpAddr>,
    /// Transports that UCX may use, as in UCX_TLS, without tcp
    #[arg(long, value_name = "LANES")]
    pub ucx_tls: Option<String>,
    /// Network devices that UCX may use, as in UCX_NET_DEVICES. Default: all RDMA devices
    #[arg(long, value_name = "DEVICES")]
    pub ucx_net_devices: Option<String>,
    /// Name of this worker, unique in the cluster
    #[arg(long, value_name = "NAME")]
    pub instance: Option<String>,
    /// Pool of replicas that this worker belongs to
    #[arg(long, value_name = "NAME")]
    pub pool: Option<String>,
    /// Print progress, addresses and readiness as JSON lines on stdout
    #[arg(long)]
    pub announce: bool,
    /// Download the model into the cache if it is missing, then exit. Workers with the same cache then start without the hub
    #[arg(long)]
    pub fetch_only: bool,
    /// Check whether this worker could serve its model with these settings, then exit. The model is downloaded if it is missing
    #[arg(long)]
    pub check_only: bool,
}

impl WorkerArgs {
    /// The given flags, which override the configuration tree.
    pub fn overlay(&self) -> Overlay {
        self.common
            .overlay()
            .set("--model", "model.model", &self.model)
            .set_list("--served-model-name", "model.served_names", &self.served_model_name)
            .set("--dtype", "engine.weights", &self.dtype.and_then(ModelDtype::format))
            .set("--dtype", "engine.kv", &self.dtype.and_then(ModelDtype::format))
            .set("--dtype", "engine.numerics", &self.dtype.and_then(|dtype| dtype.class(self.device)))
            .set("--max-model-len", "model.max_model_len", &self.max_model_len)
            .set("--kv-cache-bytes", "engine.kv_cache_bytes", &self.kv_cache_bytes)
            .set("--block-tokens", "engine.block_tokens", &self.block_tokens)
            .set("--device", "engine.device", &self.device)
            .set("--gpu-memory-utilization", "engine.gpu_memory_utilization", &self.gpu_memory_utilization)
            .set("--threads", "engine.threads", &self.threads)
            .set("--numerics", "engine.numerics", &self.numerics)
            .set("--weights", "engine.weights", &self.weights)
            .set("--kv", "engine.kv", &self.kv)
            .set("--speculative-config", "engine.speculation", &self.speculative_config)
            .set("--draft-model", "engine.speculation.draft_model", &self.draft_model)
            .set_list("--lora-modules", "engine.lora.modules", &self.lora_modules)
            .set("--lora-folder", "engine.lora.folder", &self.lora_folder)
            .set("--max-loras", "engine.lora.max_loras", &self.max_loras)
            .set("--max-lora-rank", "engine.lora.max_rank", &self.max_lora_rank)
            .set_list("--routers", "membership.routers", &self.routers)
            .set("--grpc-listen", "grpc.listen", &self.grpc_listen)
            .set("--advertise", "grpc.advertise", &self.advertise)
            .set("--transport", "transfer.transport", &self.transport)
            .set("--transfer-bind", "transfer.bind", &self.transfer_bind)
            .set("--transfer-advertise", "transfer.advertise", &self.transfer_advertise)
            .set("--ucx-tls", "transfer.ucx_tls", &self.ucx_tls)
            .set("--ucx-net-devices", "transfer.ucx_net_devices", &self.ucx_net_devices)
            .set("--instance", "instance.id", &self.instance)
            .set("--pool", "instance.pool", &self.pool)
    }
}

/// A flag whose values are the names of a serde enum.
fn parse<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, String> {
    let deserializer = serde::de::value::StrDeserializer::<serde::de::value::Error>::new(text);
    T::deserialize(deserializer).map_err(|e| e.to_string())
}
