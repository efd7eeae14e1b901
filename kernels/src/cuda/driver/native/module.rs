//! Kernels of a device, loaded from its cubins.

use super::{Handle, failed};
use crate::cuda::CudaError;
use crate::cuda::pack::Image;
use crate::device::DeviceError;
use cudarc::driver::{result, sys};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::CString;

/// Dynamic shared memory that every kernel may have without asking.
const SHARED_DEFAULT: u32 = 48 << 10;

/// Loaded cubins, and their functions by name.
pub(super) struct Modules {
    modules: Vec<Handle<sys::CUmodule>>,
    functions: Mutex<HashMap<String, Function>>,
}

#[derive(Clone, Copy)]
struct Function {
    handle: Handle<sys::CUfunction>,
    /// Most dynamic shared memory that was asked for.
    shared: u32,
}

impl Modules {
    /// Loads cubins in the current context, and finds all their kernels: none is loaded in a step, or while a graph is captured.
    pub(super) fn load(images: &[Image]) -> Result<Self, CudaError> {
        let mut loaded = Self { modules: Vec::new(), functions: Mutex::default() };
        for image in images {
            let failed = |error: String| CudaError::Module { source_file: image.name.clone(), error };
            // SAFETY: the image is a whole cubin of this build: its file names the same sources.
            let module = unsafe { result::module::load_data(image.cubin.as_ptr().cast()) };
            let module = module.map_err(|error| failed(error.to_string()))?;
            loaded.modules.push(Handle(module));
            for kernel in &image.kernels {
                let name = CString::new(kernel.as_str()).map_err(|error| failed(error.to_string()))?;
                // SAFETY: modules are loaded until `unload`.
                let function = unsafe { result::module::get_function(module, name) };
                let handle = Handle(function.map_err(|error| failed(format!("{kernel}: {error}")))?);
                loaded.functions.get_mut().insert(kernel.clone(), Function { handle, shared: SHARED_DEFAULT });
            }
        }
        Ok(loaded)
    }

    /// The kernel of this name, allowed so much dynamic shared memory.
    pub(super) fn function(&self, name: &str, shared: u32) -> Result<sys::CUfunction, DeviceError> {
        let mut functions = self.functions.lock();
        let Some(function) = functions.get_mut(name) else {
            return Err(DeviceError::Failed(format!("no kernel {name} in the cubins: they are of another version")));
        };
        if shared > function.shared {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function's module is loaded.
            unsafe { result::function::set_function_attribute(function.handle.0, attribute, shared as i32) }
                .map_err(failed("shared memory of a kernel"))?;
            function.shared = shared;
        }
        Ok(function.handle.0)
    }

    /// # Safety
    /// No function is used from here on, and the context is current.
    pub(super) unsafe fn unload(&mut self) {
        for module in self.modules.drain(..) {
            // SAFETY: it was loaded, and is unloaded once.
            _ = unsafe { result::module::unload(module.0) };
        }
    }
}
