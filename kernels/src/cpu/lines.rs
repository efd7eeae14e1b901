//! Memory of whole cache lines.

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([u8; 64]);

/// A buffer aligned to 64 bytes that only grows.
#[derive(Default)]
pub(in crate::cpu) struct Lines(Vec<Line>);

impl Lines {
    pub(in crate::cpu) const fn new() -> Self {
        Self(Vec::new())
    }

    /// Room for `len` elements: what was last written there, or zeros.
    pub(in crate::cpu) fn room<T>(&mut self, len: usize) -> *mut T {
        let lines = (len * size_of::<T>()).div_ceil(size_of::<Line>());
        if self.0.len() < lines {
            self.0.resize(lines, Line([0; 64]));
        }
        self.0.as_mut_ptr().cast()
    }
}
