//! NVIDIA GPUs: programs of a device with its own memory, in a tensor-core class.
//!
//! ```text
//! device (weights, rotary tables) -> executable (slots, steps) -> plan (a step as kernels) -> driver (the GPU, or a recorder in tests)
//! ```
//!
//! A step is uploaded as rows (`batch`) and changes of block tables (`tables`); its kernels have fixed buffers (`buffers`), so that a
//! step of decoded rows alone can be a graph. Nothing of CUDA is loaded before a device is opened.
#![allow(unsafe_code)] // Calls of the CUDA driver: `driver/native` alone.

mod arguments;
mod batch;
mod bound_pool;
mod buffers;
mod device;
mod driver;
mod error;
mod executable;
mod known;
mod launch;
mod pack;
mod plan;
mod pool;
mod products;
#[cfg(any(test, feature = "testing"))]
mod recorded;
mod samplers;
mod sources;
mod staging;
mod tables;

use crate::numerics::Half;
#[cfg(any(test, feature = "testing"))]
pub use arguments::headers;
pub use device::CudaDevice;
pub use driver::{Capability, Gpu, RemoteWrites};
pub use error::CudaError;
#[cfg(any(test, feature = "testing"))]
pub use recorded::{Recording, recorded, recording};
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
    let images = |gpu: &Gpu| {
        let Some(target) = pack::target(gpu.capability) else {
            let (name, capability) = (gpu.name.clone(), gpu.capability);
            return Err(CudaError::NoCubin { name, capability, have: pack::TARGETS.into() });
        };
        let path = config.kernels.join(format!("{target}.cubins"));
        let bytes = std::fs::read(&path)
            .map_err(|error| CudaError::Pack { path: path.display().to_string(), reason: error.to_string() })?;
        pack::parse(&path, &bytes, target, sources::digest())
    };
    let driver = driver::native::NativeDriver::open(config.ordinal, config.half, images)?;
    CudaDevice::with_driver(driver, config.half)
}
