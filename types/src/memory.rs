//! Pool memory as the engine and the kernels see it.

use serde::{Deserialize, Serialize};
use std::fmt;

/// Whose memory it is: the CPU's or a device's.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum MemoryKind {
    /// Memory of the CPU.
    Host,
    /// Memory of the CUDA device with this ordinal.
    Cuda(u32),
}

impl fmt::Display for MemoryKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Host => f.write_str("host"),
            Self::Cuda(n) => write!(f, "cuda({n})"),
        }
    }
}

/// One contiguous region that holds KV blocks.
///
/// A NIC or another process may write under a grant at any time, so no code may form `&mut [u8]` over it. Kernels use raw pointers. All
/// other code uses the copying [`PoolMemory::read`] and [`PoolMemory::write`].
///
/// # Safety
/// `base()` is valid for reads and writes of `bytes()` bytes, aligned to 64, and stays so for the life of the value.
#[allow(unsafe_code)] // Declares the contract only; the implementations are inside the `unsafe` fences.
pub unsafe trait PoolMemory: Send + Sync + fmt::Debug {
    /// Where the region lives. Only for `Host` are `read` and `write` cheap.
    fn kind(&self) -> MemoryKind;
    /// Size of the region in bytes.
    fn bytes(&self) -> usize;
    /// Address of the first byte: a device address if the memory is on a device.
    fn base(&self) -> *mut u8;
    /// Copies `out.len()` bytes out, starting at `offset`.
    ///
    /// # Panics
    /// If the range is outside the region: offsets come from a checked layout, so that is a bug.
    fn read(&self, offset: usize, out: &mut [u8]);
    /// Copies `data` in, starting at `offset`. Panics like [`PoolMemory::read`].
    fn write(&self, offset: usize, data: &[u8]);
}
