//! Why a worker does not start.

use crate::settings::DeviceKind;
use baton_kernels::numerics::Numerics;
use baton_node::config::ByteSize;
use baton_types::Dtype;

/// A worker that cannot start. A retry fixes none of these.
#[derive(Debug, thiserror::Error)]
pub enum WorkerError {
    /// The model cannot be found, downloaded or supported.
    #[error(transparent)]
    Models(#[from] crate::models::ModelsError),
    /// The engine cannot start.
    #[error(transparent)]
    Engine(#[from] baton_engine::EngineError),
    /// The device cannot start.
    #[error(transparent)]
    Device(#[from] baton_kernels::device::DeviceError),
    /// The model's tokenizer or template is not supported.
    #[error("{key} cannot be served")]
    Text {
        /// Where it is in the model's files.
        key: &'static str,
        #[source]
        source: baton_text::TextError,
    },
    /// Routers would refuse this worker's model card.
    #[error("the model's card cannot be published: rename the model's folder or file, or change served_names")]
    Card(#[from] baton_proto::convert::ConvertError),
    /// The data plane cannot start.
    #[error(transparent)]
    Transfer(#[from] baton_kv_transfer::TransferError),
    /// The configured context is longer than the model's.
    #[error(
        "max_model_len = {asked}, but the model's context is {context} tokens: lower --max-model-len, or leave it out for all of it"
    )]
    ModelLen {
        asked: u32,
        /// Longest context of the model, in tokens.
        context: usize,
    },
    /// A setting that the numerics class does not support.
    #[error(
        "{setting} is {got}, but numerics class {class} computes with {takes}: leave it out, or set engine.numerics = \"f32fma\""
    )]
    Numerics { setting: &'static str, got: Dtype, class: Numerics, takes: Dtype },
    /// A class for quantized files, and a model that is none.
    #[error(
        "engine.numerics is \"i8x32\", but the model's matrices are not stored in 4 to 8 bits: set it to \"auto\" or \"bf16x32\""
    )]
    NotQuantized,
    /// A KV pool that does not fit in memory.
    #[error("kv_cache_bytes = {asked}, but this process may use {memory} of memory: lower --kv-cache-bytes")]
    KvMemory {
        asked: ByteSize,
        /// Memory of the host, or of its control group.
        memory: ByteSize,
    },
    /// A name that changes with each start, while peers keep state for this name after the worker ends.
    #[error(
        "lanes of ucx_tls = \"{lanes}\" have no fence, so peers bound what this worker leaves in quarantine by its name, through restarts: \
         give it one that lasts (--instance), or leave those lanes out"
    )]
    Unnamed { lanes: String },
    /// UCX has no lane to other hosts.
    #[error(
        "transfer.transport is \"ucx\", UCX finds no lane of RDMA, and peers at {bind} may be on other hosts: set it to \"auto\" or \"tcp\", or \
         name lanes in transfer.ucx_tls"
    )]
    NoRdma {
        /// Address at which peers connect to this worker.
        bind: std::net::IpAddr,
    },
    /// An adapter of the settings cannot be served.
    #[error("the adapter {name:?} of engine.lora.modules cannot be served")]
    Adapter {
        name: String,
        #[source]
        source: crate::lora::AdapterError,
    },
    /// An adapter has a name of the model.
    #[error("engine.lora.modules names an adapter {name:?}, which is a name of the model: choose another")]
    AdapterName { name: String },
    /// The folder of adapters cannot be listed.
    #[error("engine.lora.folder = {}: cannot list it", folder.display())]
    AdapterFolder {
        folder: std::path::PathBuf,
        #[source]
        source: std::io::Error,
    },
    /// Adapters on a device that has none.
    #[error(
        "engine.lora is set, and GPUs compute no adapters yet: leave it out, or set engine.device = \"cpu\" (--device cpu)"
    )]
    AdaptersOnGpu,
    /// A draft model on a device that runs none.
    #[error(
        "engine.speculation.draft_model is set, and GPUs run no draft model yet: leave it out, or set engine.device = \"cpu\" (--device cpu)"
    )]
    DraftOnGpu,
    /// The draft model cannot be used.
    #[error("engine.speculation.draft_model = {name:?} cannot be used")]
    DraftModel {
        name: String,
        #[source]
        source: Box<WorkerError>,
    },
    /// The draft model has other tokens.
    #[error(
        "engine.speculation.draft_model = {name:?} has other tokens than the model: {differs}; take a smaller model of the same family"
    )]
    DraftTokens {
        name: String,
        /// The first difference.
        differs: String,
    },
    /// The draft model's pool holds no block.
    #[error(
        "engine.speculation.draft_kv_cache_bytes = {got} is too little for this draft model: set it to at least {needed}"
    )]
    DraftPool { got: ByteSize, needed: ByteSize },
    /// The GPU cannot be used.
    #[error(transparent)]
    Cuda(#[from] baton_kernels::cuda::CudaError),
    /// A format that tensor cores do not take, or another one for KV than for weights.
    #[error(
        "{setting} is {got}, but a tensor-core class takes {takes} here: bf16 or f16, the same for engine.weights and engine.kv"
    )]
    GpuFormat { setting: &'static str, got: Dtype, takes: Dtype },
    /// A numerics class and a device that does not compute it.
    #[error("engine.device is \"{device}\", which computes class {computes}: leave engine.numerics out")]
    DeviceClass { device: DeviceKind, computes: String },
    /// The model does not fit the GPU.
    #[error(
        "{gpu} has {total} of memory, of which {free} are free: too little for weights of {weights} and a KV pool within \
         engine.gpu_memory_utilization = {utilization}; end other processes, raise it, or take a smaller model"
    )]
    GpuMemory {
        gpu: String,
        total: ByteSize,
        free: ByteSize,
        /// Of the model, in the format of the class.
        weights: ByteSize,
        utilization: f64,
    },
}
