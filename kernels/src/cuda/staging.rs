//! Page-locked memory for what one step uploads, reused when the step is done.

use super::driver::{Address, Command, Driver, Pinned, Stream};
use crate::device::DeviceError;
use std::sync::Arc;

/// First size: rows and changes of a usual step.
const BYTES: usize = 256 << 10;

/// Boundary of each upload.
const ALIGNED: usize = 16;

/// A buffer that is filled from its beginning.
#[derive(Debug)]
pub(super) struct Staging {
    driver: Arc<dyn Driver>,
    buffer: Arc<dyn Pinned>,
    used: usize,
    /// Buffers that were too small, and that commands may still read.
    outgrown: Vec<Arc<dyn Pinned>>,
}

impl Staging {
    pub(super) fn new(driver: &Arc<dyn Driver>) -> Result<Self, DeviceError> {
        Ok(Self { driver: driver.clone(), buffer: driver.pinned(BYTES)?, used: 0, outgrown: Vec::new() })
    }

    /// Begins anew: every command that reads it has ended.
    pub(super) fn reset(&mut self) {
        self.used = 0;
        self.outgrown.clear();
    }

    /// Copies `data` and enqueues its upload.
    pub(super) fn upload(&mut self, stream: Stream, data: &[u8], to: Address) -> Result<(), DeviceError> {
        if data.is_empty() {
            return Ok(());
        }
        if data.len() > self.buffer.bytes() - self.used {
            let larger = self.driver.pinned((2 * self.buffer.bytes()).max(data.len().next_power_of_two()))?;
            self.outgrown.push(std::mem::replace(&mut self.buffer, larger));
            self.used = 0;
        }
        self.buffer.store(self.used, data);
        let from = self.buffer.clone();
        let command = Command::Upload { from, offset: self.used, to, bytes: data.len() };
        self.used = (self.used + data.len()).next_multiple_of(ALIGNED).min(self.buffer.bytes());
        self.driver.enqueue(stream, &command)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cuda::driver::recorder::Recorder;
    use crate::cuda::driver::{Purpose, end_of};
    use crate::numerics::{Half, TensorCore};

    /// Page-locked memory takes a call that waits, and is scarce.
    #[test]
    fn steps_of_usual_size_take_no_more_memory_however_many_they_are() {
        let driver: Arc<dyn Driver> = Recorder::new(TensorCore::Tc16F25, Half::Bf16, 1 << 20);
        let (stream, to) = (driver.stream(Purpose::Steps).unwrap(), driver.alloc(2400, "rows").unwrap());
        let mut staging = Staging::new(&driver).unwrap();
        for _ in 0..2 * BYTES / 2400 {
            staging.reset();
            staging.upload(stream, &[7; 2400], to).unwrap();
            end_of(&*driver, driver.record(stream).unwrap()).unwrap();
        }
        assert_eq!((staging.buffer.bytes(), staging.outgrown.len()), (BYTES, 0));
    }
}
