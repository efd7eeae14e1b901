//! Page-locked memory of the host.

use super::{Context, Handle, failed};
use crate::cuda::driver::Pinned;
use crate::device::DeviceError;
use cudarc::driver::result;
use std::ffi::c_void;
use std::fmt;
use std::sync::Arc;

/// An allocation of the driver.
pub(super) struct HostMemory {
    context: Arc<Context>,
    at: Handle<*mut c_void>,
    bytes: usize,
}

impl HostMemory {
    /// Allocates in the current context.
    pub(super) fn new(bytes: usize, context: Arc<Context>) -> Result<Self, DeviceError> {
        let bytes = bytes.max(1);
        // SAFETY: the context is current; flags 0 ask for plain page-locked memory.
        let at = unsafe { result::malloc_host(bytes, 0) }.map_err(failed("page-locked memory"))?;
        // SAFETY: the allocation has so many bytes.
        unsafe { std::ptr::write_bytes(at.cast::<u8>(), 0, bytes) };
        Ok(Self { context, at: Handle(at), bytes })
    }

    /// The address of some bytes of `memory`, for a copy.
    pub(super) fn of(memory: &Arc<dyn Pinned>, offset: usize, bytes: usize) -> Result<*mut c_void, DeviceError> {
        let Some(of_driver) = memory.address() else {
            return Err(DeviceError::Failed("page-locked memory of another driver".into()));
        };
        assert!(offset.checked_add(bytes).is_some_and(|end| end <= memory.bytes()), "a copy leaves its buffer");
        Ok(of_driver.wrapping_add(offset).cast())
    }

    fn range(&self, at: usize, len: usize) -> *mut u8 {
        assert!(at.checked_add(len).is_some_and(|end| end <= self.bytes), "{at} + {len} of {} bytes", self.bytes);
        self.at.0.cast::<u8>().wrapping_add(at)
    }
}

impl Pinned for HostMemory {
    fn bytes(&self) -> usize {
        self.bytes
    }

    fn address(&self) -> Option<*mut u8> {
        Some(self.at.0.cast())
    }

    fn store(&self, at: usize, data: &[u8]) {
        // SAFETY: the range is in the allocation. No reference is formed; whoever shares the buffer keeps the host away from bytes in use.
        unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), self.range(at, data.len()), data.len()) };
    }

    fn load(&self, at: usize, out: &mut [u8]) {
        // SAFETY: as above.
        unsafe { std::ptr::copy_nonoverlapping(self.range(at, out.len()), out.as_mut_ptr(), out.len()) };
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // SAFETY: the allocation is freed once. The driver frees it after work that was enqueued with it.
        unsafe {
            if self.context.enter().is_ok() {
                _ = result::free_host(self.at.0);
            }
        }
    }
}

impl fmt::Debug for HostMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostMemory({} bytes)", self.bytes)
    }
}
