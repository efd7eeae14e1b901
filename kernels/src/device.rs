//! The interface to a device: what the engine asks of whatever computes a model.
//!
//! It fits devices with their own memory. [`Device::load`] takes weights as they are stored and keeps its own packed form.
//! [`Device::compile`] takes the whole forward pass as a [`Program`] of fused operations, so that a backend may fuse, capture or replay it.
//! [`Executable::launch`] enqueues one step and returns; [`Executable::finish`] waits for it and returns what it sampled. Activations never
//! leave the device, and logits only where asked for. KV does, and a fence says when an observed layer's KV is in the pool.

use crate::adapter::{AdapterBounds, PackedAdapter};
use crate::numerics::Numerics;
use crate::program::Program;
use crate::step::{AdapterSlot, StepInput, StepOutput};
use crate::storage::StorageFormat;
use baton_memory::{PoolError, PoolMemory};
use baton_types::{BlockId, Fence, KvPoolMap, MemoryKind};
use std::sync::Arc;

/// A device failed or was misused. Programs and steps are checked before anything is enqueued: a shape that does not fit is a defect of
/// the caller.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Not enough device memory. `help` says why, and what to do about it.
    #[error("{kind}: cannot allocate {bytes} bytes for {what}: {help}")]
    OutOfMemory { kind: MemoryKind, bytes: usize, what: String, help: String },
    /// No memory for a KV pool.
    #[error("{0}")]
    Pool(String),
    /// A shape, type or handle that does not fit the operation.
    #[error("{op}: {message}")]
    Shape {
        op: &'static str,
        /// What does not fit.
        message: String,
    },
    /// A step that exceeds a bound of its program.
    #[error("step refused: {0}")]
    Step(String),
    /// A slot asks for an adapter that is not loaded.
    #[error("{0:?} is not loaded")]
    UnknownAdapter(AdapterSlot),
    /// An adapter for a slot that the program does not have.
    #[error("{slot:?} of {slots_max}")]
    AdapterSlots { slot: AdapterSlot, slots_max: usize },
    /// An adapter of another rank than the program has room for.
    #[error("an adapter of rank {rank}, 1 to {rank_max} fit")]
    AdapterRank { rank: usize, rank_max: usize },
    /// A sequence uses the adapter, so that it can neither be replaced nor unloaded.
    #[error("{0:?} is in use")]
    AdapterInUse(AdapterSlot),
    /// A pool in memory that the device's kernels do not reach.
    #[error("bind: the device does not reach a pool in {0}: allocate it with this device")]
    PoolOutOfReach(MemoryKind),
    /// A step or a copy before a pool was bound.
    #[error("no KV pool is bound: call bind before the first step")]
    Unbound,
    /// The device reported an error; the backend is unusable from then on.
    #[error("device failed: {0}")]
    Failed(String),
}

impl DeviceError {
    /// The memory of a pool cannot be allocated.
    pub(crate) fn pool(error: PoolError) -> Self {
        Self::Pool(error.to_string())
    }
}

/// What a weight is used for. A backend may pack by role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Rows looked up by token id, `[vocab, hidden]`. Where a model ties them, it is the head too.
    Embedding,
    /// Query, key and value, stacked: `[heads * head_dim + 2 * kv_heads * head_dim, hidden]`; or the projections of latent attention, or of a gated delta
    /// rule.
    Qkv,
    /// Output of attention or of a gated delta rule, `[hidden, heads * head_dim]`.
    Out,
    /// Gate and up projection of the MLP, stacked: `[2 * ffn, hidden]`.
    GateUp,
    /// Down projection of the MLP, `[hidden, ffn]`.
    Down,
    /// A matrix for each head, stacked.
    Heads,
    /// Matrix by which experts are chosen, `[experts, hidden]`.
    Router,
    /// Matrix of the logits, `[vocab, hidden]`.
    Head,
    /// A vector, `[1, k]`: the gain of a norm, or biases. Vectors are kept in f32.
    Vector,
}

/// Rows of a weight as a file stores them.
#[derive(Clone, Copy, Debug)]
pub struct StoredRows<'a> {
    /// Number of rows (output features).
    pub rows: usize,
    /// Format of the bytes.
    pub format: StorageFormat,
    /// The rows, one after another.
    pub bytes: &'a [u8],
}

impl StoredRows<'_> {
    /// Checks that the bytes are as many rows of `k` elements.
    pub(crate) fn check(&self, name: &str, k: usize) -> Result<(), DeviceError> {
        let Self { rows, format, bytes } = *self;
        let expected = format.row_bytes(k).and_then(|row| row.checked_mul(rows));
        if rows > 0 && k > 0 && expected == Some(bytes.len()) {
            return Ok(());
        }
        let message = format!("{name}: {} bytes for {rows} rows of {k} elements in {format:?}", bytes.len());
        Err(DeviceError::Shape { op: "load", message })
    }

    /// Expands one row into `out`, a row of `k` elements.
    pub fn read(&self, row: usize, out: &mut [f32]) {
        let row_bytes = self.bytes.len() / self.rows;
        self.format.expand(&self.bytes[row * row_bytes..(row + 1) * row_bytes], out);
    }
}

/// A weight to load.
#[derive(Clone, Copy, Debug)]
pub struct WeightSpec<'a> {
    /// For messages.
    pub name: &'a str,
    /// What it is used for.
    pub role: Role,
    /// Input features: elements of a row.
    pub k: usize,
    /// The matrices stacked in it, e.g. query, key and value.
    pub parts: &'a [StoredRows<'a>],
}

/// Rows of a weight without their bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartShape {
    /// Number of rows (output features).
    pub rows: usize,
    /// Format in which the file stores them.
    pub format: StorageFormat,
}

/// A weight that a device may have packed before, in an earlier process.
#[derive(Clone, Copy, Debug)]
pub struct WeightShape<'a> {
    /// As in [`WeightSpec`], and of no other weight of the model.
    pub name: &'a str,
    /// What it is used for.
    pub role: Role,
    /// Input features: elements of a row.
    pub k: usize,
    /// Rows of each part.
    pub rows: &'a [usize],
}

/// A loaded weight `[n, k]`; it lives as long as its device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weight {
    pub(crate) id: u32,
    /// Output features of all parts.
    pub n: usize,
    /// Input features.
    pub k: usize,
}

/// Rotary tables. Pairs are `(i, i + dim / 2)`, as in Hugging Face checkpoints.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// `[positions, dim / 2]` cosines, row-major.
    pub cos: Vec<f32>,
    /// `[positions, dim / 2]` sines, row-major.
    pub sin: Vec<f32>,
    /// Elements rotated per head (`head_dim` unless partial).
    pub dim: usize,
}

/// A rotary table on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Rope {
    pub(crate) id: u32,
    /// Elements rotated per head.
    pub dim: usize,
    /// Positions of the table.
    pub positions: usize,
}

/// Bounds of the steps of a program: they size its activations, which are allocated once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Most rows (tokens) of one step.
    pub rows_max: usize,
    /// Most rows of one step that sample or whose logits are returned.
    pub logit_rows_max: usize,
    /// Slots: most sequences that a device keeps between steps.
    pub slots_max: usize,
    /// Longest sequence.
    pub positions_max: usize,
    /// Of adapters that are loaded later.
    pub adapters: AdapterBounds,
}

/// Description of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceInfo {
    /// Human-readable, e.g. `cpu avx2+fma, 2 threads`.
    pub name: String,
    /// The arithmetic that it computes.
    pub numerics: Numerics,
    /// Revision of the reduction orders.
    pub kernel_revision: u32,
    /// Where weights and activations are stored.
    pub memory: MemoryKind,
    /// Whether a launch returns before the step is computed: then launching the next step early hides the time between steps.
    pub asynchronous: bool,
    /// Whether it computes latent attention.
    pub latents: bool,
    /// Whether it computes recurrent layers, and gates of attention's output.
    pub states: bool,
    /// Capabilities of its sampler that not every device has, by the names in which workers state them.
    pub sampling: &'static [&'static str],
}

/// Memory of a device, in bytes.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeviceMemory {
    pub total: u64,
    pub free: u64,
    /// Of this process, in its weights and rotary tables.
    pub weights: u64,
    /// Of this process, in its KV pools.
    pub pool: u64,
    /// Of this process, in everything else that it allocates: activations, block tables, buffers of copies.
    pub workspace: u64,
    /// What the next pool takes beside its blocks.
    pub beside_pool: u64,
}

impl DeviceMemory {
    /// What is in use and none of the above: contexts, loaded kernels, other processes.
    pub fn other(&self) -> u64 {
        self.total.saturating_sub(self.free + self.weights + self.pool + self.workspace)
    }
}

/// One device.
pub trait Device: Send + Sync {
    /// Name, arithmetic and memory.
    fn info(&self) -> DeviceInfo;

    /// Its own memory, as it is now; `None` if it computes in the host's.
    fn memory(&self) -> Option<DeviceMemory> {
        None
    }

    /// Packs a weight for the kernels. The bytes are read before this returns.
    fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError>;

    /// A weight that was packed before and kept, so that nobody has to read it from the model's file: its bits are those that
    /// [`Device::load`] would make. `None` if there is none, or none that is whole.
    fn cached(&self, _: &WeightShape<'_>) -> Option<Weight> {
        None
    }

    /// Loads a rotary table.
    fn load_rope(&self, table: RopeTable) -> Result<Rope, DeviceError>;

    /// Allocates memory for a KV pool with this layout, where the kernels of this device reach it. Transfers move bytes in and out of it.
    fn alloc_pool(&self, map: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError>;

    /// Checks a program, whose weights are of this device, and allocates its activations.
    fn compile(&self, program: Program, bounds: Bounds) -> Result<Box<dyn Executable>, DeviceError>;
}

/// Most steps that are launched and not finished: one that runs, and one ahead of it.
pub const STEPS_MAX: usize = 2;

/// Called for each observed layer as soon as the stores of its KV are enqueued, with a fence after them.
pub type LayerObserver<'a> = &'a mut dyn FnMut(u32, &Fence);

/// A compiled program with its activations and slots, and the KV pool that it computes on. Its work runs in the order of the calls.
pub trait Executable: Send {
    /// Makes `memory`, which [`Device::alloc_pool`] allocated, the pool of all later steps. The element types of its planes determine the rounding of stores.
    fn bind(&mut self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<(), DeviceError>;

    /// Makes `adapter` what rows of this slot use, after everything enqueued before, in place of another one. Refused with a typed error if it
    /// does not fit the program or its bounds, or a sequence uses the slot; then nothing changes.
    fn load_adapter(&mut self, slot: AdapterSlot, adapter: Arc<PackedAdapter>) -> Result<(), DeviceError>;

    /// Frees the slot of an adapter that no sequence uses.
    fn unload_adapter(&mut self, slot: AdapterSlot) -> Result<(), DeviceError>;

    /// Frees slots of sequences that are gone, as [`crate::step::Delta::Leave`] in the next step would: no step may come, and adapters that
    /// they used can only then be replaced. Refused if a slot is free.
    fn leave(&mut self, slots: &[usize]) -> Result<(), DeviceError>;

    /// Enqueues a step. A transfer that `observer` starts at a layer overlaps this layer's attention and MLP and all later layers.
    ///
    /// A step that breaks a bound, does not fit the slots, or comes while [`STEPS_MAX`] are not finished, is refused before anything is
    /// enqueued, and changes no slot.
    fn launch(&mut self, step: &StepInput, observer: LayerObserver<'_>) -> Result<(), DeviceError>;

    /// Waits for the oldest launched step, at most for the backend's own deadline, and returns what its rows sampled, and the logits that
    /// it asked for. A device failure fails the step that it belongs to.
    fn finish(&mut self) -> Result<StepOutput, DeviceError>;

    /// Copies the KV of the first `tokens` tokens of block `from` to block `to`, in all layers of a group, after everything enqueued before;
    /// waits until it is done. Of a group of states it is refused: a state is that of all its tokens.
    fn copy_kv(&mut self, group: usize, from: BlockId, to: BlockId, tokens: usize) -> Result<(), DeviceError>;
}
