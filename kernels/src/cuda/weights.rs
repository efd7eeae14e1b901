//! Weights and rotary tables in device memory.

use super::arguments::{Address, bytes_of};
use super::driver::{Buffer, Command, Driver, Event, Pinned, Purpose, Stream, Use, end_of};
use super::ops::Matrix;
use crate::device::{DeviceError, Role, Rope, RopeTable, StoredRows, Weight, WeightSpec};
use crate::numerics::Half;
use crate::program::check;
use crate::storage::StorageFormat;
use parking_lot::{Mutex, RwLock};
use std::sync::Arc;

/// Columns of every matrix, and elements of a head, are whole vectors of so many elements: kernels load 16 bytes at a time.
pub(super) const VECTOR: usize = 8;

/// Bytes of one of the two buffers through which weights are uploaded.
const PIECE: usize = 16 << 20;

/// Most threads that fill such a buffer: more would only wait for memory.
const THREADS_MAX: usize = 8;

/// Halves are stored as the device reads them.
const LITTLE_ENDIAN: bool = cfg!(target_endian = "little");

/// What a device has loaded. Programs have its addresses: it lives as long as any of them.
#[derive(Debug)]
pub(super) struct Weights {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) half: Half,
    loader: Mutex<Loader>,
    matrices: RwLock<Vec<Loaded>>,
    ropes: RwLock<Vec<LoadedRope>>,
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

impl Weights {
    pub(super) fn new(driver: &Arc<dyn Driver>, half: Half) -> Result<Self, DeviceError> {
        let loader = Mutex::new(Loader::new(driver)?);
        Ok(Self { driver: driver.clone(), half, loader, matrices: RwLock::default(), ropes: RwLock::default() })
    }

    /// Puts a matrix, or a vector, into device memory.
    pub(super) fn load(&self, spec: &WeightSpec<'_>) -> Result<Weight, DeviceError> {
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
        let mut matrices = self.matrices.write();
        matrices.push(Loaded { buffer, n, k: spec.k, is_vector, parts: spec.parts.len() });
        Ok(Weight { id: matrices.len() as u32 - 1, n, k: spec.k })
    }

    /// Puts a rotary table into device memory.
    pub(super) fn load_rope(&self, table: &RopeTable) -> Result<Rope, DeviceError> {
        check::rope_table(table)?;
        let (dim, positions) = (table.dim, table.cos.len() / (table.dim / 2));
        let driver = &self.driver;
        let mut loader = self.loader.lock();
        let mut load = |numbers: &[f32]| {
            let buffer = Buffer::of(Use::Weights, driver, numbers.len() * 4, "a rotary table")?;
            loader.upload(driver, buffer.at(), positions, dim / 2 * 4, |position, to, at| {
                to.store(at, &bytes_of(&numbers[position * dim / 2..][..dim / 2]));
            })?;
            Ok::<_, DeviceError>(buffer)
        };
        let loaded = LoadedRope { cos: load(&table.cos)?, sin: load(&table.sin)? };
        let mut ropes = self.ropes.write();
        ropes.push(loaded);
        Ok(Rope { id: ropes.len() as u32 - 1, dim, positions })
    }

    /// Waits until all that was loaded is there.
    pub(super) fn complete(&self) -> Result<(), DeviceError> {
        self.loader.lock().end(&self.driver)
    }

    /// Where a weight is.
    pub(super) fn get(&self, weight: Weight, is_vector: bool, parts: usize) -> Result<Matrix, DeviceError> {
        match self.matrices.read().get(weight.id as usize) {
            Some(loaded) if loaded.is_vector == is_vector && loaded.parts == parts => {
                Ok(Matrix { at: loaded.buffer.at(), n: loaded.n, k: loaded.k })
            }
            _ => {
                let kind = if is_vector { "vector".to_owned() } else { format!("matrix of {parts} parts") };
                refuse("compile", format!("weight {} is of another device, or no {kind}", weight.id))
            }
        }
    }

    /// Where the cosines and sines of a rotary table are.
    pub(super) fn rope(&self, rope: Rope) -> Result<(Address, Address), DeviceError> {
        match self.ropes.read().get(rope.id as usize) {
            Some(loaded) => Ok((loaded.cos.at(), loaded.sin.at())),
            None => refuse("compile", format!("rope table {} is of another device", rope.id)),
        }
    }

    /// Rows of a matrix as T, or a vector as f32.
    fn rows(&self, spec: &WeightSpec<'_>, bytes: usize) -> Result<Buffer, DeviceError> {
        let (driver, half) = (&self.driver, self.half);
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

fn refuse<T>(op: &'static str, message: String) -> Result<T, DeviceError> {
    Err(DeviceError::Shape { op, message })
}

/// Two buffers of page-locked memory: one is filled while the other is uploaded.
#[derive(Debug)]
struct Loader {
    stream: Stream,
    buffers: [(Arc<dyn Pinned>, Option<Event>); 2],
    next: usize,
}

impl Loader {
    fn new(driver: &Arc<dyn Driver>) -> Result<Self, DeviceError> {
        let pinned = || Ok::<_, DeviceError>((driver.pinned(PIECE)?, None));
        Ok(Self { stream: driver.stream(Purpose::Copies)?, buffers: [pinned()?, pinned()?], next: 0 })
    }

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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::Copies;
    use crate::cuda::driver::recorder::Recorder;
    use crate::numerics::TensorCore;

    /// Of more rows than one of the loader's buffers holds.
    #[test]
    fn a_matrix_of_several_pieces_is_loaded_whole() {
        let driver: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 128 << 20);
        let weights = Weights::new(&driver, Half::Bf16).unwrap();
        let (k, rows) = (1 << 14, PIECE / (2 << 14) + 3);
        let bytes: Vec<u8> = (0..rows * k).flat_map(|i| ((i / k * 31) as u16 ^ i as u16).to_le_bytes()).collect();
        let parts = [StoredRows { rows, format: StorageFormat::Bf16, bytes: &bytes }];
        let weight = weights.load(&WeightSpec { name: "w", role: Role::Out, k, parts: &parts }).unwrap();
        weights.complete().unwrap();
        let at = weights.get(weight, false, 1).unwrap().at;
        let loaded = Copies::new(&driver, Purpose::Copies, PIECE).unwrap().load(at, bytes.len()).unwrap();
        assert!(loaded == bytes);
    }
}
