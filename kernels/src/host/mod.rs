//! Devices whose memory is the host's: they compute each step when it is launched, so their fences are always done.
//!
//! [`HostDevice`] owns weights and checks programs and steps; a [`HostKernels`] only computes on slices.

mod adapted;
mod delta;
mod device;
mod executable;
mod experts;
mod kept;
mod latent;
mod operations;
pub(crate) mod parts;
mod resolved;
mod timed;

use crate::device::{DeviceError, PartShape, Role, RopeTable, StoredRows};
use crate::kv::KvBinding;
use crate::numerics::{KERNEL_REVISION, Numerics, soft_cap, soft_cap_by_exp2};
use crate::packed::PackedCache;
use crate::program::Activation;
use crate::step::{SlotSamplers, StepInput, StepOutput, StepSegment, rows_of};
use baton_memory::{HostPool, HugePages};
use baton_types::{Digest, TokenId};
use parking_lot::RwLock;
use std::ops::Range;
use std::sync::{Arc, Once};

#[cfg(test)]
pub(crate) use adapted::AdaptedRows;
pub use adapted::Changes;
pub use operations::{
    ChoiceOf, DeltaHeads, DeltaOf, DeltaRows, ExpertMatrices, ExpertsOf, GateUpOf, HeadProducts, LatentMatrices,
    LatentOf, NormOf, ProjectOf, QkvOf, RotatedHeads,
};
pub use parts::Scratch;
pub(crate) use timed::Timed;
pub use timed::Times;

/// Says once that this process has no huge pages, if the memory was refused them: steps take longer then, and nothing else changes.
pub(crate) fn huge_pages_of(memory: &HostPool) {
    static SAID: Once = Once::new();
    if let HugePages::Refused(error) = memory.huge_pages() {
        SAID.call_once(|| {
            tracing::warn!(
                error,
                "no huge pages for weights and KV: set transparent_hugepage/enabled to madvise or always"
            );
        });
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

/// Location of a step's rows in a KV pool.
#[allow(missing_docs, reason = "the names of fields say it")]
#[derive(Clone, Copy, Debug)]
pub struct KvStep<'a> {
    pub kv: &'a KvBinding,
    /// Layer within the group.
    pub layer: usize,
    /// The batch, with its tables of the group; they are checked against the pool.
    pub segments: &'a [StepSegment],
}

impl KvStep<'_> {
    /// Rows of the batch.
    pub fn rows(&self) -> usize {
        rows_of(self.segments)
    }

    /// Elements of each value that attention of `q` takes for `out`: in a latent group its first ones, elsewhere all.
    ///
    /// # Panics
    /// If `out` has not as many heads as `q`, or another group's values are taken in part.
    pub(crate) fn value_dim(&self, q: &[f32], out: &[f32]) -> usize {
        let dim = self.kv.dim();
        let value_dim = out.len() * dim / q.len().max(1);
        assert!(value_dim * q.len() == out.len() * dim && value_dim <= dim, "{} of {} elements", out.len(), q.len());
        assert!(value_dim == dim || self.kv.is_latent() || q.is_empty(), "values in part");
        value_dim
    }

    /// The segments that `rows` belong to, each with their positions in it.
    pub(crate) fn parts(&self, rows: Range<usize>) -> impl Iterator<Item = (&StepSegment, Range<usize>)> {
        let mut end = 0;
        self.segments.iter().filter_map(move |segment| {
            let first = end;
            end += segment.rows;
            let (from, to) = (rows.start.max(first), rows.end.min(end));
            (from < to).then(|| (segment, segment.position + from - first..segment.position + to - first))
        })
    }

    /// The position of each of `rows`.
    pub(crate) fn positions_of(&self, rows: Range<usize>) -> impl Iterator<Item = usize> {
        self.parts(rows).flat_map(|(_, positions)| positions)
    }

    /// The position of each row.
    pub(crate) fn positions(&self) -> impl Iterator<Item = usize> + '_ {
        self.segments.iter().flat_map(|s| s.position..s.end())
    }
}

/// Which tokens attention sees, what makes scores of dot products, and which scores join them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scores<'a> {
    /// Factor of the dot products.
    pub scale: f32,
    /// Positions that a row attends to, its own included; `None`: all.
    pub window: Option<usize>,
    /// Bound of the scaled products, see [`Attend::soft_cap`](crate::program::Attend::soft_cap).
    pub soft_cap: Option<f32>,
    /// Of each query head, see [`Attend::sinks`](crate::program::Attend::sinks).
    pub sinks: Option<&'a [f32]>,
}

impl Scores<'_> {
    /// The sink of a query head.
    #[inline(always)]
    pub(crate) fn sink(&self, head: usize) -> Option<f32> {
        self.sinks.map(|sinks| sinks[head])
    }

    /// The first position that the row at `position` attends to.
    pub(crate) fn first(&self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Replaces dot products by capped scores, if there is a cap. Returns the factor that is left.
    #[inline(always)] // For the vectors of the caller.
    pub(crate) fn cap(&self, dots: &mut [f32]) -> f32 {
        let Some(cap) = self.soft_cap else { return self.scale };
        dots.iter_mut().for_each(|x| *x = soft_cap(*x * self.scale, cap));
        1.0
    }

    /// As [`Scores::cap`] in the classes of tensor cores.
    #[inline(always)]
    pub(crate) fn cap_by_exp2(&self, dots: &mut [f32]) -> f32 {
        let Some(cap) = self.soft_cap else { return self.scale };
        dots.iter_mut().for_each(|x| *x = soft_cap_by_exp2(*x * self.scale, cap));
        1.0
    }
}

/// The arithmetic of a host device. Shapes are checked before a call; all activations are dense and row-major.
///
/// The operations of a program ([`HostKernels::embed`], [`HostKernels::qkv`] and so on) consist of parts, which are here too: the conformance
/// tests compare every part. By default an operation is its parts, one after another; kernels may fuse them as long as no bit changes.
#[allow(missing_docs, reason = "the names of methods say it")]
pub trait HostKernels: Send + Sync + 'static {
    /// A matrix in the format of these kernels.
    type Matrix: Send + Sync;

    /// The input of a GEMM: rows rounded as the class says, in the order in which the kernels read them.
    type Input: Default + Send;

    fn name(&self) -> String;

    fn numerics(&self) -> Numerics;

    /// Revision of the canonical orders that they implement.
    fn revision(&self) -> u32 {
        KERNEL_REVISION
    }

    /// Packs matrices with rows of `k` elements that are multiplied together, rounded as the class says.
    fn pack(&self, role: Role, k: usize, parts: &[StoredRows<'_>]) -> Result<Self::Matrix, DeviceError>;

    /// Name and revision of the packed layout, by which packed matrices are kept on disk; `None`: they are not.
    fn packing(&self) -> Option<String> {
        None
    }

    /// A matrix of the packed form of such parts, all zero.
    fn unpacked(&self, _k: usize, _parts: &[PartShape]) -> Result<Self::Matrix, DeviceError> {
        Err(DeviceError::Failed(format!("{} keeps no packed weights", self.name())))
    }

    /// The packed form as bytes, in order.
    fn packed<'a>(&self, _: &'a Self::Matrix) -> Vec<&'a [u8]> {
        Vec::new()
    }

    /// As [`HostKernels::packed`], to be read from disk.
    fn packed_mut<'a>(&self, _: &'a mut Self::Matrix) -> Vec<&'a mut [u8]> {
        Vec::new()
    }

    /// Calls `task(i)` for every `i < tasks`, each once.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
        (0..tasks).for_each(task);
    }

    /// Widens row `row` of the first part into `out` (`k` elements).
    fn row(&self, matrix: &Self::Matrix, row: usize, out: &mut [f32]);

    /// RMSNorm of rows as long as `gain`.
    fn rms_norm(&self, x: &[f32], gain: &[f32], eps: f32, out: &mut [f32]);

    /// Rounds `rows` rows of `x` for products with `w`, into memory that may be reused.
    fn input(&self, x: &[f32], rows: usize, w: &Self::Matrix, input: &mut Self::Input);

    /// GEMM of all rows of an input for parts of `w` from `first` on; `outs` are `[rows, n]` for each.
    fn linear(
        &self,
        x: &Self::Input,
        w: &Self::Matrix,
        first: usize,
        partitions: usize,
        store: Store,
        outs: &mut [&mut [f32]],
    );

    /// Rotates a part of every head of every row in place.
    fn rotate(&self, step: KvStep<'_>, rope: &RopeTable, heads: RotatedHeads, x: &mut [f32]);

    /// Stores rows of keys (0) or values (1) at their positions.
    fn store(&self, step: KvStep<'_>, plane: usize, x: &[f32]);

    /// Rotates q and k in place and stores k and v; `v` as long as `k`.
    fn rope_store(&self, step: KvStep<'_>, rope: &RopeTable, q: &mut [f32], k: &mut [f32], v: &[f32]) {
        let heads = RotatedHeads { dim: step.kv.dim(), first: 0 };
        self.rotate(step, rope, heads, q);
        self.rotate(step, rope, heads, k);
        self.store(step, 0, k);
        self.store(step, 1, v);
    }

    /// Products of `rows` rows of `x`, after a norm if there is one, with all parts of a matrix.
    fn normed_linear(
        &self,
        w: &Self::Matrix,
        norm: Option<NormOf<'_>>,
        x: &[f32],
        rows: usize,
        outs: &mut [&mut [f32]],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::normed_linear(self, w, norm, x, rows, outs, scratch);
    }

    /// Products of each head with the matrix of its own.
    fn by_head(
        &self,
        w: &Self::Matrix,
        heads: HeadProducts,
        x: &[f32],
        out: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::by_head(self, w, heads, x, out, scratch);
    }

    /// Causal attention of `q`, rows of `q.len() / step.rows()`. In a latent group `out` may have fewer elements of a head than `q`: values are the
    /// first elements of keys.
    fn attend(&self, step: KvStep<'_>, q: &[f32], scores: Scores<'_>, out: &mut [f32]);

    /// Adds the adapters' changes of a linear to its output: `x` is the linear's input, before it is rounded for a class. Both have all rows.
    fn adapt(&self, x: &[f32], changes: Changes<'_>, y: &mut [f32]);

    /// The gated activation in place: `gate = activation(gate) * up`.
    fn activate(&self, activation: Activation, gate: &mut [f32], up: &[f32]);

    /// The gate of attention's output: `x = x / (1 + exp(-gate))`.
    fn gate(&self, gate: &[f32], x: &mut [f32]);

    /// The causal convolution of query, key and value, and SiLU, in place. `taps` is `[taps, channels]`; the inputs before and behind the rows are
    /// in the pool.
    fn convolve(&self, step: KvStep<'_>, taps: &[f32], x: [&mut [f32]; 3]);

    /// Decay and beta of each row and value head, in place of their products.
    fn decays(&self, op: &DeltaOf<'_>, decay: &mut [f32], beta: &mut [f32]);

    /// The gated delta rule: `out` is `[rows, value_heads * value_dim]`, states are in the pool.
    fn delta_rule(&self, step: KvStep<'_>, heads: DeltaHeads, rows: DeltaRows<'_>, out: &mut [f32]);

    /// `y += factor * x`, product and sum rounded.
    fn add_scaled(&self, x: &[f32], factor: f32, y: &mut [f32]) {
        y.iter_mut().zip(x).for_each(|(y, x)| *y += factor * x);
    }

    /// Logits in place: `soft_cap(factor * logit)`.
    fn finish_logits(&self, logits: &mut [f32], factor: f32, cap: Option<f32>) {
        parts::finish_logits(logits, factor, cap);
    }

    /// The operation `Embed`: a row of the table for each id, widened, times the factor.
    fn embed(&self, table: &Self::Matrix, factor: f32, ids: &[TokenId], residual: &mut [f32]) {
        let cols = residual.len() / ids.len().max(1);
        for (out, id) in residual.chunks_exact_mut(cols.max(1)).zip(ids) {
            self.row(table, *id as usize, out);
            parts::scale(out, factor);
        }
    }

    /// The operation `Qkv`, of all rows of `residual`: the query is set, and the gate if there is one (else it is empty); key and value are stored to
    /// the pool.
    #[allow(clippy::too_many_arguments, reason = "the operation's own")]
    fn qkv(
        &self,
        w: &Self::Matrix,
        op: &QkvOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        query: &mut [f32],
        gate: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::qkv(self, w, op, step, residual, query, gate, scratch, None);
    }

    /// The operations `Out` and `Down`, see [`Project`](crate::program::Project).
    fn project(
        &self,
        w: &Self::Matrix,
        op: &ProjectOf<'_>,
        x: &[f32],
        residual: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::project(self, w, op, x, residual, scratch, None);
    }

    /// The operation [`Latent`](crate::program::Latent), of all rows of `residual`: the query is set, the latent is stored to the pool.
    fn latent(
        &self,
        matrices: &LatentMatrices<'_, Self::Matrix>,
        op: &LatentOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        query: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        latent::latent(self, matrices, op, step, residual, query, scratch);
    }

    /// The operation [`GatedDelta`](crate::program::GatedDelta), of all rows of `residual`: what is attended is set, states are in the pool.
    fn gated_delta(
        &self,
        w: &Self::Matrix,
        op: &DeltaOf<'_>,
        step: KvStep<'_>,
        residual: &[f32],
        attended: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        delta::gated_delta(self, w, op, step, residual, attended, scratch);
    }

    /// The operation `GateUp`, of all rows of `residual`.
    fn gate_up(
        &self,
        w: &Self::Matrix,
        op: &GateUpOf<'_>,
        residual: &[f32],
        inner: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::gate_up(self, w, op, residual, inner, scratch, None);
    }

    /// The operation `Experts`, of all rows of `residual`.
    fn experts(
        &self,
        matrices: &ExpertMatrices<'_, Self::Matrix>,
        op: &ExpertsOf<'_>,
        residual: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        experts::experts(self, matrices, op, residual, scratch);
    }

    /// The products of `Head`, of all rows of `residual`; [`HostKernels::finish_logits`] completes it.
    fn head(
        &self,
        w: &Self::Matrix,
        norm: NormOf<'_>,
        residual: &[f32],
        logits: &mut [f32],
        scratch: &mut Scratch<Self::Input>,
    ) where
        Self: Sized,
    {
        parts::head(self, w, norm, residual, logits, scratch);
    }

    /// The bits of [`SlotSamplers::sample`].
    fn sample(&self, samplers: &mut SlotSamplers, step: &StepInput, logits: &[f32]) -> StepOutput {
        samplers.sample(step, logits)
    }
}

/// A loaded weight.
enum Loaded<M> {
    /// A matrix of so many parts.
    Matrix {
        matrix: M,
        parts: usize,
    },
    Vector(Vec<f32>),
}

/// What executables share with their device.
struct Shared<K: HostKernels> {
    kernels: K,
    weights: RwLock<Vec<Arc<Loaded<K::Matrix>>>>,
    ropes: RwLock<Vec<Arc<RopeTable>>>,
}

/// A device that computes on the calling thread.
pub struct HostDevice<K: HostKernels> {
    shared: Arc<Shared<K>>,
    /// Packed weights on disk.
    kept: Option<kept::Kept>,
}

impl<K: HostKernels> HostDevice<K> {
    pub(crate) fn with_kernels(kernels: K) -> Self {
        Self { shared: Arc::new(Shared { kernels, weights: RwLock::default(), ropes: RwLock::default() }), kept: None }
    }

    /// A device that keeps the packed weights of `model` in `cache`.
    pub(crate) fn with_cache(kernels: K, cache: PackedCache, model: Digest) -> Self {
        let kept = kept::Kept::begin(&kernels, cache, model);
        Self { kept, ..Self::with_kernels(kernels) }
    }
}
