//! A vector of eight f32, with the few operations that the kernels need.
//!
//! A value of a [`Simd`] type proves that its instructions exist. Kernels are `#[inline(always)]` generic functions; [`Simd::run`] compiles
//! them into a function with the level's target features. (No closures inside: they would not inherit the features.)

mod avx2;
#[cfg(target_arch = "x86_64")]
pub(super) mod avx512;
mod exp;
mod portable;
mod wide;
#[cfg(target_arch = "x86_64")]
mod wide_x86;

pub(super) use avx2::Avx2;
pub(super) use exp::{exp, gelu_tanh, silu};
pub(super) use portable::Portable;
pub(super) use wide::{Pass, WIDEST, Wide, Width};
#[cfg(target_arch = "x86_64")]
pub(super) use wide_x86::Sixteen;

/// Lanes of a vector.
pub(super) use crate::numerics::lanes::LANES;

/// Code to compile for a level.
pub(super) trait Kernel {
    type Out;
    /// The code; `#[inline(always)]` in every implementation.
    fn call<S: Simd>(self, simd: S) -> Self::Out;
}

/// Eight f32 at a time. Every arithmetic operation rounds once, to nearest even.
pub(super) trait Simd: Copy + Send + Sync + 'static {
    type F: Copy;

    /// Runs `kernel` compiled for this level.
    fn run<K: Kernel>(self, kernel: K) -> K::Out;

    fn splat(self, x: f32) -> Self::F;
    /// # Safety
    /// `from` is readable for eight f32, with any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// # Safety
    /// `to` is writable for eight f32, with any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// Widens eight bf16.
    /// # Safety
    /// `from` is readable for eight u16, with any alignment.
    unsafe fn load_bf16(self, from: *const u16) -> Self::F;
    /// Widens eight words of two bf16: the low halves, then the high halves.
    /// # Safety
    /// `from` is readable for eight u32, aligned to 32 bytes.
    unsafe fn load_bf16_pairs(self, from: *const u32) -> [Self::F; 2];

    /// Hints that the cache line at this address will be read. Any address is allowed.
    fn prefetch<T>(self, _at: *const T) {}

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c` with one rounding.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `a < b ? a : b`, so `b` if either is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a > b ? a : b`, so `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// With `shifted = n + EXP_MAGIC`: `2^(n >> 1)` and `2^(n - (n >> 1))`.
    fn powers_of_two(self, shifted: Self::F) -> [Self::F; 2];

    /// Lane merge of [`crate::numerics::lanes::merge`].
    fn merge(self, x: Self::F) -> f32;
    /// Lane merges of eight vectors, in order.
    fn merge8(self, x: [Self::F; 8]) -> Self::F;
    /// The largest of the eight lanes.
    fn max_lane(self, x: Self::F) -> f32;
}
