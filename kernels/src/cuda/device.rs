//! The device: weights in its memory, and programs made of them.

use super::CudaError;
use super::arguments::bytes_of;
use super::driver::{Address, Buffer, Capability, Command, Driver, Event, Gpu, Pinned, Purpose, Stream, Use, end_of};
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

/// Most threads that fill such a buffer: more would only wait for memory.
const THREADS_MAX: usize = 8;

/// Columns of every matrix, and elements of a head, are whole vectors of so many elements: kernels load 16 bytes at a time.
const VECTOR: usize = 8;

/// Halves are stored as the device reads them.
const LITTLE_ENDIAN: bool = cfg!(target_endian = "little");

/// Most rows of decode attention: the grid of its kernels has no more in one direction.
const SLOTS_MAX: usize = 65_535;

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
    /// Uploads `rows` rows of `row_bytes` bytes each, a buffer at a time. `store` puts a row into a buffer at an offset; it is called by several
    /// threads. Waits for a buffer, not for the uploads.
    fn upload(
        &mut self,
        driver: &Arc<dyn Driver>,
        to: Address,
        rows: usize,
        row_bytes: usize,
        store: impl Fn(usize, &dyn Pinned, usize) + Sync,
    ) -> Result<(), DeviceError> {
        let each = (PIECE / row_bytes).max(1);
        for first in (0..rows).step_by(each) {
            let count = each.min(rows - first);
            let (buffer, uploaded) = &mut self.buffers[self.next % 2];
            self.next += 1;
            if let Some(event) = uploaded.take() {
                end_of(&**driver, event)?;
            }
            let threads = std::thread::available_parallelism().map_or(1, usize::from).min(count).min(THREADS_MAX);
            let share = count.div_ceil(threads);
            std::thread::scope(|scope| {
                for begin in (0..count).step_by(share) {
                    let (buffer, store) = (&**buffer, &store);
                    let rows = begin..(begin + share).min(count);
                    scope.spawn(move || rows.for_each(|row| store(first + row, buffer, row * row_bytes)));
                }
            });
            let (to, bytes) = (to.plus(first * row_bytes), count * row_bytes);
            driver.enqueue(self.stream, &Command::Upload { from: buffer.clone(), offset: 0, to, bytes })?;
            *uploaded = Some(driver.record(self.stream)?);
        }
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
        let rows: usize = spec.parts.iter().map(|part| part.rows).sum();
        let row_bytes = spec.k * bytes;
        if row_bytes > PIECE {
            let message = format!("{}: a row of {} elements; GPU devices take {}", spec.name, spec.k, PIECE / bytes);
            return refuse("load", message);
        }
        let buffer = Buffer::of(Use::Weights, driver, rows * row_bytes, spec.name)?;
        self.loader.lock().upload(driver, buffer.at(), rows, row_bytes, |row, to, at| {
            let (part, row) = stored_row(spec, row);
            match (spec.role, part.format, half) {
                (Role::Vector, ..) => {
                    to.store(at, &bytes_of(&wide(part, row, spec.k)));
                }
                (_, StorageFormat::Bf16, Half::Bf16) | (_, StorageFormat::F16, Half::F16) if LITTLE_ENDIAN => {
                    to.store(at, &part.bytes[row * row_bytes..][..row_bytes]);
                }
                _ => {
                    let halves = wide(part, row, spec.k).into_iter().flat_map(|x| half.from_f32(x).to_ne_bytes());
                    to.store(at, &halves.collect::<Vec<u8>>());
                }
            }
        })?;
        Ok(buffer)
    }
}

/// Where a row of a matrix is stored. Rows of gate and up lie by eights one behind the other, so that one thread of a product has both of a
/// pair.
fn stored_row<'a, 'b>(spec: &'a WeightSpec<'b>, row: usize) -> (&'a StoredRows<'b>, usize) {
    if spec.role == Role::GateUp {
        return (&spec.parts[row / VECTOR % 2], row / (2 * VECTOR) * VECTOR + row % VECTOR);
    }
    let mut first = 0;
    let holds = |part: &&StoredRows<'_>| {
        first += part.rows;
        row < first
    };
    let part = spec.parts.iter().find(holds).unwrap_or_else(|| unreachable!("row {row} of {}", spec.name));
    (part, row - (first - part.rows))
}

fn wide(part: &StoredRows<'_>, row: usize, k: usize) -> Vec<f32> {
    let mut wide = vec![0.0; k];
    part.read(row, &mut wide);
    wide
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
        let in_use = driver.in_use();
        Some(DeviceMemory {
            total: driver.gpu().memory,
            free: driver.memory_free().unwrap_or(0),
            weights: in_use.bytes(Use::Weights),
            pool: in_use.bytes(Use::Pool),
            workspace: in_use.bytes(Use::Workspace),
            beside_pool: CudaPool::BYTES_BESIDE as u64,
        })
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
        if spec.role == Role::GateUp {
            let sizes: Vec<usize> = spec.parts.iter().map(|part| part.rows).collect();
            if !matches!(sizes[..], [gate, up] if gate == up && gate.is_multiple_of(VECTOR)) {
                let message = format!(
                    "{}: gate and up of {sizes:?} rows; GPU kernels take two of the same multiple of {VECTOR}",
                    spec.name
                );
                return refuse("load", message);
            }
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
            let buffer = Buffer::of(Use::Weights, driver, numbers.len() * 4, "a rotary table")?;
            loader.upload(driver, buffer.at(), positions, dim / 2 * 4, |position, to, at| {
                to.store(at, &bytes_of(&numbers[position * dim / 2..][..dim / 2]));
            })?;
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
