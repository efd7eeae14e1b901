//! Copies that the host waits for: of known answers, trials and checks. Steps never wait so.

use super::{Address, Command, Driver, Pinned, Purpose, Stream, end_of};
use crate::device::DeviceError;
use std::sync::Arc;

/// A stream, and page-locked memory through which everything goes.
#[derive(Clone, Debug)]
pub(crate) struct Copies {
    driver: Arc<dyn Driver>,
    pub(crate) stream: Stream,
    host: Arc<dyn Pinned>,
}

impl Copies {
    /// Moves up to `bytes` bytes at once.
    pub(crate) fn new(driver: &Arc<dyn Driver>, purpose: Purpose, bytes: usize) -> Result<Self, DeviceError> {
        Ok(Self { stream: driver.stream(purpose)?, host: driver.pinned(bytes)?, driver: driver.clone() })
    }

    pub(crate) fn enqueue(&self, command: &Command) -> Result<(), DeviceError> {
        self.driver.enqueue(self.stream, command)
    }

    /// Waits for everything enqueued.
    pub(crate) fn end(&self) -> Result<(), DeviceError> {
        end_of(&*self.driver, self.driver.record(self.stream)?)
    }

    /// Enqueues a command, and waits for it.
    pub(crate) fn run(&self, command: &Command) -> Result<(), DeviceError> {
        self.enqueue(command)?;
        self.end()
    }

    /// Stores bytes to device memory.
    pub(crate) fn store(&self, to: Address, data: &[u8]) -> Result<(), DeviceError> {
        let piece = self.host.bytes();
        for (i, data) in data.chunks(piece).enumerate() {
            self.repeat(data, to.plus(i * piece), data.len())?;
        }
        Ok(())
    }

    /// Fills `len` bytes of device memory with repetitions of `data`.
    ///
    /// # Panics
    /// If it has more bytes than are moved at once.
    pub(crate) fn repeat(&self, data: &[u8], to: Address, len: usize) -> Result<(), DeviceError> {
        let data = &data[..data.len().min(len)];
        self.host.store(0, data);
        for done in (0..len).step_by(data.len().max(1)) {
            let (from, bytes) = (self.host.clone(), data.len().min(len - done));
            self.enqueue(&Command::Upload { from, offset: 0, to: to.plus(done), bytes })?;
        }
        self.end()
    }

    /// Loads bytes from device memory.
    pub(crate) fn load(&self, from: Address, len: usize) -> Result<Vec<u8>, DeviceError> {
        let (piece, mut all) = (self.host.bytes(), vec![0; len]);
        for (i, out) in all.chunks_mut(piece).enumerate() {
            let (to, from) = (self.host.clone(), from.plus(i * piece));
            self.run(&Command::Download { from, to, offset: 0, bytes: out.len() })?;
            self.host.load(0, out);
        }
        Ok(all)
    }
}
