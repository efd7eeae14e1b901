//! Why a GPU can't be used.

use super::{Capability, CudaVersion};
use crate::device::DeviceError;

/// Why a GPU can't be used.
#[allow(missing_docs, reason = "the names of fields and variants say it")]
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CudaError {
    /// The machine has no CUDA driver.
    #[error(
        "no CUDA driver: the library libcuda.so.1 is not found. Install the NVIDIA driver (in a container: run it with the NVIDIA runtime), \
         or use --device cpu"
    )]
    NoDriver,
    /// The driver is older than the kernels.
    #[error(
        "{name} has a driver for CUDA {has}, and kernels of this build need {needs}: update the NVIDIA driver to version {driver} or newer, or \
         use --device cpu", driver = super::DRIVER_MIN
    )]
    OldDriver { name: String, has: CudaVersion, needs: CudaVersion },
    /// The driver knows fewer devices.
    #[error("no device cuda:{ordinal}: the driver sees {devices}, numbered from 0")]
    NoDevice { ordinal: u32, devices: u32 },
    /// A call of the driver failed.
    #[error("the CUDA driver refuses {what}: {error}")]
    Driver { what: &'static str, error: String },
    /// No kernels for this architecture.
    #[error(
        "{name} has compute capability {capability}, and this build has kernels for {have}: use another GPU, or --device cpu"
    )]
    NoCubin { name: String, capability: Capability, have: &'static str },
    /// The file of kernels is not what this build expects.
    #[error(
        "{path}: {reason}: take the file that was built with this binary (cargo xtask cubins), and name its folder in engine.cuda_kernels"
    )]
    Pack { path: String, reason: String },
    /// The driver refuses a cubin.
    #[error("the driver refuses the kernels of {source_file}: {error}: it may be older than CUDA 13.0, update it")]
    Module { source_file: String, error: String },
    /// The class is not what this GPU computes.
    #[error("class {class} is not that of a GPU with compute capability {capability}, which computes {computes}")]
    Class { class: String, capability: Capability, computes: &'static str },
    /// Wrong bits.
    #[error("{name} does not give the known answers of {of}: class {class} is refused")]
    KnownAnswers { name: String, of: &'static str, class: &'static str },
    /// Memory, or a command that failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
}
