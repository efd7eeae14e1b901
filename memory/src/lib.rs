//! Pool memory: the memory that holds KV blocks, on the host or on a device.
//!
//! Layer: above `types`, below `kernels` and `kv-transfer`. A device allocates a pool and its kernels compute on it; a transfer moves bytes
//! in and out. Neither this crate nor a transfer knows models, block pools or networks.
//!
//! * [`PoolMemory`]: asynchronous operations over owned buffers. It has no address but one for NICs: nobody who holds only the trait can
//!   assume that the host may read the memory.
//! * [`Pending`]: an operation that runs, and its result. [`NoRoom`]: a device that has no room for one gives the buffer back.
//! * [`HostPool`]: memory of the host. Only this type has an address that the host may follow, for kernels of the CPU and for sockets.
//! * [`RemotePool`]: stands in for the memory of a device that the host cannot address. It finds code that assumes otherwise.
//! * [`checksum`]: the checksum of a pool's bytes, which every kind of memory computes alike.
//!
//! [`host`] is an `unsafe` fence; everything else is safe code.

pub mod checksum;
mod error;
pub mod host;
mod pending;
mod pool;
mod remote;
mod rows;

pub use error::{MemoryError, NoRoom, PoolError};
pub use host::{HostPool, HugePages};
pub use pending::{Completer, Pending};
pub use pool::PoolMemory;
pub use remote::{RemoteConfig, RemotePool};
pub use rows::Rows;
