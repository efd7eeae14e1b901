//! The widest vectors of a level, for passes over many independent values: f32, and integers of 32 bits.
//!
//! As with [`Simd`](super::Simd), a value of a [`Wide`] type proves that its instructions exist, and code is written once for all.

use crate::cpu::SimdLevel;

/// Code to compile for each width.
pub(in crate::cpu) trait Pass {
    type Out;
    /// The code; `#[inline(always)]` in every implementation.
    fn call<W: Wide>(self, wide: W) -> Self::Out;
}

/// The bits of an f64 that an f32 keeps.
pub(super) const OF_F32: u64 = !((1 << 29) - 1);

/// Most lanes of a vector.
pub(in crate::cpu) const WIDEST: usize = 16;

/// Vectors of `LANES` values. Every arithmetic operation on f32 rounds once, to nearest even; integers wrap.
pub(in crate::cpu) trait Wide: Copy {
    /// A divisor of [`WIDEST`].
    const LANES: usize;
    type F: Copy;
    type I: Copy;

    fn splat(self, x: f32) -> Self::F;
    fn splat_int(self, x: i32) -> Self::I;
    /// # Safety
    /// `from` is readable for `LANES` f32, with any alignment.
    unsafe fn load(self, from: *const f32) -> Self::F;
    /// # Safety
    /// `from` is readable for `LANES` integers, with any alignment.
    unsafe fn load_int(self, from: *const i32) -> Self::I;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c` with one rounding.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// # Safety
    /// `to` is writable for `LANES` f32, with any alignment.
    unsafe fn store(self, to: *mut f32, x: Self::F);
    /// `a > b ? a : b`, so `b` if either is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// A bit for each lane, the first one lowest: whether `from <= x < below`.
    fn within(self, x: Self::F, from: Self::F, below: Self::F) -> u32;
    /// The lanes of `x` whose bits are set, the first one lowest, and `y` in the others. Bits of further lanes count for nothing.
    fn choose(self, chosen: u32, x: Self::F, y: Self::F) -> Self::F;

    fn add_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I;
    fn and(self, a: Self::I, b: Self::I) -> Self::I;
    fn shift_left<const BITS: u32>(self, a: Self::I) -> Self::I;
    /// Zeros come in from the left.
    fn shift_right<const BITS: u32>(self, a: Self::I) -> Self::I;

    /// The bits of f32, and back.
    fn bits(self, x: Self::F) -> Self::I;
    fn float_of_bits(self, x: Self::I) -> Self::F;
    /// Without the fraction. Values must be below 2^31.
    fn truncate(self, x: Self::F) -> Self::I;
    /// Exact below 2^24.
    fn float(self, x: Self::I) -> Self::F;
    /// `a + b`, which may have 33 bits, rounded towards zero. A zero is positive.
    fn sum_towards_zero(self, a: Self::I, b: Self::I) -> Self::F;

    /// `first` and the integers behind it.
    fn count_from(self, first: i32) -> Self::I;
    /// Stores the lanes of `x` and `y` whose bits are set, one behind another. What is stored behind them is not specified.
    /// # Safety
    /// Both are writable for `LANES` values, with any alignment.
    unsafe fn store_chosen(self, chosen: u32, x: Self::F, to_x: *mut f32, y: Self::I, to_y: *mut u32);
    /// # Safety
    /// `to` is writable for `LANES` integers, with any alignment.
    unsafe fn store_int(self, to: *mut u32, x: Self::I);

    /// The largest lane; none is NaN.
    fn max_lane(self, x: Self::F) -> f32;
    fn max_lane_int(self, x: Self::I) -> i32;
    /// The sum of all lanes, which is below 2^32.
    fn sum(self, x: Self::I) -> u32;
    /// Stores `high * 2^24 + low` of each lane, neither of which is negative.
    /// # Safety
    /// `to` is writable for `LANES` u64, with any alignment.
    unsafe fn store_sums(self, to: *mut u64, high: Self::I, low: Self::I);
}

#[derive(Clone, Copy, Debug)]
enum Vectors {
    Portable,
    #[cfg(target_arch = "x86_64")]
    Eight(super::wide_x86::Eight),
    #[cfg(target_arch = "x86_64")]
    Sixteen(super::wide_x86::Sixteen),
}

/// The vectors of a processor.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Width(Vectors);

impl Width {
    /// The widest vectors of a level, if this processor has them.
    pub(in crate::cpu) fn of(level: SimdLevel) -> Self {
        #[cfg(target_arch = "x86_64")]
        {
            use super::wide_x86::{Eight, Sixteen};
            if level >= SimdLevel::Avx512
                && let Some(sixteen) = Sixteen::detect()
            {
                return Self(Vectors::Sixteen(sixteen));
            }
            if level >= SimdLevel::Avx2Fma
                && let Some(eight) = Eight::detect()
            {
                return Self(Vectors::Eight(eight));
            }
        }
        let _ = level;
        Self(Vectors::Portable)
    }

    /// Runs code compiled for these vectors.
    pub(in crate::cpu) fn run<P: Pass>(self, pass: P) -> P::Out {
        match self.0 {
            Vectors::Portable => pass.call(Plain),
            #[cfg(target_arch = "x86_64")]
            Vectors::Eight(eight) => eight.run(pass),
            #[cfg(target_arch = "x86_64")]
            Vectors::Sixteen(sixteen) => sixteen.run(pass),
        }
    }
}

/// Four lanes in plain Rust.
#[derive(Clone, Copy, Debug)]
struct Plain;

const FOUR: usize = 4;

/// Applies a function to each lane.
macro_rules! lanes {
    (|$a:ident| $f:expr) => {{
        let x = $a;
        std::array::from_fn(|lane| {
            let $a = x[lane];
            $f
        })
    }};
    (|$a:ident, $b:ident| $f:expr) => {{
        let (x, y) = ($a, $b);
        std::array::from_fn(|lane| {
            let ($a, $b) = (x[lane], y[lane]);
            $f
        })
    }};
}

impl Wide for Plain {
    const LANES: usize = FOUR;
    type F = [f32; FOUR];
    type I = [i32; FOUR];

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; FOUR]
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> Self::I {
        [x; FOUR]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn load_int(self, from: *const i32) -> Self::I {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::I>().read_unaligned() }
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::F) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn within(self, x: Self::F, from: Self::F, below: Self::F) -> u32 {
        (0..FOUR).fold(0, |bits, lane| bits | u32::from((x[lane] >= from[lane]) & (x[lane] < below[lane])) << lane)
    }

    #[inline(always)]
    fn choose(self, chosen: u32, x: Self::F, y: Self::F) -> Self::F {
        std::array::from_fn(|lane| if chosen >> lane & 1 == 1 { x[lane] } else { y[lane] })
    }

    #[inline(always)]
    fn add_int(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.wrapping_add(b))
    }
    #[inline(always)]
    fn sub_int(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.wrapping_sub(b))
    }
    #[inline(always)]
    fn max_int(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a.max(b))
    }
    #[inline(always)]
    fn and(self, a: Self::I, b: Self::I) -> Self::I {
        lanes!(|a, b| a & b)
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, a: Self::I) -> Self::I {
        lanes!(|a| a << BITS)
    }
    #[inline(always)]
    fn shift_right<const BITS: u32>(self, a: Self::I) -> Self::I {
        lanes!(|a| (a.cast_unsigned() >> BITS).cast_signed())
    }

    #[inline(always)]
    fn bits(self, x: Self::F) -> Self::I {
        lanes!(|x| x.to_bits().cast_signed())
    }
    #[inline(always)]
    fn float_of_bits(self, x: Self::I) -> Self::F {
        lanes!(|x| f32::from_bits(x.cast_unsigned()))
    }
    #[inline(always)]
    fn truncate(self, x: Self::F) -> Self::I {
        lanes!(|x| x as i32)
    }
    #[inline(always)]
    fn float(self, x: Self::I) -> Self::F {
        lanes!(|x| x as f32)
    }
    #[inline(always)]
    fn sum_towards_zero(self, a: Self::I, b: Self::I) -> Self::F {
        lanes!(|a, b| f64::from_bits((f64::from(a) + f64::from(b)).to_bits() & OF_F32) as f32)
    }

    #[inline(always)]
    fn count_from(self, first: i32) -> Self::I {
        std::array::from_fn(|lane| first.wrapping_add(lane as i32))
    }
    #[inline(always)]
    unsafe fn store_chosen(self, chosen: u32, x: Self::F, to_x: *mut f32, y: Self::I, to_y: *mut u32) {
        let mut count = 0;
        for lane in 0..FOUR {
            // SAFETY: the caller's promise; no more are counted than there are lanes before this one.
            unsafe {
                to_x.add(count).write(x[lane]);
                to_y.add(count).write(y[lane].cast_unsigned());
            }
            count += (chosen >> lane & 1) as usize;
        }
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut u32, x: Self::I) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::I>().write_unaligned(x) }
    }

    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn max_lane_int(self, x: Self::I) -> i32 {
        x.into_iter().fold(i32::MIN, i32::max)
    }
    #[inline(always)]
    fn sum(self, x: Self::I) -> u32 {
        x.into_iter().fold(0, |sum, lane| sum.wrapping_add(lane.cast_unsigned()))
    }
    #[inline(always)]
    unsafe fn store_sums(self, to: *mut u64, high: Self::I, low: Self::I) {
        let sums: [u64; FOUR] = lanes!(|high, low| (high as u64) << 24 | low as u64);
        // SAFETY: the caller's promise.
        unsafe { to.cast::<[u64; FOUR]>().write_unaligned(sums) }
    }
}
