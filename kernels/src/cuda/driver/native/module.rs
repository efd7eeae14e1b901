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
    /// Loads cubins in the current context.
    pub(super) fn load(images: &[Image]) -> Result<Self, CudaError> {
        let modules = images.iter().map(|image| {
            // SAFETY: the image is a whole cubin of this build: its file names the same sources.
            let module = unsafe { result::module::load_data(image.cubin.as_ptr().cast()) };
            module
                .map(Handle)
                .map_err(|error| CudaError::Module { source_file: image.name.clone(), error: error.to_string() })
        });
        Ok(Self { modules: modules.collect::<Result<_, _>>()?, functions: Mutex::default() })
    }

    /// The kernel of this name, allowed so much dynamic shared memory.
    pub(super) fn function(&self, name: &str, shared: u32) -> Result<sys::CUfunction, DeviceError> {
        let mut functions = self.functions.lock();
        let mut function = match functions.get(name) {
            Some(function) => *function,
            None => Function { handle: Handle(self.find(name)?), shared: SHARED_DEFAULT },
        };
        if shared > function.shared {
            let attribute = sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: the function's module is loaded.
            unsafe { result::function::set_function_attribute(function.handle.0, attribute, shared as i32) }
                .map_err(failed("shared memory of a kernel"))?;
            function.shared = shared;
        }
        functions.insert(name.to_owned(), function);
        Ok(function.handle.0)
    }

    fn find(&self, name: &str) -> Result<sys::CUfunction, DeviceError> {
        let text = CString::new(name).map_err(|_| DeviceError::Failed(format!("a kernel named {name:?}")))?;
        // SAFETY: modules are loaded until `unload`.
        let find =
            |module: &Handle<sys::CUmodule>| unsafe { result::module::get_function(module.0, text.clone()) }.ok();
        let found = self.modules.iter().find_map(find);
        found.ok_or_else(|| DeviceError::Failed(format!("no kernel {name} in the cubins: they are of another version")))
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
