//! GGML's types of tensors: those that devices take as they are stored, and those that are repacked when they are read.

use super::repack;
use crate::formats::StoredTensor;
use baton_kernels::storage::StorageFormat;

/// How a file stores a tensor.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum FileFormat {
    /// As devices take it.
    Stored(StorageFormat),
    /// As another format, which holds it exactly, or as numbers in f32.
    Repacked(Repacked),
}

/// A format that no device takes.
#[allow(non_camel_case_types, reason = "GGML's names of the formats")]
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Repacked {
    Q5_0,
    Q5_1,
    Q2_K,
    Q3_K,
    IQ4_NL,
    IQ4_XS,
    MXFP4,
}

/// What a file may be quantized to, for messages.
pub(super) const NAMES: &str =
    "F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS, MXFP4";

impl FileFormat {
    /// The format with GGML's number; otherwise the name of the type, where it has one.
    pub(super) fn from_number(number: u32) -> Result<Self, String> {
        use Repacked::{IQ4_NL, IQ4_XS, MXFP4, Q2_K, Q3_K, Q5_0, Q5_1};
        let stored = match number {
            0 => StorageFormat::F32,
            1 => StorageFormat::F16,
            2 => StorageFormat::Q4_0,
            3 => StorageFormat::Q4_1,
            8 => StorageFormat::Q8_0,
            12 => StorageFormat::Q4K,
            13 => StorageFormat::Q5K,
            14 => StorageFormat::Q6K,
            30 => StorageFormat::Bf16,
            6 => return Ok(Self::Repacked(Q5_0)),
            7 => return Ok(Self::Repacked(Q5_1)),
            10 => return Ok(Self::Repacked(Q2_K)),
            11 => return Ok(Self::Repacked(Q3_K)),
            20 => return Ok(Self::Repacked(IQ4_NL)),
            23 => return Ok(Self::Repacked(IQ4_XS)),
            39 => return Ok(Self::Repacked(MXFP4)),
            16..=22 | 29 => return Err(format!("IQ-quant (GGML type {number})")),
            34 | 35 => return Err(format!("ternary (GGML type {number})")),
            40 => return Err("NVFP4".into()),
            _ => return Err(format!("GGML type {number}")),
        };
        Ok(Self::Stored(stored))
    }

    /// (elements, bytes) of one block.
    pub(super) fn block(self) -> (usize, usize) {
        match self {
            Self::Stored(format) => format.block(),
            Self::Repacked(format) => format.block(),
        }
    }

    /// Whether matrices stay quantized in memory.
    pub(super) fn stays_quantized(self) -> bool {
        match self {
            Self::Stored(format) => format.is_quantized(),
            Self::Repacked(format) => !matches!(format, Repacked::Q5_1 | Repacked::Q2_K | Repacked::IQ4_XS),
        }
    }

    /// The tensor of these whole blocks, as devices take it.
    pub(super) fn read(self, bytes: &[u8]) -> StoredTensor<'_> {
        match self {
            Self::Stored(format) => StoredTensor { format, bytes: bytes.into() },
            Self::Repacked(format) => repack::repack(format, bytes),
        }
    }
}

impl Repacked {
    /// (elements, bytes) of one block.
    pub(super) const fn block(self) -> (usize, usize) {
        match self {
            Self::Q5_0 => (32, 2 + 4 + 16),
            Self::Q5_1 => (32, 4 + 4 + 16),
            Self::Q2_K => (256, 16 + 64 + 4),
            Self::Q3_K => (256, 32 + 64 + 12 + 2),
            Self::IQ4_NL => (32, 2 + 16),
            Self::IQ4_XS => (256, 2 + 2 + 4 + 128),
            Self::MXFP4 => (32, 1 + 16),
        }
    }
}
