//! The byte codec of the control messages: little endian, length-prefixed, with bounds checked while reading.
//!
//! A reader never allocates more than its input bytes can fill.

use std::fmt;

/// The bytes are not a valid message of their kind.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct WireError {
    what: &'static str,
    problem: &'static str,
}

impl WireError {
    pub(crate) const fn new(what: &'static str, problem: &'static str) -> Self {
        Self { what, problem }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.what, self.problem)
    }
}

/// Appends the fields of a message.
#[derive(Default)]
pub(crate) struct Writer(Vec<u8>);

impl Writer {
    pub(crate) fn u8(&mut self, value: u8) {
        self.0.push(value);
    }
    pub(crate) fn u16(&mut self, value: u16) {
        self.0.extend(value.to_le_bytes());
    }
    pub(crate) fn u32(&mut self, value: u32) {
        self.0.extend(value.to_le_bytes());
    }
    pub(crate) fn u64(&mut self, value: u64) {
        self.0.extend(value.to_le_bytes());
    }
    /// Appends bytes whose length both sides know, without a length.
    pub(crate) fn raw(&mut self, bytes: &[u8]) {
        self.0.extend(bytes);
    }
    /// Appends the length as `u32`, then the bytes.
    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.u32(bytes.len() as u32);
        self.raw(bytes);
    }
    pub(crate) fn text(&mut self, text: &str) {
        self.bytes(text.as_bytes());
    }
    /// Count, then each element.
    pub(crate) fn list<T>(&mut self, items: &[T], mut put: impl FnMut(&mut Self, &T)) {
        self.u32(items.len() as u32);
        items.iter().for_each(|item| put(self, item));
    }
    /// [`Writer::list`] of numbers, without a call per element.
    pub(crate) fn u32s(&mut self, items: impl ExactSizeIterator<Item = u32>) {
        self.u32(items.len() as u32);
        self.0.reserve(4 * items.len());
        items.for_each(|item| self.0.extend(item.to_le_bytes()));
    }
    pub(crate) fn finish(self) -> Vec<u8> {
        self.0
    }
}

/// Reads fields from the front.
pub(crate) struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self(bytes)
    }

    pub(crate) fn raw(&mut self, len: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let (head, rest) = self.0.split_at_checked(len).ok_or(WireError::new(what, "is cut short"))?;
        self.0 = rest;
        Ok(head)
    }
    fn array<const N: usize>(&mut self, what: &'static str) -> Result<[u8; N], WireError> {
        Ok(self.raw(N, what)?.try_into().expect("raw returns the length asked for"))
    }
    pub(crate) fn u8(&mut self, what: &'static str) -> Result<u8, WireError> {
        self.array(what).map(u8::from_le_bytes)
    }
    pub(crate) fn u16(&mut self, what: &'static str) -> Result<u16, WireError> {
        self.array(what).map(u16::from_le_bytes)
    }
    pub(crate) fn u32(&mut self, what: &'static str) -> Result<u32, WireError> {
        self.array(what).map(u32::from_le_bytes)
    }
    pub(crate) fn u64(&mut self, what: &'static str) -> Result<u64, WireError> {
        self.array(what).map(u64::from_le_bytes)
    }

    /// The counterpart of [`Writer::bytes`], at most `bytes_max` long.
    pub(crate) fn bytes(&mut self, bytes_max: usize, what: &'static str) -> Result<&'a [u8], WireError> {
        let len = self.u32(what)? as usize;
        if len > bytes_max {
            return Err(WireError::new(what, "is longer than allowed"));
        }
        self.raw(len, what)
    }
    pub(crate) fn text(&mut self, bytes_max: usize, what: &'static str) -> Result<&'a str, WireError> {
        std::str::from_utf8(self.bytes(bytes_max, what)?).map_err(|_| WireError::new(what, "is not UTF-8"))
    }

    /// The counterpart of [`Writer::list`], at most `count_max` elements of at least `item_bytes_min` bytes each.
    pub(crate) fn list<T>(
        &mut self,
        count_max: usize,
        item_bytes_min: usize,
        what: &'static str,
        mut take: impl FnMut(&mut Self) -> Result<T, WireError>,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32(what)? as usize;
        if count > count_max {
            return Err(WireError::new(what, "has more elements than allowed"));
        }
        if count.saturating_mul(item_bytes_min) > self.0.len() {
            return Err(WireError::new(what, "is cut short"));
        }
        // Not collected: a growing vector may take twice the size of its contents.
        let mut items = Vec::with_capacity(count);
        for _ in 0..count {
            items.push(take(self)?);
        }
        Ok(items)
    }

    /// The counterpart of [`Writer::u32s`].
    pub(crate) fn u32s<T>(
        &mut self,
        count_max: usize,
        what: &'static str,
        make: impl Fn(u32) -> T,
    ) -> Result<Vec<T>, WireError> {
        let count = self.u32(what)? as usize;
        if count > count_max {
            return Err(WireError::new(what, "has more elements than allowed"));
        }
        let (items, _) = self.raw(count.saturating_mul(4), what)?.as_chunks::<4>();
        Ok(items.iter().map(|item| make(u32::from_le_bytes(*item))).collect())
    }

    /// Fails if bytes follow the last field.
    pub(crate) fn end(self) -> Result<(), WireError> {
        if self.0.is_empty() { Ok(()) } else { Err(WireError::new("the message", "has bytes after its end")) }
    }
}
