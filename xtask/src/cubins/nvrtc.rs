//! NVRTC, the compiler of CUDA kernels, as a library that is loaded from a file.
#![allow(unsafe_code, reason = "functions of a C library; docs/decisions/0045-unsafe-code.md")]

use anyhow::{Context, bail, ensure};
use libloading::Library;
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::path::Path;

/// A program that is being compiled, of `nvrtc.h`.
type Program = *mut c_void;
/// `nvrtcResult`: 0 is success.
type Status = c_int;

type Create = unsafe extern "C" fn(
    *mut Program,
    *const c_char,
    *const c_char,
    c_int,
    *const *const c_char,
    *const *const c_char,
) -> Status;
type Compile = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
type Destroy = unsafe extern "C" fn(*mut Program) -> Status;
type Size = unsafe extern "C" fn(Program, *mut usize) -> Status;
type Bytes = unsafe extern "C" fn(Program, *mut c_char) -> Status;
type Version = unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status;
type Message = unsafe extern "C" fn(Status) -> *const c_char;

/// The library. Programs may be compiled by several threads at once.
pub(super) struct Nvrtc {
    create: Create,
    compile: Compile,
    destroy: Destroy,
    log: (Size, Bytes),
    cubin: (Size, Bytes),
    version: Version,
    message: Message,
    /// The functions stay valid as long as these are loaded.
    _libraries: [Library; 2],
}

/// What a source became.
#[derive(Debug)]
pub(super) struct Compiled {
    pub(super) cubin: Vec<u8>,
    /// What the compiler said, with what `--ptxas-options=-v` adds.
    pub(super) log: String,
}

/// Copies a function's address out of a library.
///
/// # Safety
/// The function has this type. It is called only while the library is loaded.
unsafe fn function<F: Copy>(library: &Library, name: &str) -> anyhow::Result<F> {
    // SAFETY: the caller's promise.
    Ok(*unsafe { library.get::<F>(name) }?)
}

impl Nvrtc {
    /// Loads both libraries of this folder.
    pub(super) fn load(folder: &Path) -> anyhow::Result<Self> {
        // NVRTC looks for its other half by name alone, and finds it because it is loaded.
        let open = |name: &str| {
            let path = folder.join(name);
            // SAFETY: the initializers of NVIDIA's libraries have no requirements.
            unsafe { Library::new(&path) }
                .with_context(|| format!("{}: scripts/setup-cuda installs it", path.display()))
        };
        let (builtins, nvrtc) = (open("libnvrtc-builtins.so.13.0")?, open("libnvrtc.so.13")?);
        // SAFETY: the types are those of nvrtc.h of version 13.0; the library is kept beside its functions.
        let loaded = unsafe {
            Self {
                create: function(&nvrtc, "nvrtcCreateProgram")?,
                compile: function(&nvrtc, "nvrtcCompileProgram")?,
                destroy: function(&nvrtc, "nvrtcDestroyProgram")?,
                log: (function(&nvrtc, "nvrtcGetProgramLogSize")?, function(&nvrtc, "nvrtcGetProgramLog")?),
                cubin: (function(&nvrtc, "nvrtcGetCUBINSize")?, function(&nvrtc, "nvrtcGetCUBIN")?),
                version: function(&nvrtc, "nvrtcVersion")?,
                message: function(&nvrtc, "nvrtcGetErrorString")?,
                _libraries: [builtins, nvrtc],
            }
        };
        let (mut major, mut minor) = (0, 0);
        // SAFETY: both are written to.
        loaded.check(unsafe { (loaded.version)(&raw mut major, &raw mut minor) })?;
        ensure!((major, minor) == (13, 0), "NVRTC is {major}.{minor}, not 13.0");
        Ok(loaded)
    }

    /// Compiles one source.
    ///
    /// # Errors
    /// With the compiler's log.
    pub(super) fn compile(&self, name: &str, source: &str, options: &[String]) -> anyhow::Result<Compiled> {
        let (source, name) = (CString::new(source)?, CString::new(name)?);
        let options: Vec<CString> =
            options.iter().map(|option| CString::new(option.as_str())).collect::<Result<_, _>>()?;
        let options: Vec<*const c_char> = options.iter().map(|option| option.as_ptr()).collect();
        let mut program = Running { nvrtc: self, program: std::ptr::null_mut() };
        let no_headers = std::ptr::null();
        // SAFETY: both texts end with zero and outlive the program; there are no headers.
        self.check(unsafe {
            (self.create)(&raw mut program.program, source.as_ptr(), name.as_ptr(), 0, no_headers, no_headers)
        })?;
        // SAFETY: the program was created; the options are as many as stated and end with zero.
        let status = unsafe { (self.compile)(program.program, options.len() as c_int, options.as_ptr()) };
        let log = String::from_utf8_lossy(&self.bytes(&program, self.log)?).trim_end_matches('\0').to_owned();
        if let Err(error) = self.check(status) {
            bail!("{error}\n{log}");
        }
        Ok(Compiled { cubin: self.bytes(&program, self.cubin)?, log })
    }

    fn bytes(&self, program: &Running<'_>, (size, bytes): (Size, Bytes)) -> anyhow::Result<Vec<u8>> {
        let mut len = 0;
        // SAFETY: the program was created, the length is written to.
        self.check(unsafe { size(program.program, &raw mut len) })?;
        let mut out = vec![0u8; len];
        // SAFETY: there is room for as many bytes as the library has stated.
        self.check(unsafe { bytes(program.program, out.as_mut_ptr().cast()) })?;
        Ok(out)
    }

    fn check(&self, status: Status) -> anyhow::Result<()> {
        if status == 0 {
            return Ok(());
        }
        // SAFETY: the library returns a text of its own for every number, which ends with zero.
        let message = unsafe { CStr::from_ptr((self.message)(status)) };
        bail!("NVRTC: {}", message.to_string_lossy())
    }
}

/// A program, which ends with this.
struct Running<'a> {
    nvrtc: &'a Nvrtc,
    program: Program,
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        if !self.program.is_null() {
            // SAFETY: the program was created, and nobody names it any more.
            unsafe { (self.nvrtc.destroy)(&raw mut self.program) };
        }
    }
}
