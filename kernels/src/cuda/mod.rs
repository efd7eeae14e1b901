//! NVIDIA GPUs: programs of a device with its own memory, in a tensor-core class.
//!
//! ```text
//! device -> executable (slots, steps) -> plan (a step as kernels) -> driver (the GPU, or a recorder in tests)
//!    \-----> weights (in device memory) <- ops (a program with their addresses)
//! ```
//!
//! A step is uploaded as rows (`batch`) and changes of block tables (`tables`); its kernels have fixed buffers (`buffers`), so that a
//! step of decoded rows alone can be a graph. Nothing of CUDA is loaded before a device is opened.

mod arguments;
mod batch;
mod bound_pool;
mod buffers;
#[cfg(any(test, feature = "testing"))]
pub mod check;
mod device;
mod driver;
mod error;
mod executable;
mod gpu;
#[cfg(any(test, feature = "testing"))]
mod headers;
mod inventory;
mod known;
mod launch;
mod ops;
mod pack;
mod plan;
mod pool;
mod products;
#[cfg(any(test, feature = "testing"))]
mod recorded;
mod remote_writes;
mod samplers;
mod sources;
mod staging;
mod tables;
mod weights;

use crate::numerics::Half;
pub use device::CudaDevice;
use driver::Driver;
pub use error::CudaError;
pub use gpu::{Capability, CudaVersion, DRIVER_MIN, Gpu};
#[cfg(any(test, feature = "testing"))]
pub use headers::headers;
pub use inventory::{Host, HostGpu, KernelsFile, host, kernels};
#[cfg(any(test, feature = "testing"))]
pub use recorded::{Recording, open_recorded, recorded, recording};
pub use remote_writes::RemoteWrites;
use std::path::PathBuf;
use std::sync::Arc;

/// A GPU to open.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CudaConfig {
    /// Number of the device, as the CUDA driver counts them.
    pub ordinal: u32,
    /// Format of matrices, of their inputs and of KV.
    pub half: Half,
    /// Where the files of kernels are, one for each target: `sm_90a.cubins` and so on.
    pub kernels: PathBuf,
}

/// Opens a GPU: the first use of the CUDA driver in a process.
///
/// # Errors
/// If there is no driver, no such device, no file of kernels for it, or one of another build.
pub fn open(config: &CudaConfig) -> Result<Arc<CudaDevice>, CudaError> {
    open_with(config, |images| Ok(driver::native::NativeDriver::open(config.ordinal, config.half, images)?))
}

/// Opens what `driver` opens, which is given what finds the kernels for a GPU.
fn open_with(
    config: &CudaConfig,
    driver: impl FnOnce(&dyn Fn(&Gpu) -> Result<Vec<pack::Image>, CudaError>) -> Result<Arc<dyn Driver>, CudaError>,
) -> Result<Arc<CudaDevice>, CudaError> {
    let driver = driver(&|gpu| pack::find(&config.kernels, gpu))?;
    CudaDevice::with_driver(driver, config.half)
}
