//! The ops trait: the operations that the engine requests from a device.
//!
//! The interface fits devices with their own memory. Weights and tensors are opaque handles with a memory kind. Work is enqueued on one
//! in-order stream and polled through fences. Values cross from and to the host only in explicit copies: weights and tables when a model
//! is loaded ([`Ops::prepare`], [`Ops::upload_rope`]); [`Ops::upload`], [`Ops::upload_ids`], [`Ops::plan`] and the row numbers of
//! [`Ops::gather_rows`] before a step; [`Ops::download`] after it. All row counts are set at run time; `M` rows never influence each other's bits.

use baton_types::{BlockId, Dtype, Fence, KvPoolMap, MemoryKind, PoolMemory};
use std::sync::Arc;

/// A device failed or was misused. Shapes are checked at enqueue: a wrong shape is a defect of the caller.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpsError {
    /// Not enough device memory.
    #[error("{kind}: cannot allocate {bytes} bytes for {what}")]
    OutOfMemory { kind: MemoryKind, bytes: usize, what: String },
    /// A shape, type or handle that does not fit the operation.
    #[error("{op}: {message}")]
    Shape {
        op: &'static str,
        /// What does not fit.
        message: String,
    },
    /// The device reported an error; the backend is unusable from then on.
    #[error("device failed: {0}")]
    Device(String),
}

/// A dense `[rows_max, cols]` f32 activation on the device. Operations use its first `rows` rows.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Tensor {
    pub(crate) id: u32,
    /// Rows allocated; an operation may use fewer.
    pub rows_max: usize,
    pub cols: usize,
}

/// A prepared weight: `[n, k]` matrix (row = output feature), or `[1, k]` vector for norms.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Weight {
    pub(crate) id: u32,
    /// Output features: rows of the matrix.
    pub n: usize,
    /// Input features: columns of the matrix.
    pub k: usize,
    /// Format in which it is used in computation.
    pub dtype: Dtype,
}

/// A KV pool registered with the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct KvHandle(pub(crate) u32);

/// An uploaded batch description, valid for the step it was planned for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PlanHandle(pub(crate) u32);

/// Token ids of a batch on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct IdsHandle(pub(crate) u32);

/// Constructors of handles, for backends outside this crate (test doubles).
impl Tensor {
    /// A handle with a backend-chosen id.
    pub fn from_raw(id: u32, rows_max: usize, cols: usize) -> Self {
        Self { id, rows_max, cols }
    }
    /// The id that the backend chose.
    pub fn raw(self) -> u32 {
        self.id
    }
}

/// Rows of one sequence in a step: `rows` consecutive rows of the batch at positions `position ..`.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanSegment {
    /// First position of this segment in its sequence (= tokens whose KV is already in the pool).
    pub position: usize,
    pub rows: usize,
    /// Block table of the group, covering at least `position + rows` tokens.
    pub blocks: Vec<BlockId>,
}

/// The batch of one step: its segments cover the rows `0 .. sum(rows)` in order.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    pub segments: Vec<PlanSegment>,
}

impl Plan {
    /// Rows in the batch.
    pub fn rows(&self) -> usize {
        self.segments.iter().map(|s| s.rows).sum()
    }
}

/// Whether a GEMM replaces its output or adds to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Store {
    /// `out = x * w^T`
    Set,
    /// `out += x * w^T` (residual stream)
    Add,
}

/// Rotary tables and pairing.
#[derive(Clone, Debug, PartialEq)]
pub struct RopeTable {
    /// `[positions, dim / 2]` cosines, row-major.
    pub cos: Vec<f32>,
    /// `[positions, dim / 2]` sines, row-major.
    pub sin: Vec<f32>,
    /// Elements rotated per head (`head_dim` unless partial).
    pub dim: usize,
}

/// A rotary table on the device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RopeHandle(pub(crate) u32);

/// Description of a backend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackendInfo {
    /// Human-readable, e.g. `cpu avx2+fma, 2 threads`.
    pub name: String,
    /// Canonical reduction family, see [`baton_types::NumericsClass`].
    pub isa: &'static str,
    /// Revision of the reduction orders.
    pub kernel_revision: u32,
    /// Where tensors and weights are stored.
    pub memory: MemoryKind,
}

/// One device and its in-order stream. Enqueueing may return before the work is done.
pub trait Ops: Send + Sync {
    /// Name, class and memory of the backend.
    fn info(&self) -> BackendInfo;

    /// Rounds a weight `[n, k]`, given row-major in f32, to format `dtype` (nearest even) and repacks it for the kernels.
    fn prepare(&self, name: &str, n: usize, k: usize, dtype: Dtype, data: &[f32]) -> Result<Weight, OpsError>;

    /// Allocates an activation `[rows_max, cols]`. Lives as long as the backend.
    fn alloc(&self, rows_max: usize, cols: usize) -> Result<Tensor, OpsError>;

    /// Registers a KV pool. The element types of its planes determine the rounding of stores.
    fn bind_kv(&self, memory: Arc<dyn PoolMemory>, map: &KvPoolMap) -> Result<KvHandle, OpsError>;

    /// Uploads a rotary table.
    fn upload_rope(&self, table: &RopeTable) -> Result<RopeHandle, OpsError>;

    /// Uploads the token ids of a batch; replaces those of the last call.
    fn upload_ids(&self, ids: &[u32]) -> Result<IdsHandle, OpsError>;

    /// Uploads the batch description of a step; replaces that of the last call.
    fn plan(&self, plan: &Plan) -> Result<PlanHandle, OpsError>;

    /// Copies `data` (`[rows, cols]`) into the first rows of a tensor.
    fn upload(&self, tensor: Tensor, data: &[f32]) -> Result<(), OpsError>;

    /// Looks up embeddings: `out[r] = table[ids[r]]`.
    fn embed(&self, table: Weight, ids: IdsHandle, out: Tensor, rows: usize) -> Result<(), OpsError>;

    /// `out[r] = x[r] / rms(x[r]) * gain`, `rms = sqrt(mean(x^2) + eps)`.
    fn rms_norm(&self, x: Tensor, gain: Weight, eps: f32, out: Tensor, rows: usize) -> Result<(), OpsError>;

    /// `out = x * w^T` for the first `rows` rows. `partitions`: contiguous parts of K merged in a fixed binary tree
    /// (tensor parallelism); 1 for GEMMs whose K is never split.
    fn linear(
        &self,
        x: Tensor,
        w: Weight,
        partitions: usize,
        store: Store,
        out: Tensor,
        rows: usize,
    ) -> Result<(), OpsError>;

    /// Rotates `q` (`[rows, heads * head_dim]`, in place) and `k` (`[rows, kv_heads * head_dim]`), then stores `k` and `v`, rounded to
    /// the planes' types, at each row's position. `layer` counts within group 0. Pairing is (i, i + dim/2), as in Hugging Face checkpoints.
    #[allow(clippy::too_many_arguments)] // One fused device launch.
    fn rope_store(
        &self,
        kv: KvHandle,
        layer: usize,
        plan: PlanHandle,
        rope: RopeHandle,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> Result<(), OpsError>;

    /// Causal attention of `q` (`[rows, heads * head_dim]`) over the pool: row at position p attends 0..=p of its own block table.
    /// `out` has the shape of `q`. Scores are scaled by `scale`.
    fn attend(
        &self,
        kv: KvHandle,
        layer: usize,
        plan: PlanHandle,
        q: Tensor,
        scale: f32,
        out: Tensor,
    ) -> Result<(), OpsError>;

    /// Copies the KV of the first `tokens` tokens of block `from` to block `to`, all layers of group 0.
    fn copy_kv(&self, kv: KvHandle, from: BlockId, to: BlockId, tokens: usize) -> Result<(), OpsError>;

    /// `gate[r][i] = silu(gate[r][i]) * up[r][i]` in place.
    fn silu_mul(&self, gate: Tensor, up: Tensor, rows: usize) -> Result<(), OpsError>;

    /// `out[i] = x[rows[i]]`: gathers the rows that need logits.
    fn gather_rows(&self, x: Tensor, rows: &[usize], out: Tensor) -> Result<(), OpsError>;

    /// A fence after everything enqueued so far.
    fn fence(&self) -> Fence;

    /// Copies the first `rows` rows out, after everything enqueued before. Blocks until then, at most for the backend's own deadline.
    fn download(&self, tensor: Tensor, rows: usize, out: &mut [f32]) -> Result<(), OpsError>;
}
