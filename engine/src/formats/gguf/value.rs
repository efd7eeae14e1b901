//! Metadata values. Arrays stay in the file until they are read, so a header's memory depends only on its number of keys.

use super::cursor::{Cursor, Reason};

/// Element types, as numbered in the GGUF specification.
const U8: u32 = 0;
const I8: u32 = 1;
const U16: u32 = 2;
const I16: u32 = 3;
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;
const U64: u32 = 10;
const I64: u32 = 11;
const F64: u32 = 12;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Value<'a> {
    Unsigned(u64),
    Signed(i64),
    Float(f64),
    Bool(bool),
    String(&'a str),
    Array(Array<'a>),
}

/// An array whose bounds are checked and whose elements are still in the file.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Array<'a> {
    kind: u32,
    count: usize,
    bytes: &'a [u8],
}

/// Bytes of a fixed-size element, or of the smallest string.
fn size_min(kind: u32) -> Option<usize> {
    match kind {
        U8 | I8 | BOOL => Some(1),
        U16 | I16 => Some(2),
        U32 | I32 | F32 => Some(4),
        U64 | I64 | F64 | STRING => Some(8),
        _ => None,
    }
}

impl<'a> Value<'a> {
    /// Reads a type number and a value of that type.
    pub(super) fn read(cursor: &mut Cursor<'a>, key: &str) -> Result<Self, Reason> {
        let kind = cursor.u32(key)?;
        if kind != ARRAY {
            return Self::read_one(cursor, kind, key);
        }
        let kind = cursor.u32(key)?;
        let each = size_min(kind).ok_or_else(|| format!("{key} is an array of unknown or nested type {kind}"))?;
        let count = cursor.count(each, &format!("count of {key}"))?;
        let bytes =
            if kind == STRING { cursor.strings(count, key)? } else { cursor.take((count * each) as u64, key)? };
        Ok(Self::Array(Array { kind, count, bytes }))
    }

    fn read_one(cursor: &mut Cursor<'a>, kind: u32, key: &str) -> Result<Self, Reason> {
        if kind == STRING {
            return cursor.string(key).map(Self::String);
        }
        let size = size_min(kind).ok_or_else(|| format!("{key} has unknown value type {kind}"))?;
        let bytes = cursor.take(size as u64, key)?;
        let mut wide = [0; 8];
        wide[..size].copy_from_slice(bytes);
        let bits = u64::from_le_bytes(wide);
        Ok(match kind {
            U8 | U16 | U32 | U64 => Self::Unsigned(bits),
            I8 => Self::Signed(i64::from(bits as u8 as i8)),
            I16 => Self::Signed(i64::from(bits as u16 as i16)),
            I32 => Self::Signed(i64::from(bits as u32 as i32)),
            I64 => Self::Signed(bits as i64),
            F32 => Self::Float(f64::from(f32::from_bits(bits as u32))),
            F64 => Self::Float(f64::from_bits(bits)),
            _ => match bits {
                0 => Self::Bool(false),
                1 => Self::Bool(true),
                _ => return Err(format!("{key} is a boolean of value {bits}")),
            },
        })
    }

    /// The value as a non-negative integer.
    pub(super) fn as_unsigned(self) -> Option<u64> {
        match self {
            Self::Unsigned(n) => Some(n),
            Self::Signed(n) => u64::try_from(n).ok(),
            _ => None,
        }
    }

    /// The value as f32, if it is a number.
    pub(super) fn as_f32(self) -> Option<f32> {
        match self {
            Self::Float(x) => Some(x as f32),
            Self::Unsigned(n) => Some(n as f32),
            Self::Signed(n) => Some(n as f32),
            _ => None,
        }
    }

    /// Whether the value means "off": false, zero, an empty string or array.
    pub(super) fn is_off(self) -> bool {
        match self {
            Self::Unsigned(n) => n == 0,
            Self::Signed(n) => n == 0,
            Self::Float(x) => x == 0.0,
            Self::Bool(b) => !b,
            Self::String(s) => s.is_empty(),
            Self::Array(a) => a.count == 0,
        }
    }
}

impl<'a> Array<'a> {
    /// Elements, if they are strings.
    pub(super) fn strings(self) -> Option<Vec<String>> {
        if self.kind != STRING {
            return None;
        }
        let mut cursor = Cursor::new(self.bytes);
        (0..self.count).map(|_| cursor.string("array").ok().map(str::to_owned)).collect()
    }

    fn numbers<T>(self, convert: fn(Value<'a>) -> Option<T>) -> Option<Vec<T>> {
        if self.kind == STRING {
            return None;
        }
        let mut cursor = Cursor::new(self.bytes);
        (0..self.count).map(|_| convert(Value::read_one(&mut cursor, self.kind, "array").ok()?)).collect()
    }

    /// Elements, if they are integers in range.
    pub(super) fn i32s(self) -> Option<Vec<i32>> {
        self.numbers(|value| match value {
            Value::Unsigned(n) => i32::try_from(n).ok(),
            Value::Signed(n) => i32::try_from(n).ok(),
            _ => None,
        })
    }

    /// Elements, if they are bytes.
    pub(super) fn bytes(self) -> Option<Vec<u8>> {
        [U8, I8].contains(&self.kind).then(|| self.bytes.to_vec())
    }

    /// Elements, if they are numbers.
    pub(super) fn f32s(self) -> Option<Vec<f32>> {
        self.numbers(Value::as_f32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_array_cut_short_is_told_by_its_count() {
        let bytes = [&ARRAY.to_le_bytes()[..], &STRING.to_le_bytes(), &300u64.to_le_bytes()].concat();
        let reason = Value::read(&mut Cursor::new(&bytes), "tokenizer.ggml.tokens").unwrap_err();
        assert_eq!(reason, "count of tokenizer.ggml.tokens is 300, but the rest of the file holds at most 0");
    }
}
