//! What the CUDA driver says of its GPUs, without a context on any of them.

use crate::cuda::CudaError;
use crate::cuda::{Capability, CudaVersion, Gpu, RemoteWrites};
use cudarc::driver::{DriverError, result, sys};
use std::ffi::CStr;
use sys::CUdevice_attribute as Attribute;

/// Bytes of `0000:3b:00.0` and its end, with room for wider domains.
const PCI_MAX: usize = 32;

pub(super) fn failed(what: &'static str) -> impl FnOnce(DriverError) -> CudaError {
    move |error| CudaError::Driver { what, error: error.to_string() }
}

/// Loads the driver, and counts its GPUs.
pub(in crate::cuda) fn count() -> Result<u32, CudaError> {
    // SAFETY: loading the driver's library runs its initializers and nothing of ours; it stays loaded.
    if !unsafe { sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    result::init().map_err(failed("cuInit"))?;
    Ok(result::device::get_count().map_err(failed("cuDeviceGetCount"))? as u32)
}

/// Newest CUDA that the driver is for.
fn version() -> Result<CudaVersion, CudaError> {
    let mut version = 0;
    // SAFETY: the number is written by the call; the driver is loaded.
    unsafe { sys::cuDriverGetVersion(&mut version) }.result().map_err(failed("cuDriverGetVersion"))?;
    Ok(CudaVersion(version as u32))
}

/// The GPU with this number, which [`count`] is above. Its memory is all of it: a context sees somewhat less.
pub(in crate::cuda) fn gpu(ordinal: u32) -> Result<(sys::CUdevice, Gpu), CudaError> {
    let device = result::device::get(ordinal as i32).map_err(failed("cuDeviceGet"))?;
    let number = |which| attribute(device, which).map(|value| value as u32);
    let capability = Capability {
        major: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
        minor: number(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
    };
    let processors = number(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
    // SAFETY: the device is one that the driver gave.
    let memory = unsafe { result::device::total_mem(device) }.map_err(failed("cuDeviceTotalMem"))? as u64;
    let name = result::device::get_name(device).map_err(failed("cuDeviceGetName"))?;
    // Attributes that an older driver does not know stand for none.
    let promised = |which| attribute(device, which).unwrap_or(0);
    let remote_writes = RemoteWrites::of(
        promised(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED),
        promised(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING),
        promised(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS),
    );
    Ok((device, Gpu { name, ordinal, capability, processors, memory, cuda: version()?, remote_writes }))
}

fn attribute(device: sys::CUdevice, which: Attribute) -> Result<i32, CudaError> {
    // SAFETY: the device is one that the driver gave.
    unsafe { result::device::get_attribute(device, which) }.map_err(failed("cuDeviceGetAttribute"))
}

/// How NICs reach a GPU.
pub(in crate::cuda) struct Bus {
    /// `0000:3b:00.0`.
    pub(in crate::cuda) address: String,
    pub(in crate::cuda) gpu_direct: bool,
    pub(in crate::cuda) dma_buf: bool,
}

/// Of a device that [`gpu`] gave.
pub(in crate::cuda) fn bus(device: sys::CUdevice) -> Result<Bus, CudaError> {
    let mut text = [0; PCI_MAX];
    // SAFETY: the text has room for as many bytes as the call is told, and the call ends it with a zero.
    unsafe { sys::cuDeviceGetPCIBusId(text.as_mut_ptr(), PCI_MAX as i32, device) }
        .result()
        .map_err(failed("cuDeviceGetPCIBusId"))?;
    let bytes = text.map(|byte| byte as u8);
    let address =
        CStr::from_bytes_until_nul(&bytes).map_or_else(|_| String::new(), |text| text.to_string_lossy().to_lowercase());
    let supports = |which| attribute(device, which).map(|value| value != 0);
    Ok(Bus {
        address,
        gpu_direct: supports(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED)?,
        dma_buf: supports(Attribute::CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED)?,
    })
}
