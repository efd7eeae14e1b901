//! The device: weights in its memory, and programs made of them.

use super::CudaError;
use super::driver::{Address, Buffer, Capability, Command, Driver, Event, Gpu, Pinned, Purpose, Stream, end_of};
use super::executable::CudaExecutable;
use super::known;
use super::launch::group_max;
use super::plan::{Attention, Matrix, Norm, Op, Qkv};
use super::pool::CudaPool;
use crate::device::{
    Bounds, Device, DeviceError, DeviceInfo, DeviceMemory, Executable, Role, Rope, RopeTable, StoredRows, Weight,
    WeightSpec,
};
use crate::numerics::{Half, KERNEL_REVISION, Numerics, TensorCore};
use crate::program::check::{self, Sizes};
use crate::program::{self, Program};
use crate::storage::StorageFormat;
use baton_memory::PoolMemory;
use baton_types::{KvPoolMap, MemoryKind};
use parking_lot::{Mutex, RwLock};
use std::f32::consts::LOG2_E;
use std::sync::Arc;

/// Bytes of one of the two buffers through which weights are uploaded.
const PIECE: usize = 16 << 20;

/// Columns of every matrix, and elements of a head, are whole vectors of so many elements: kernels load 16 bytes at a time.
const VECTOR: usize = 8;

/// Largest head that there is a kernel for.
const HEAD_DIM_MAX: usize = 256;

/// The class of a GPU's tensor cores; `None` if nobody has measured or described them.
pub(super) fn cores_of(capability: Capability) -> Option<TensorCore> {
    match capability {
        Capability { major: 9, minor: 0 } => Some(TensorCore::Tc16F25),
        Capability { major: 8, .. } => Some(TensorCore::Tc8F24),
        // Blackwell: its bits are not measured yet. Known answers decide.
        Capability { major: 10 | 12, .. } => Some(TensorCore::Tc16F25),
        _ => None,
    }
}

/// What executables share with their device.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) cores: TensorCore,
    pub(super) half: Half,
    /// Programs have their addresses: both live as long as any of them.
    weights: RwLock<Vec<Loaded>>,
    ropes: RwLock<Vec<LoadedRope>>,
}

/// A GPU as a [`Device`].
#[derive(Debug)]
pub struct CudaDevice {
    shared: Arc<Shared>,
    loader: Mutex<Loader>,
}

#[derive(Debug)]
struct Loaded {
    buffer: Buffer,
    n: usize,
    k: usize,
    is_vector: bool,
    parts: usize,
}

#[derive(Debug)]
struct LoadedRope {
    cos: Buffer,
    sin: Buffer,
}

/// Two buffers of page-locked memory: one is filled while the other is uploaded.
#[derive(Debug)]
struct Loader {
    stream: Stream,
    buffers: [(Arc<dyn Pinned>, Option<Event>); 2],
    next: usize,
}

impl Loader {
    /// Uploads what `fill` writes to a buffer of `bytes` bytes. Waits for the buffer, not for the upload.
    fn upload(
        &mut self,
        driver: &Arc<dyn Driver>,
        to: Address,
        bytes: usize,
        fill: impl FnOnce(&mut [u8]),
    ) -> Result<(), DeviceError> {
        let (buffer, uploaded) = &mut self.buffers[self.next % 2];
        self.next += 1;
        if let Some(event) = uploaded.take() {
            end_of(&**driver, event)?;
        }
        let mut data = vec![0; bytes];
        fill(&mut data);
        buffer.store(0, &data);
        driver.enqueue(self.stream, &Command::Upload { from: buffer.clone(), offset: 0, to, bytes })?;
        *uploaded = Some(driver.record(self.stream)?);
        Ok(())
    }

    /// Waits until everything is there.
    fn end(&mut self, driver: &Arc<dyn Driver>) -> Result<(), DeviceError> {
        for (_, uploaded) in &mut self.buffers {
            if let Some(event) = uploaded.take() {
                end_of(&**driver, event)?;
            }
        }
        Ok(())
    }
}

impl CudaDevice {
    /// A device over a driver, in the class of its tensor cores.
    pub(super) fn with_driver(driver: Arc<dyn Driver>, half: Half) -> Result<Arc<Self>, CudaError> {
        let Gpu { name, capability, .. } = driver.gpu().clone();
        let Some(cores) = cores_of(capability) else {
            return Err(CudaError::NoCubin { name, capability, have: super::pack::TARGETS.into() });
        };
        known::check(&driver, cores, half)?;
        let pinned = || Ok::<_, DeviceError>((driver.pinned(PIECE)?, None));
        let loader =
            Mutex::new(Loader { stream: driver.stream(Purpose::Copies)?, buffers: [pinned()?, pinned()?], next: 0 });
        let (weights, ropes) = (RwLock::default(), RwLock::default());
        Ok(Arc::new(Self { shared: Arc::new(Shared { driver, cores, half, weights, ropes }), loader }))
    }

    /// Rows of a matrix as T, or a vector as f32.
    fn rows(&self, spec: &WeightSpec<'_>, bytes: usize) -> Result<Buffer, DeviceError> {
        let (driver, half) = (&self.shared.driver, self.shared.half);
        let is_vector = spec.role == Role::Vector;
        let n: usize = spec.parts.iter().map(|part| part.rows).sum();
        let row_bytes = spec.k * bytes;
        let buffer = Buffer::new(driver, n * row_bytes, spec.name)?;
        let mut at = 0;
        let mut loader = self.loader.lock();
        for part in spec.parts {
            let each = (PIECE / row_bytes).max(1);
            for first in (0..part.rows).step_by(each) {
                let rows = first..(first + each).min(part.rows);
                let len = rows.len() * row_bytes;
                if len > PIECE {
                    let message = format!("{}: a row of {} elements", spec.name, spec.k);
                    return Err(DeviceError::Shape { op: "load", message });
                }
                loader.upload(driver, buffer.at().plus(at), len, |out| {
                    if is_vector {
                        expand(part, spec.k, rows.clone(), out, |x, to| to.copy_from_slice(&x.to_ne_bytes()), 4);
                    } else {
                        halves(half, part, spec.k, rows.clone(), out);
                    }
                })?;
                at += len;
            }
        }
        Ok(buffer)
    }
}

/// Rows of a part as T: as they are, if they are stored so.
fn halves(half: Half, part: &StoredRows<'_>, k: usize, rows: std::ops::Range<usize>, out: &mut [u8]) {
    let stored = matches!((part.format, half), (StorageFormat::Bf16, Half::Bf16) | (StorageFormat::F16, Half::F16));
    if stored && cfg!(target_endian = "little") {
        return out.copy_from_slice(&part.bytes[rows.start * k * 2..rows.end * k * 2]);
    }
    expand(part, k, rows, out, |x, to| to.copy_from_slice(&half.from_f32(x).to_ne_bytes()), 2);
}

/// Rows, element by element, on every core.
fn expand(
    part: &StoredRows<'_>,
    k: usize,
    rows: std::ops::Range<usize>,
    out: &mut [u8],
    store: impl Fn(f32, &mut [u8]) + Sync,
    bytes: usize,
) {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(rows.len()).max(1);
    let share = rows.len().div_ceil(threads);
    std::thread::scope(|scope| {
        for (i, out) in out.chunks_mut(share * k * bytes).enumerate() {
            let (first, store) = (rows.start + i * share, &store);
            scope.spawn(move || {
                let mut wide = vec![0.0; k];
                for (row, out) in (first..).zip(out.chunks_exact_mut(k * bytes)) {
                    part.read(row, &mut wide);
                    wide.iter().zip(out.chunks_exact_mut(bytes)).for_each(|(x, to)| store(*x, to));
                }
            });
        }
    });
}

fn refuse<T>(op: &'static str, message: String) -> Result<T, DeviceError> {
    Err(DeviceError::Shape { op, message })
}

impl Device for CudaDevice {
    fn info(&self) -> DeviceInfo {
        let Shared { driver, cores, half, .. } = &*self.shared;
        let Gpu { name, ordinal, capability, .. } = driver.gpu();
        DeviceInfo {
            name: format!("cuda:{ordinal} {name} (sm_{}{})", capability.major, capability.minor),
            numerics: Numerics::TensorCore { cores: *cores, half: *half },
            kernel_revision: KERNEL_REVISION,
            memory: MemoryKind::Cuda(*ordinal),
            asynchronous: true,
        }
    }

    fn memory(&self) -> Option<DeviceMemory> {
        let driver = &self.shared.driver;
        let free = driver.memory_free().unwrap_or(0).saturating_sub(CudaPool::BYTES_BESIDE as u64);
        Some(DeviceMemory { total: driver.gpu().memory, free })
    }

    fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
        spec.parts.iter().try_for_each(|part| part.check(spec.name, spec.k))?;
        let n = spec.parts.iter().map(|part| part.rows).sum();
        let is_vector = spec.role == Role::Vector;
        if n == 0 {
            return refuse("load", format!("{}: no rows", spec.name));
        }
        if is_vector && n != 1 {
            return refuse("load", format!("{}: a vector of {n} rows", spec.name));
        }
        if !is_vector && !spec.k.is_multiple_of(VECTOR) {
            let message = format!("{}: rows of {} elements; GPU kernels take multiples of {VECTOR}", spec.name, spec.k);
            return refuse("load", message);
        }
        let buffer = self.rows(spec, if is_vector { 4 } else { 2 })?;
        let mut weights = self.shared.weights.write();
        weights.push(Loaded { buffer, n, k: spec.k, is_vector, parts: spec.parts.len() });
        Ok(Weight { id: weights.len() as u32 - 1, n, k: spec.k })
    }

    fn load_rope(&self, table: RopeTable) -> Result<Rope, DeviceError> {
        check::rope_table(&table)?;
        let (dim, positions) = (table.dim, table.cos.len() / (table.dim / 2));
        let driver = &self.shared.driver;
        let mut loader = self.loader.lock();
        let mut load = |numbers: &[f32]| {
            let buffer = Buffer::new(driver, numbers.len() * 4, "a rotary table")?;
            for (piece, numbers) in numbers.chunks(PIECE / 4).enumerate() {
                loader.upload(driver, buffer.at().plus(piece * PIECE), numbers.len() * 4, |out| {
                    out.chunks_exact_mut(4).zip(numbers).for_each(|(to, x)| to.copy_from_slice(&x.to_ne_bytes()));
                })?;
            }
            Ok::<_, DeviceError>(buffer)
        };
        let loaded = LoadedRope { cos: load(&table.cos)?, sin: load(&table.sin)? };
        let mut ropes = self.shared.ropes.write();
        ropes.push(loaded);
        Ok(Rope { id: ropes.len() as u32 - 1, dim, positions })
    }

    fn alloc_pool(&self, map: &KvPoolMap) -> Result<Arc<dyn PoolMemory>, DeviceError> {
        Ok(CudaPool::new(&self.shared.driver, map.bytes())?)
    }

    fn compile(&self, program: Program, bounds: Bounds) -> Result<Box<dyn Executable>, DeviceError> {
        let sizes = program.check(&bounds)?;
        if bounds.adapters.slots_max > 0 {
            return refuse("compile", "adapters: GPU devices have none yet".into());
        }
        self.check_sizes(&sizes)?;
        let mut ops = Vec::new();
        for op in &program.ops {
            if let Some(op) = self.resolve(op)? {
                ops.push(op);
            }
        }
        // Weights are complete: a program names them.
        self.loader.lock().end(&self.shared.driver)?;
        Ok(Box::new(CudaExecutable::try_new(self.shared.clone(), program, ops, sizes, bounds)?))
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

    fn weight(&self, weight: Weight, is_vector: bool, parts: usize) -> Result<Matrix, DeviceError> {
        match self.shared.weights.read().get(weight.id as usize) {
            Some(loaded) if loaded.is_vector == is_vector && loaded.parts == parts => {
                Ok(Matrix { at: loaded.buffer.at(), n: loaded.n, k: loaded.k })
            }
            _ => {
                let kind = if is_vector { "vector".to_owned() } else { format!("matrix of {parts} parts") };
                refuse("compile", format!("weight {} is of another device, or no {kind}", weight.id))
            }
        }
    }

    fn norm(&self, norm: &program::Norm) -> Result<Norm, DeviceError> {
        Ok(Norm { gain: self.weight(norm.gain, true, 1)?.at, eps: norm.eps })
    }

    fn projection(&self, op: &program::Project) -> Result<Matrix, DeviceError> {
        match op.partitions {
            1 => self.weight(op.weight, false, 1),
            partitions => refuse("compile", format!("{partitions} partitions of K: tensor-core classes have one")),
        }
    }

    /// An operation with its weights; `None` for what samples, which every program ends with.
    fn resolve(&self, op: &program::Op) -> Result<Option<Op>, DeviceError> {
        Ok(Some(match op {
            program::Op::Embed(table) => Op::Embed(self.weight(*table, false, 1)?),
            program::Op::Qkv(op) => {
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
                let ropes = self.shared.ropes.read();
                let Some(rope) = ropes.get(op.rope.id as usize) else {
                    return refuse("compile", format!("rope table {} is of another device", op.rope.id));
                };
                Op::Qkv(Qkv {
                    layer: op.layer,
                    norm: self.norm(&op.norm)?,
                    weight: self.weight(op.weight, false, 3)?,
                    bias: op.bias.map(|bias| Ok::<_, DeviceError>(self.weight(bias, true, 1)?.at)).transpose()?,
                    heads: op.heads,
                    kv_heads: op.kv_heads,
                    head_dim: op.head_dim,
                    head_norms: match &op.head_norms {
                        Some(norms) => Some([self.norm(&norms.query)?, self.norm(&norms.key)?]),
                        None => None,
                    },
                    cos: rope.cos.at(),
                    sin: rope.sin.at(),
                    rope_dim: op.rope.dim,
                })
            }
            program::Op::Attend(op) => {
                let factor = op.scale * LOG2_E;
                if !(factor > 0.0 && factor.is_finite()) {
                    return refuse("compile", format!("scores are multiplied by {}", op.scale));
                }
                Op::Attend(Attention { layer: op.layer, factor, window: op.window.unwrap_or(0) })
            }
            program::Op::Out(op) => Op::Out(self.projection(op)?),
            program::Op::GateUp(op) => Op::GateUp(self.norm(&op.norm)?, self.weight(op.weight, false, 2)?),
            program::Op::Down(op) => Op::Down(self.projection(op)?),
            program::Op::Select => Op::Select,
            program::Op::Head(op) => Op::Head(self.norm(&op.norm)?, self.weight(op.weight, false, 1)?),
            program::Op::Sample => return Ok(None),
        }))
    }
}
