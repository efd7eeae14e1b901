//! Where the sums of a product go.

use crate::host::Store;
use std::ops::Range;

/// Memory for the sums of some features: that of row `r` and feature `f` goes to `to + r * stride + f - first`.
///
/// Products write to it through a raw pointer: several tasks share one output. Whoever makes one promises that it is valid for every row of the
/// product and these features, and that no other task touches them meanwhile.
#[derive(Clone, Copy, Debug)]
pub(super) struct Target {
    to: *mut f32,
    stride: usize,
    first: usize,
    end: usize,
    store: Store,
}

impl Target {
    /// # Safety
    /// The promise of [`Target`], for as long as products write to it.
    pub(super) unsafe fn new(to: *mut f32, stride: usize, features: Range<usize>, store: Store) -> Self {
        Self { to, stride, first: features.start, end: features.end, store }
    }

    /// The features.
    pub(super) fn features(self) -> Range<usize> {
        self.first..self.end
    }

    pub(super) fn stride(self) -> usize {
        self.stride
    }

    pub(super) fn store(self) -> Store {
        self.store
    }

    /// The address of a row's feature. Valid as [`Target`] says.
    #[inline(always)]
    pub(super) fn at(self, row: usize, feature: usize) -> *mut f32 {
        self.to.wrapping_add(row * self.stride).wrapping_add(feature).wrapping_sub(self.first)
    }

    /// Fetches the cache lines of `N` features: stores retire in order, so one that misses would hold up the next tile's.
    #[inline(always)]
    pub(super) fn expect<const N: usize>(self, _row: usize, _feature: usize) {
        #[cfg(target_arch = "x86_64")]
        for at in (0..N).step_by(16).chain([N - 1]) {
            // SAFETY: a hint for any address.
            unsafe {
                std::arch::asm!("prefetchw [{}]", in(reg) self.at(_row, _feature + at), options(nostack, preserves_flags, readonly));
            }
        }
    }

    /// Takes the sums of `N` features of a row; those from the end on are dropped.
    ///
    /// # Panics
    /// If the features begin elsewhere.
    #[inline(always)]
    pub(super) fn put<const N: usize>(self, row: usize, feature: usize, sums: &[f32; N]) {
        assert!((self.first..self.end).contains(&feature), "feature {feature} of {}..{}", self.first, self.end);
        // SAFETY: the promise of `new`.
        let to = unsafe { std::slice::from_raw_parts_mut(self.at(row, feature), N.min(self.end - feature)) };
        match (self.store, <&mut [f32; N]>::try_from(&mut *to)) {
            (Store::Set, Ok(to)) => *to = *sums,
            // As a whole, which the compiler turns into vectors.
            (Store::Add, Ok(to)) => *to = std::array::from_fn(|i| to[i] + sums[i]),
            (Store::Set, Err(_)) => to.iter_mut().zip(sums).for_each(|(to, sum)| *to = *sum),
            (Store::Add, Err(_)) => to.iter_mut().zip(sums).for_each(|(to, sum)| *to += sum),
        }
    }
}
