//! Inputs of kernels in device memory.

use crate::cuda::arguments::{Argument, bytes_of};
use crate::cuda::driver::{Address, Buffer, Command, Copies, Driver, Launch, Purpose};
use crate::cuda::launch::Launcher;
use crate::device::DeviceError;
use crate::numerics::Half;
use crate::numerics::tensor_core::inputs::Kind;
use crate::random::Random;
use std::sync::Arc;

/// Bytes that are uploaded at once.
const PIECE: usize = 16 << 20;

/// A driver with a stream, and memory that lives until the next [`Scene::clear`].
pub(super) struct Scene {
    driver: Arc<dyn Driver>,
    copies: Copies,
    pub(super) launcher: Launcher,
    pub(super) random: Random,
    pub(super) half: Half,
    /// What [`Scene::filled`] repeats, once it was asked for.
    noise: Vec<u8>,
    buffers: Vec<Buffer>,
}

impl Scene {
    pub(super) fn new(driver: &Arc<dyn Driver>, half: Half, seed: u64) -> Result<Self, DeviceError> {
        Ok(Self {
            copies: Copies::new(driver, Purpose::Steps, PIECE)?,
            launcher: Launcher { half, processors: driver.gpu().processors },
            random: Random(seed),
            half,
            noise: Vec::new(),
            buffers: Vec::new(),
            driver: driver.clone(),
        })
    }

    /// Frees what was made.
    pub(super) fn clear(&mut self) {
        self.buffers.clear();
    }

    /// Memory that holds nothing.
    pub(super) fn empty(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        let buffer = Buffer::new(&self.driver, bytes, "a check")?;
        let at = buffer.at();
        self.buffers.push(buffer);
        Ok(at)
    }

    pub(super) fn bytes(&mut self, data: &[u8]) -> Result<Address, DeviceError> {
        let at = self.empty(data.len())?;
        self.copies.store(at, data)?;
        Ok(at)
    }

    pub(super) fn structs<T: Argument>(&mut self, all: &[T]) -> Result<Address, DeviceError> {
        self.bytes(&bytes_of(all))
    }

    pub(super) fn ints(&mut self, all: &[i32]) -> Result<Address, DeviceError> {
        self.structs(all)
    }

    pub(super) fn floats(&mut self, all: &[f32]) -> Result<Address, DeviceError> {
        self.structs(all)
    }

    pub(super) fn random_floats(&mut self, len: usize, scale: f32) -> Result<Address, DeviceError> {
        let all = self.random.floats(len, scale);
        self.floats(&all)
    }

    /// Numbers of 16 bits.
    pub(super) fn halves(&mut self, kind: Kind, len: usize, left: bool) -> Result<Address, DeviceError> {
        let all = kind.operands(&mut self.random, self.half, len, left);
        self.bytes(&all.into_iter().flat_map(u16::to_ne_bytes).collect::<Vec<u8>>())
    }

    /// As many bytes, the same random ones again and again: what a benchmark reads.
    pub(super) fn filled(&mut self, bytes: usize) -> Result<Address, DeviceError> {
        let at = self.empty(bytes)?;
        if self.noise.is_empty() {
            let piece = Kind::NearOne.operands(&mut self.random, self.half, PIECE / 2, true);
            self.noise = piece.into_iter().flat_map(u16::to_ne_bytes).collect();
        }
        self.copies.repeat(&self.noise, at, bytes)?;
        Ok(at)
    }

    pub(super) fn enqueue(&self, command: &Command) -> Result<(), DeviceError> {
        self.copies.enqueue(command)
    }

    /// Waits for everything enqueued.
    pub(super) fn end(&self) -> Result<(), DeviceError> {
        self.copies.end()
    }

    pub(super) fn run(&self, launch: Launch) -> Result<(), DeviceError> {
        self.copies.run(&launch.into())
    }
}
