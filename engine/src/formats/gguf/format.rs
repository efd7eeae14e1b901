//! GGML's numbers of storage formats.

use baton_kernels::storage::StorageFormat;

/// The format with GGML's number; otherwise the name of the type, where it has one.
pub(super) fn from_number(number: u32) -> Result<StorageFormat, String> {
    Ok(match number {
        0 => StorageFormat::F32,
        1 => StorageFormat::F16,
        2 => StorageFormat::Q4_0,
        3 => StorageFormat::Q4_1,
        8 => StorageFormat::Q8_0,
        12 => StorageFormat::Q4K,
        13 => StorageFormat::Q5K,
        14 => StorageFormat::Q6K,
        30 => StorageFormat::Bf16,
        6 => return Err("Q5_0".into()),
        7 => return Err("Q5_1".into()),
        10 => return Err("Q2_K".into()),
        11 => return Err("Q3_K".into()),
        16..=23 | 29 => return Err(format!("IQ-quant (GGML type {number})")),
        34 | 35 => return Err(format!("ternary (GGML type {number})")),
        39 => return Err("MXFP4".into()),
        _ => return Err(format!("GGML type {number}")),
    })
}
