//! The device: weights in its memory, and programs made of them.

use super::CudaError;
use super::Gpu;
use super::driver::{Driver, Use};
use super::executable::CudaExecutable;
use super::known;
use super::launch::group_max;
use super::ops::{Attention, Matrix, Norm, Op, Qkv};
use super::pool::CudaPool;
use super::weights::{VECTOR, Weights};
use crate::device::{
    Bounds, Device, DeviceError, DeviceInfo, DeviceMemory, Executable, Rope, RopeTable, Weight, WeightSpec,
};
use crate::numerics::{Half, KERNEL_REVISION, Numerics, TensorCore};
use crate::program::check::Sizes;
use crate::program::{self, Activation, Program};
use baton_memory::PoolMemory;
use baton_types::{KvPoolMap, MemoryKind};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Most rows of decode attention: the grid of its kernels has no more in one direction.
const SLOTS_MAX: usize = 65_535;

/// Largest head that there is a kernel for.
const HEAD_DIM_MAX: usize = 256;

/// A GPU as a [`Device`].
#[derive(Debug)]
pub struct CudaDevice {
    driver: Arc<dyn Driver>,
    cores: TensorCore,
    half: Half,
    weights: Arc<Weights>,
}

impl CudaDevice {
    /// A device over a driver, in the class of its tensor cores.
    pub(super) fn with_driver(driver: Arc<dyn Driver>, half: Half) -> Result<Arc<Self>, CudaError> {
        let cores = driver.gpu().target()?.cores;
        known::check(&driver, cores, half)?;
        let weights = Arc::new(Weights::new(&driver, half)?);
        Ok(Arc::new(Self { driver, cores, half, weights }))
    }
}

fn refuse<T>(op: &'static str, message: String) -> Result<T, DeviceError> {
    Err(DeviceError::Shape { op, message })
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let Gpu { name, ordinal, capability, .. } = self.driver.gpu();
        DeviceInfo {
            name: format!("cuda:{ordinal} {name} (sm_{}{})", capability.major, capability.minor),
            numerics: Numerics::TensorCore { cores: self.cores, half: self.half },
            kernel_revision: KERNEL_REVISION,
            memory: MemoryKind::Cuda(*ordinal),
            asynchronous: true,
            latents: false,
            states: false,
            sampling: &[],
        }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        let in_use = self.driver.in_use();
        Some(DeviceMemory {
            total: self.driver.gpu().memory,
            free: self.driver.memory_free().unwrap_or(0),
            weights: in_use.bytes(Use::Weights),
            pool: in_use.bytes(Use::Pool),
            workspace: in_use.bytes(Use::Workspace),
            beside_pool: CudaPool::BYTES_BESIDE as u64,
        })
    }

    fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
        self.weights.load(spec)
    }

    fn load_rope(&self, table: RopeTable) -> Result<Rope, DeviceError> {
        self.weights.load_rope(&table)
    }

    fn alloc_pool(&self, map: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError> {
        Ok(CudaPool::new(&self.driver, map.bytes())?)
    }

    fn compile(&self, program: Program, bounds: Bounds) -> Result<Box<dyn Executable>, DeviceError> {
        let sizes = program.check(&bounds)?;
        if bounds.adapters.slots_max > 0 {
            return refuse("compile", "adapters: GPU devices have none yet".into());
        }
        if bounds.slots_max > SLOTS_MAX {
            return refuse("compile", format!("{} slots; GPU devices take {SLOTS_MAX}", bounds.slots_max));
        }
        self.check_sizes(&sizes)?;
        let mut ops = Vec::new();
        for op in &program.ops {
            if let Some(op) = self.resolve(op)? {
                ops.push(op);
            }
        }
        // Weights are complete: a program names them.
        self.weights.complete()?;
        Ok(Box::new(CudaExecutable::try_new(self.weights.clone(), program, ops, sizes, bounds)?))
    }
}

impl CudaDevice {
    fn check_sizes(&self, sizes: &Sizes) -> Result<(), DeviceError> {
        for (what, size) in [("the residual stream", sizes.hidden), ("the MLP", sizes.ffn), ("queries", sizes.query)] {
            if !size.is_multiple_of(VECTOR) {
                return refuse("compile", format!("{what} has {size} columns; GPU kernels take multiples of {VECTOR}"));
            }
        }
        Ok(())
    }

    /// The norm that GPU kernels compute before every projection.
    fn norm_before(&self, norm: Option<program::Norm>) -> Result<Norm, DeviceError> {
        match norm {
            Some(norm) => self.norm(&norm),
            None => not_yet("projections without a norm before them"),
        }
    }

    fn norm(&self, norm: &program::Norm) -> Result<Norm, DeviceError> {
        Ok(Norm { gain: self.weights.get(norm.gain, true, 1)?.at, eps: norm.eps })
    }

    fn projection(&self, op: &program::Project) -> Result<Matrix, DeviceError> {
        if op.bias.is_some() {
            return not_yet("biases of attention's output");
        }
        if op.norm.is_some() {
            return not_yet("norms behind a layer's parts");
        }
        if op.factor != 1.0 {
            return not_yet("factors of what a layer adds");
        }
        match op.partitions {
            1 => self.weights.get(op.weight, false, 1),
            partitions => refuse("compile", format!("{partitions} partitions of K: tensor-core classes have one")),
        }
    }

    /// An operation with its weights; `None` for what samples, which every program ends with.
    fn resolve(&self, op: &program::Op) -> Result<Option<Op>, DeviceError> {
        Ok(Some(match op {
            program::Op::Embed(op) if op.factor != 1.0 => return not_yet("factors of embeddings"),
            program::Op::Embed(op) => Op::Embed(self.weights.get(op.table, false, 1)?),
            program::Op::Qkv(op) => {
                if op.gate {
                    return not_yet("gates of attention's output");
                }
                if !op.head_dim.is_multiple_of(VECTOR) || op.head_dim > HEAD_DIM_MAX {
                    let message = format!(
                        "heads of {} elements; GPU kernels take multiples of {VECTOR} up to {HEAD_DIM_MAX}",
                        op.head_dim
                    );
                    return refuse("compile", message);
                }
                let group = op.heads / op.kv_heads;
                if group > group_max(op.head_dim) {
                    let message =
                        format!("{group} query heads of one KV head; GPU kernels take {}", group_max(op.head_dim));
                    return refuse("compile", message);
                }
                if op.norms.is_some_and(|norms| norms.query.gain.k != op.head_dim || norms.key.gain.k != op.head_dim) {
                    return not_yet("norms of all heads of a query or key together");
                }
                let (cos, sin) = self.weights.rope(op.rope)?;
                Op::Qkv(Qkv {
                    layer: op.layer,
                    norm: self.norm_before(op.norm)?,
                    weight: self.weights.get(op.weight, false, 3)?,
                    bias: op.bias.map(|bias| Ok::<_, DeviceError>(self.weights.get(bias, true, 1)?.at)).transpose()?,
                    heads: op.heads,
                    kv_heads: op.kv_heads,
                    head_dim: op.head_dim,
                    head_norms: match &op.norms {
                        Some(norms) => Some([self.norm(&norms.query)?, self.norm(&norms.key)?]),
                        None => None,
                    },
                    cos,
                    sin,
                    rope_dim: op.rope.dim,
                })
            }
            program::Op::Attend(op) => {
                let factor = op.scale * LOG2_E;
                if !(factor > 0.0 && factor.is_finite()) {
                    return refuse("compile", format!("scores are multiplied by {}", op.scale));
                }
                if op.soft_cap.is_some() {
                    return not_yet("soft caps of scores");
                }
                if op.sinks.is_some() {
                    return not_yet("attention sinks");
                }
                Op::Attend(Attention { layer: op.layer, factor, window: op.window.unwrap_or(0) })
            }
            program::Op::Out(op) => Op::Out(self.projection(op)?),
            program::Op::GateUp(op) if op.activation != Activation::Silu => {
                return not_yet("activations other than SiLU");
            }
            program::Op::GateUp(op) => Op::GateUp(self.norm_before(op.norm)?, self.weights.get(op.weight, false, 2)?),
            program::Op::Down(op) => Op::Down(self.projection(op)?),
            program::Op::Latent(_) | program::Op::Expand(_) => return not_yet("latent attention"),
            program::Op::GatedDelta(_) => return not_yet("a gated delta rule"),
            program::Op::Gate => return not_yet("gates of attention's output"),
            program::Op::Experts(_) => return not_yet("experts"),
            program::Op::Select => Op::Select,
            program::Op::Head(op) if op.factor != 1.0 || op.soft_cap.is_some() => {
                return not_yet("factors and soft caps of logits");
            }
            program::Op::Head(op) => Op::Head(self.norm(&op.norm)?, self.weights.get(op.weight, false, 1)?),
            program::Op::Sample => return Ok(None),
        }))
    }
}

fn not_yet<T>(what: &str) -> Result<T, DeviceError> {
    refuse("compile", format!("the model has {what}, which GPU kernels do not compute yet; serve it with --device cpu"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::recorder::Recorder;

    /// A twin computes any shape: only these refusals keep what kernels do not.
    #[test]
    fn heads_that_no_kernel_takes_are_refused() {
        let driver: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 64 << 20);
        let device = CudaDevice::with_driver(driver, Half::Bf16).unwrap();
        let of = |heads, kv_heads, head_dim| {
            let weight = Weight { id: 0, n: 0, k: 0 };
            let (norm, rope) = (program::Norm { gain: weight, eps: 0.0 }, Rope { id: 0, dim: 8, positions: 1 });
            let (norm, bias, norms) = (Some(norm), None, None);
            let op = program::Qkv { layer: 0, norm, weight, bias, heads, kv_heads, head_dim, norms, rope, gate: false };
            device.resolve(&program::Op::Qkv(op)).map(drop).unwrap_err().to_string()
        };
        for (heads, kv_heads, head_dim, part) in [
            (1, 1, 264, "heads of 264 elements"),
            (1, 1, 12, "multiples of 8 up to 256"),
            (129, 1, 128, "129 query heads of one KV head; GPU kernels take 128"),
            (130, 2, 256, "65 query heads of one KV head; GPU kernels take 64"),
            // What fits ends at the table that is not there.
            (128, 1, 128, "rope table 0"),
            (64, 1, 256, "rope table 0"),
        ] {
            let refused = of(heads, kv_heads, head_dim);
            assert!(refused.contains(part), "{refused}");
        }
    }
}
