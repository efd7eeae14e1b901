//! The GGUF container: metadata and the directory of tensors, every length checked against the file before it is used.
//!
//! Layout: `ggml/docs/gguf.md`. Versions 2 and 3, little-endian.

use super::cursor::{Cursor, Reason};
use super::format::{FileFormat, NAMES};
use super::value::Value;
use crate::formats::WeightsError;
use std::collections::BTreeMap;
use std::ops::Range;

/// Most dimensions of a tensor (`GGML_MAX_DIMS`).
const DIMENSIONS_MAX: u32 = 4;
/// Alignment of tensor data if `general.alignment` is absent.
const ALIGNMENT_DEFAULT: u64 = 32;
/// Bytes of the smallest metadata entry: a key's length, a type, a byte.
const ENTRY_MIN: usize = 8 + 4 + 1;
/// Bytes of the smallest directory entry: a name's length, one dimension, type, offset.
const TENSOR_MIN: usize = 8 + 4 + 8 + 4 + 8;

/// A parsed file. Everything borrows from the mapped bytes.
pub(super) struct Header<'a> {
    pub(super) metadata: BTreeMap<&'a str, Value<'a>>,
    pub(super) tensors: BTreeMap<&'a str, TensorEntry>,
}

/// Location and format of a tensor.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TensorEntry {
    /// GGML's order: the first dimension is contiguous.
    pub(super) dims: Vec<usize>,
    pub(super) format: FileFormat,
    /// Bytes in the file.
    pub(super) bytes: Range<usize>,
}

impl<'a> Header<'a> {
    /// Parses `bytes`, the content of the file at `path`.
    pub(super) fn parse(path: &str, bytes: &'a [u8]) -> Result<Self, WeightsError> {
        let damaged = |reason: Reason| WeightsError::damaged(path, reason);
        let mut cursor = Cursor::new(bytes);
        if cursor.take(4, "magic").map_err(damaged)? != b"GGUF" {
            return Err(damaged("not a GGUF file: it does not start with `GGUF`".into()));
        }
        match cursor.u32("version").map_err(damaged)? {
            2 | 3 => {}
            version => {
                let what = if version.swap_bytes() <= 3 {
                    "a big-endian GGUF file".into()
                } else {
                    format!("GGUF version {version}")
                };
                return Err(WeightsError::unsupported(path, what, "convert the model to little-endian GGUF version 3"));
            }
        }
        let tensor_count = cursor.count(TENSOR_MIN, "tensor count").map_err(damaged)?;
        let entry_count = cursor.count(ENTRY_MIN, "metadata count").map_err(damaged)?;
        let metadata = read_metadata(&mut cursor, entry_count).map_err(damaged)?;
        let alignment = alignment(&metadata).map_err(damaged)?;
        let raw = read_directory(&mut cursor, tensor_count).map_err(damaged)?;
        let data_start = (cursor.position() as u64).next_multiple_of(alignment);
        let mut tensors = BTreeMap::new();
        for RawTensor { name, dims, kind, offset } in raw {
            let format = FileFormat::from_number(kind).map_err(|kind| {
                let hint = format!("re-quantize to one of {NAMES}");
                WeightsError::unsupported(path, format!("tensor {name} of type {kind}"), hint)
            })?;
            let place = TensorPlace { data_start, alignment, file: bytes.len() as u64 };
            let entry = place.locate(dims, format, offset).map_err(|r| damaged(format!("tensor {name}: {r}")))?;
            if tensors.insert(name, entry).is_some() {
                return Err(damaged(format!("tensor {name} is listed twice")));
            }
        }
        check_overlap(&tensors).map_err(damaged)?;
        Ok(Self { metadata, tensors })
    }
}

fn read_metadata<'a>(cursor: &mut Cursor<'a>, count: usize) -> Result<BTreeMap<&'a str, Value<'a>>, Reason> {
    let mut metadata = BTreeMap::new();
    for _ in 0..count {
        let key = cursor.string("metadata key")?;
        let value = Value::read(cursor, key)?;
        if metadata.insert(key, value).is_some() {
            return Err(format!("key {key} is given twice"));
        }
    }
    Ok(metadata)
}

fn alignment(metadata: &BTreeMap<&str, Value<'_>>) -> Result<u64, Reason> {
    let Some(value) = metadata.get("general.alignment") else {
        return Ok(ALIGNMENT_DEFAULT);
    };
    value
        .as_unsigned()
        .filter(|n| n.is_power_of_two() && (8..=1 << 20).contains(n))
        .ok_or_else(|| "general.alignment is no power of two from 8 to 1 MiB".into())
}

struct RawTensor<'a> {
    name: &'a str,
    dims: Vec<u64>,
    kind: u32,
    offset: u64,
}

fn read_directory<'a>(cursor: &mut Cursor<'a>, count: usize) -> Result<Vec<RawTensor<'a>>, Reason> {
    let mut tensors = Vec::new();
    for _ in 0..count {
        let name = cursor.string("tensor name")?;
        let dimensions = cursor.u32(name)?;
        if !(1..=DIMENSIONS_MAX).contains(&dimensions) {
            return Err(format!("tensor {name} has {dimensions} dimensions; 1 to {DIMENSIONS_MAX} are possible"));
        }
        let dims = (0..dimensions).map(|_| cursor.u64(name)).collect::<Result<_, _>>()?;
        let (kind, offset) = (cursor.u32(name)?, cursor.u64(name)?);
        tensors.push(RawTensor { name, dims, kind, offset });
    }
    Ok(tensors)
}

/// The bounds of a tensor's location.
struct TensorPlace {
    data_start: u64,
    alignment: u64,
    file: u64,
}

impl TensorPlace {
    fn locate(&self, dims: Vec<u64>, format: FileFormat, offset: u64) -> Result<TensorEntry, Reason> {
        let (block, block_bytes) = format.block();
        let absurd = || format!("dimensions {dims:?} are absurd");
        if dims.contains(&0) {
            return Err(absurd());
        }
        if !dims[0].is_multiple_of(block as u64) {
            return Err(format!("rows of {} elements are not a multiple of the format's block of {block}", dims[0]));
        }
        let elements = dims.iter().try_fold(1u64, |all, &d| all.checked_mul(d)).ok_or_else(absurd)?;
        let size = (elements / block as u64).checked_mul(block_bytes as u64).ok_or_else(absurd)?;
        if !offset.is_multiple_of(self.alignment) {
            return Err(format!("offset {offset} is not aligned to {}", self.alignment));
        }
        let past = || format!("its {size} bytes at offset {offset} end past every file");
        let start = self.data_start.checked_add(offset).ok_or_else(past)?;
        let end = start.checked_add(size).filter(|&end| end <= self.file).ok_or_else(|| {
            format!("its {size} bytes at {start} end past the file's {}: the file is truncated or damaged", self.file)
        })?;
        // Every dimension is smaller than the file, which is mapped, so it fits `usize`.
        let dims = dims.iter().map(|&d| d as usize).collect();
        Ok(TensorEntry { dims, format, bytes: start as usize..end as usize })
    }
}

fn check_overlap(tensors: &BTreeMap<&str, TensorEntry>) -> Result<(), Reason> {
    let mut places: Vec<_> = tensors.iter().map(|(name, t)| (t.bytes.start, t.bytes.end, *name)).collect();
    places.sort_unstable();
    for pair in places.windows(2) {
        let ((_, end, first), (start, _, second)) = (pair[0], pair[1]);
        if start < end {
            return Err(format!("tensors {first} and {second} overlap"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use baton_kernels::storage::StorageFormat;

    #[test]
    fn an_absurd_offset_is_named() {
        let place = TensorPlace { data_start: 64, alignment: 32, file: 1 << 20 };
        let reason = place.locate(vec![8, 8], FileFormat::Stored(StorageFormat::F32), u64::MAX - 31).unwrap_err();
        assert_eq!(reason, "its 256 bytes at offset 18446744073709551584 end past every file");
    }
}
