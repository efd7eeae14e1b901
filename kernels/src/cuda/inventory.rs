//! What a host has for GPUs, for tools that prepare a host: its driver's GPUs, and files of kernels.

use super::driver::native::{inventory as native, library};
use super::gpu::TARGETS;
use super::{CudaError, Gpu, pack};
use crate::numerics::TensorCore;
use std::path::{Path, PathBuf};

/// The GPUs of a driver, in its order, and what helps to compute on them.
#[derive(Clone, Debug)]
pub struct Host {
    /// One for each that this process may use.
    pub gpus: Vec<HostGpu>,
    /// Version of cuBLASLt, if it is on the library path: workers take it for long prompts.
    pub cublas_lt: Option<usize>,
}

/// A GPU, and what this build can do with it.
#[derive(Clone, Debug)]
pub struct HostGpu {
    /// What it is.
    pub gpu: Gpu,
    /// Address on the PCI bus, such as `0000:3b:00.0`; empty if it has none.
    pub pci: String,
    /// Whether the driver lets other devices of the bus read and write its memory.
    pub gpu_direct: bool,
    /// Whether the driver gives its memory out as DMA buffers.
    pub dma_buf: bool,
    /// Arithmetic of its tensor cores; `None` if nobody has measured or described it.
    pub cores: Option<TensorCore>,
    /// Whether the folder has kernels for it that its driver loads.
    pub kernels: Result<(), CudaError>,
}

/// Asks the CUDA driver, which this loads. No memory of a GPU is taken. `kernels` is the folder of files of kernels.
///
/// # Errors
/// If there is no driver, or it does not start.
pub fn host(kernels: &Path) -> Result<Host, CudaError> {
    let one = |ordinal| {
        let (device, gpu) = native::gpu(ordinal)?;
        let native::Bus { address: pci, gpu_direct, dma_buf } = native::bus(device)?;
        Ok(HostGpu::new(gpu, pci, gpu_direct, dma_buf, kernels))
    };
    let gpus = (0..native::count()?).map(one).collect::<Result<_, CudaError>>()?;
    Ok(Host { gpus, cublas_lt: library::version() })
}

impl HostGpu {
    /// A GPU of which the driver says this.
    pub fn new(gpu: Gpu, pci: String, gpu_direct: bool, dma_buf: bool, kernels: &Path) -> Self {
        let (cores, kernels) = (gpu.target().ok().map(|target| target.cores), pack::find(kernels, &gpu).map(|_| ()));
        Self { gpu, pci, gpu_direct, dma_buf, cores, kernels }
    }
}

/// A file of kernels.
#[derive(Clone, Debug)]
pub struct KernelsFile {
    /// Such as `sm_90a`.
    pub target: &'static str,
    /// Where it is, or should be.
    pub path: PathBuf,
    /// Whether it is there, whole, and of this build.
    pub is_of_this_build: Result<(), CudaError>,
}

/// The files of kernels of a folder, one for each target. Loads nothing of CUDA.
pub fn kernels(folder: &Path) -> [KernelsFile; TARGETS.len()] {
    TARGETS.map(|target| KernelsFile {
        target: target.name,
        path: pack::path(folder, target.name),
        is_of_this_build: pack::read(folder, target.name).map(|_| ()),
    })
}
