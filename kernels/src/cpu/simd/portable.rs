//! Eight lanes in plain Rust, for processors without a specific level.

use super::{Kernel, LANES, Simd};
use crate::numerics::{EXP_BIAS, EXP_MAGIC, lanes};

/// Plain Rust; requires no instructions.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

/// Applies `f` lane by lane.
macro_rules! lanes {
    (|$($x:ident),+| $f:expr) => {{
        let mut out = [0.0; LANES];
        for (l, out) in out.iter_mut().enumerate() {
            $(let $x = $x[l];)+
            *out = $f;
        }
        out
    }};
}

impl Simd for Portable {
    type F = [f32; LANES];

    fn run<K: Kernel>(self, kernel: K) -> K::Out {
        kernel.call(self)
    }

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> Self::F {
        // SAFETY: the caller's promise.
        unsafe { from.cast::<Self::F>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: Self::F) {
        // SAFETY: the caller's promise.
        unsafe { to.cast::<Self::F>().write_unaligned(x) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, from: *const u16) -> Self::F {
        // SAFETY: the caller's promise.
        let x = unsafe { from.cast::<[u16; LANES]>().read_unaligned() };
        lanes!(|x| f32::from_bits(u32::from(x) << 16))
    }
    #[inline(always)]
    unsafe fn load_bf16_pairs(self, from: *const u32) -> [Self::F; 2] {
        // SAFETY: the caller's promise.
        let x = unsafe { from.cast::<[u32; LANES]>().read() };
        [lanes!(|x| f32::from_bits(x << 16)), lanes!(|x| f32::from_bits(x & 0xffff_0000))]
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
        lanes!(|a, b, c| a.mul_add(b, c))
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        lanes!(|a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn powers_of_two(self, shifted: Self::F) -> [Self::F; 2] {
        let (mut low, mut high) = ([0.0; LANES], [0.0; LANES]);
        for l in 0..LANES {
            let n = (shifted[l].to_bits() as i32).wrapping_sub(EXP_MAGIC.to_bits() as i32);
            let half = n >> 1;
            low[l] = f32::from_bits((half.wrapping_add(EXP_BIAS) as u32) << 23);
            high[l] = f32::from_bits((n.wrapping_sub(half).wrapping_add(EXP_BIAS) as u32) << 23);
        }
        [low, high]
    }

    #[inline(always)]
    fn merge(self, x: Self::F) -> f32 {
        lanes::merge(x)
    }
    #[inline(always)]
    fn merge8(self, x: [Self::F; 8]) -> Self::F {
        lanes!(|x| lanes::merge(x))
    }
    #[inline(always)]
    fn max_lane(self, x: Self::F) -> f32 {
        x.into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}
