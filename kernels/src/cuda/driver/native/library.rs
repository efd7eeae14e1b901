//! cuBLASLt, which is loaded when a program is compiled, if it is there.

use super::Handle;
use crate::cuda::arguments::model::{Gemm, epilogue};
use crate::cuda::driver::command::{Algorithm, Product};
use crate::device::DeviceError;
use crate::numerics::Half;
use cudarc::cublaslt::{result, sys};
use cudarc::driver::sys::CUstream;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr::{from_ref, null_mut};

/// Algorithms that are asked for.
const ALGORITHMS: usize = 16;

/// CUBLAS_OP_T
const TRANSPOSED: i32 = 1;

/// The library.
pub(super) struct Library {
    handle: Handle<sys::cublasLtHandle_t>,
}

fn failed(what: &'static str) -> impl FnOnce(result::CublasError) -> DeviceError {
    move |error| DeviceError::Failed(format!("cuBLASLt: {what}: {error}"))
}

/// The version of the library, such as 130100; `None` if there is none. This loads it.
pub(in crate::cuda) fn version() -> Option<usize> {
    // SAFETY: loading the library runs its initializers and nothing of ours; it stays loaded.
    unsafe { sys::is_culib_present().then(|| sys::cublasLtGetVersion()) }
}

impl Library {
    /// The library, if there is one; the device's context must be current.
    pub(super) fn open() -> Option<Self> {
        let Some(version) = version() else {
            tracing::warn!(
                "cuBLASLt is not found: long prompts take Baton's own products, which are slower. Put libcublasLt.so.13 on the library path"
            );
            return None;
        };
        match result::create_handle() {
            Ok(handle) => {
                tracing::info!(version, "cuBLASLt is loaded");
                Some(Self { handle: Handle(handle) })
            }
            Err(error) => {
                tracing::warn!(%error, "cuBLASLt can't be used: long prompts take Baton's own products, which are slower");
                None
            }
        }
    }

    /// Algorithms that need no workspace, the likely fastest first.
    pub(super) fn algorithms(&self, product: &Gemm, half: Half) -> Result<Vec<Algorithm>, DeviceError> {
        let problem = Problem::new(product, half)?;
        let preference = result::create_matmul_pref().map_err(failed("a preference"))?;
        let none = 0usize;
        let mut found = [MaybeUninit::<sys::cublasLtMatmulHeuristicResult_t>::uninit(); ALGORITHMS];
        let mut count = 0;
        use sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES as WORKSPACE;
        // SAFETY: handle, description and layouts are live; the preference is destroyed once. There is room for as many results as asked for.
        let status = unsafe {
            let set =
                result::set_matmul_pref_attribute(preference, WORKSPACE, from_ref(&none).cast(), size_of::<usize>());
            let asked = set.map_err(failed("a preference")).map(|()| {
                sys::cublasLtMatmulAlgoGetHeuristic(
                    self.handle.0,
                    problem.description,
                    problem.w,
                    problem.x,
                    problem.out,
                    problem.out,
                    preference,
                    ALGORITHMS as i32,
                    found.as_mut_ptr().cast(),
                    &mut count,
                )
            });
            result::destroy_matmul_pref(preference).map_err(failed("a preference"))?;
            asked?
        };
        // It has no algorithm at all for some shapes.
        if status != sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS {
            return Ok(Vec::new());
        }
        // SAFETY: the library filled so many.
        let found = found[..count as usize].iter().map(|found| unsafe { found.assume_init_ref() });
        let found = found.filter(|found| found.state == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS);
        Ok(found.map(|found| algorithm(&found.algo)).collect())
    }

    /// Enqueues a product.
    pub(super) fn enqueue(&self, product: &Product, half: Half, stream: CUstream) -> Result<(), DeviceError> {
        let Product { product, by, .. } = product;
        let problem = Problem::new(product, half)?;
        let (one, zero) = (1f32, 0f32);
        let beta = if product.epilogue == epilogue::ADD_RESIDUAL { &one } else { &zero };
        let algorithm = sys::cublasLtMatmulAlgo_t { data: by.words };
        let (x, w, out) = (product.x.bits() as *const c_void, product.w.bits() as *const c_void, product.out.bits());
        // SAFETY: all handles are live; the call copies scalars and algorithm. The matrices stay allocated until an event behind the product has
        // come, and have the sizes of the layouts.
        let enqueued = unsafe {
            result::matmul(
                self.handle.0,
                problem.description,
                from_ref(&one).cast(),
                from_ref(beta).cast(),
                w,
                problem.w,
                x,
                problem.x,
                out as *const c_void,
                problem.out,
                out as *mut c_void,
                problem.out,
                &algorithm,
                null_mut(),
                0,
                stream.cast(),
            )
        };
        enqueued.map_err(failed("a product"))
    }
}

impl Drop for Library {
    fn drop(&mut self) {
        // SAFETY: it was created, and is destroyed once.
        _ = unsafe { result::destroy_handle(self.handle.0) };
    }
}

fn algorithm(of: &sys::cublasLtMatmulAlgo_t) -> Algorithm {
    use sys::cublasLtMatmulAlgoConfigAttributes_t as Attribute;
    let number = |attribute| {
        let (mut value, mut written) = (0u32, 0);
        let to = (&raw mut value).cast();
        // SAFETY: the algorithm is whole; there is room for the four bytes that each of these attributes has.
        let status = unsafe { sys::cublasLtMatmulAlgoConfigGetAttribute(of, attribute, to, 4, &mut written) };
        (status == sys::cublasStatus_t::CUBLAS_STATUS_SUCCESS).then_some(value)
    };
    let (splits, reduction) =
        (number(Attribute::CUBLASLT_ALGO_CONFIG_SPLITK_NUM), number(Attribute::CUBLASLT_ALGO_CONFIG_REDUCTION_SCHEME));
    // What does not say that it leaves K whole is taken to divide it.
    let divides_k = splits.is_none_or(|splits| splits > 1) || reduction != Some(0);
    Algorithm { words: of.data, id: number(Attribute::CUBLASLT_ALGO_CONFIG_ID).unwrap_or(u32::MAX), divides_k }
}

/// out = X W^T of matrices in rows: by columns, as the library counts, out^T = W X^T.
struct Problem {
    description: sys::cublasLtMatmulDesc_t,
    w: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    out: sys::cublasLtMatrixLayout_t,
}

impl Problem {
    fn new(product: &Gemm, half: Half) -> Result<Self, DeviceError> {
        let (m, n, k) = (product.m as u64, product.n as u64, product.k as u64);
        let format = match half {
            Half::Bf16 => sys::cudaDataType::CUDA_R_16BF,
            Half::F16 => sys::cudaDataType::CUDA_R_16F,
        };
        let out = if product.epilogue == epilogue::STORE_HALF { format } else { sys::cudaDataType::CUDA_R_32F };
        let description =
            result::create_matmul_desc(sys::cublasComputeType_t::CUBLAS_COMPUTE_32F, sys::cudaDataType::CUDA_R_32F)
                .map_err(failed("a description"))?;
        // Whatever fails below is freed with this.
        let mut problem = Self { description, w: null_mut(), x: null_mut(), out: null_mut() };
        let transa = sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA;
        // SAFETY: the description is live; the attribute has four bytes.
        unsafe { result::set_matmul_desc_attribute(description, transa, from_ref(&TRANSPOSED).cast(), 4) }
            .map_err(failed("a description"))?;
        let layout = |format, rows, columns| {
            result::create_matrix_layout(format, rows, columns, rows as i64).map_err(failed("a layout"))
        };
        problem.w = layout(format, k, n)?;
        problem.x = layout(format, k, m)?;
        problem.out = layout(out, n, m)?;
        Ok(problem)
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        // SAFETY: each was created, and is destroyed once.
        unsafe {
            for layout in [self.w, self.x, self.out] {
                if !layout.is_null() {
                    _ = result::destroy_matrix_layout(layout);
                }
            }
            _ = result::destroy_matmul_desc(self.description);
        }
    }
}
