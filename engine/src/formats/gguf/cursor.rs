//! A bounds-checked reader over mapped bytes. It allocates nothing; lengths are checked against the remaining bytes before use.

/// Bytes of one GGUF file and a position in them. Numbers are little-endian.
pub(super) struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

/// What was being read when the file ended or was inconsistent.
pub(super) type Reason = String;

impl<'a> Cursor<'a> {
    pub(super) fn new(bytes: &'a [u8]) -> Self {
        Self { bytes, at: 0 }
    }

    /// Bytes read so far.
    pub(super) fn position(&self) -> usize {
        self.at
    }

    pub(super) fn left(&self) -> usize {
        self.bytes.len() - self.at
    }

    /// The next `count` bytes.
    pub(super) fn take(&mut self, count: u64, what: &str) -> Result<&'a [u8], Reason> {
        let left = self.left();
        let count = usize::try_from(count)
            .ok()
            .filter(|&n| n <= left)
            .ok_or_else(|| format!("{what} needs {count} bytes, but the file has {left} left at byte {}", self.at))?;
        let taken = &self.bytes[self.at..self.at + count];
        self.at += count;
        Ok(taken)
    }

    pub(super) fn u32(&mut self, what: &str) -> Result<u32, Reason> {
        let bytes = self.take(4, what)?;
        Ok(u32::from_le_bytes(bytes.try_into().expect("4 bytes were taken")))
    }

    pub(super) fn u64(&mut self, what: &str) -> Result<u64, Reason> {
        let bytes = self.take(8, what)?;
        Ok(u64::from_le_bytes(bytes.try_into().expect("8 bytes were taken")))
    }

    /// A string with its length in front.
    pub(super) fn string(&mut self, what: &str) -> Result<&'a str, Reason> {
        let at = self.at;
        let length = self.u64(what)?;
        let bytes = self.take(length, what)?;
        std::str::from_utf8(bytes).map_err(|_| format!("{what} at byte {at} is not UTF-8"))
    }

    /// The bytes of `count` strings in a row, each checked.
    pub(super) fn strings(&mut self, count: usize, what: &str) -> Result<&'a [u8], Reason> {
        let start = self.at;
        for _ in 0..count {
            self.string(what)?;
        }
        Ok(&self.bytes[start..self.at])
    }

    /// A count of entries of at least `each_min` bytes each, checked against the remaining bytes.
    pub(super) fn count(&mut self, each_min: usize, what: &str) -> Result<usize, Reason> {
        let count = self.u64(what)?;
        let most = self.left() / each_min;
        usize::try_from(count)
            .ok()
            .filter(|&n| n <= most)
            .ok_or_else(|| format!("{what} is {count}, but the rest of the file holds at most {most}"))
    }
}
