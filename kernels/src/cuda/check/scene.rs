//! Inputs of kernels in device memory.

use crate::cuda::arguments::{Argument, bytes_of};
use crate::cuda::driver::{Address, Buffer, Command, Driver, Launch, Pinned, Purpose, Stream, end_of};
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
    pub(super) driver: Arc<dyn Driver>,
    pub(super) stream: Stream,
    pub(super) launcher: Launcher,
    pub(super) random: Random,
    pub(super) half: Half,
    host: Arc<dyn Pinned>,
    /// Whether `host` holds random numbers.
    is_random: bool,
    buffers: Vec<Buffer>,
}

impl Scene {
    pub(super) fn new(driver: &Arc<dyn Driver>, half: Half, seed: u64) -> Result<Self, DeviceError> {
        Ok(Self {
            stream: driver.stream(Purpose::Steps)?,
            launcher: Launcher { half, processors: driver.gpu().processors },
            random: Random(seed),
            half,
            host: driver.pinned(PIECE)?,
            is_random: false,
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
        self.is_random = false;
        for (piece, data) in data.chunks(PIECE).enumerate() {
            self.host.store(0, data);
            let (from, to) = (self.host.clone(), at.plus(piece * PIECE));
            self.driver.enqueue(self.stream, &Command::Upload { from, offset: 0, to, bytes: data.len() })?;
            end_of(&*self.driver, self.driver.record(self.stream)?)?;
        }
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

    /// Between -1 and 1.
    pub(super) fn float(&mut self) -> f32 {
        (self.random.next() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(super) fn random_floats(&mut self, len: usize, scale: f32) -> Result<Address, DeviceError> {
        let all: Vec<f32> = (0..len).map(|_| self.float() * scale).collect();
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
        if !self.is_random {
            let piece = Kind::NearOne.operands(&mut self.random, self.half, PIECE / 2, true);
            self.host.store(0, &piece.into_iter().flat_map(u16::to_ne_bytes).collect::<Vec<u8>>());
            self.is_random = true;
        }
        for done in (0..bytes).step_by(PIECE) {
            let (from, to, bytes) = (self.host.clone(), at.plus(done), PIECE.min(bytes - done));
            self.driver.enqueue(self.stream, &Command::Upload { from, offset: 0, to, bytes })?;
        }
        end_of(&*self.driver, self.driver.record(self.stream)?)?;
        Ok(at)
    }

    pub(super) fn enqueue(&self, command: &Command) -> Result<(), DeviceError> {
        self.driver.enqueue(self.stream, command)
    }

    /// Waits for everything enqueued.
    pub(super) fn end(&self) -> Result<(), DeviceError> {
        end_of(&*self.driver, self.driver.record(self.stream)?)
    }

    pub(super) fn run(&self, launch: Launch) -> Result<(), DeviceError> {
        self.enqueue(&launch.into())?;
        self.end()
    }
}
