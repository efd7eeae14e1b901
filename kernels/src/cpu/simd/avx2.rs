//! AVX2 + FMA.

#[cfg(not(target_arch = "x86_64"))]
pub(in crate::cpu) use absent::Avx2;
#[cfg(target_arch = "x86_64")]
pub(in crate::cpu) use present::Avx2;

#[cfg(target_arch = "x86_64")]
mod present {
    use super::super::{Kernel, Simd};
    use crate::numerics::{EXP_BIAS, EXP_MAGIC};
    use std::arch::x86_64::*;

    /// Proof that the processor has AVX2 and FMA: only [`Avx2::detect`] creates one.
    #[derive(Clone, Copy)]
    pub(in crate::cpu) struct Avx2(());

    impl Avx2 {
        /// The level, if this processor has it.
        pub(in crate::cpu) fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
        }
    }

    /// Never inlined, so that register spills in a kernel's loops do not depend on the code around it.
    #[inline(never)]
    #[target_feature(enable = "avx2,fma")]
    fn with_features<K: Kernel>(simd: Avx2, kernel: K) -> K::Out {
        kernel.call(simd)
    }

    /// Intrinsics that touch no memory.
    macro_rules! op {
        ($x:expr) => {
            // SAFETY: an `Avx2` exists, so the processor has the instructions.
            unsafe { $x }
        };
    }

    impl Simd for Avx2 {
        type F = __m256;

        fn run<K: Kernel>(self, kernel: K) -> K::Out {
            op!(with_features(self, kernel))
        }

        #[inline(always)]
        fn splat(self, x: f32) -> __m256 {
            op!(_mm256_set1_ps(x))
        }
        #[inline(always)]
        unsafe fn load(self, from: *const f32) -> __m256 {
            // SAFETY: the caller's promise.
            unsafe { _mm256_loadu_ps(from) }
        }
        #[inline(always)]
        unsafe fn store(self, to: *mut f32, x: __m256) {
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_ps(to, x) }
        }
        #[inline(always)]
        unsafe fn load_bf16(self, from: *const u16) -> __m256 {
            // SAFETY: the caller's promise.
            let x = unsafe { _mm_loadu_si128(from.cast()) };
            op!(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(x))))
        }
        #[inline(always)]
        unsafe fn load_bf16_pairs(self, from: *const u32) -> [__m256; 2] {
            // SAFETY: the caller's promise.
            let x = unsafe { _mm256_load_si256(from.cast()) };
            op!([
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(x)),
                _mm256_castsi256_ps(_mm256_and_si256(x, _mm256_set1_epi32(0xffff_0000_u32 as i32))),
            ])
        }

        #[inline(always)]
        fn prefetch<T>(self, at: *const T) {
            op!(_mm_prefetch::<_MM_HINT_T1>(at.cast()))
        }

        #[inline(always)]
        fn add(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_add_ps(a, b))
        }
        #[inline(always)]
        fn sub(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_sub_ps(a, b))
        }
        #[inline(always)]
        fn mul(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_mul_ps(a, b))
        }
        #[inline(always)]
        fn div(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_div_ps(a, b))
        }
        #[inline(always)]
        fn fma(self, a: __m256, b: __m256, c: __m256) -> __m256 {
            op!(_mm256_fmadd_ps(a, b, c))
        }
        #[inline(always)]
        fn min(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_min_ps(a, b))
        }
        #[inline(always)]
        fn max(self, a: __m256, b: __m256) -> __m256 {
            op!(_mm256_max_ps(a, b))
        }
        #[inline(always)]
        fn powers_of_two(self, shifted: __m256) -> [__m256; 2] {
            op!({
                let magic = _mm256_set1_epi32(EXP_MAGIC.to_bits() as i32);
                let bias = _mm256_set1_epi32(EXP_BIAS);
                let n = _mm256_sub_epi32(_mm256_castps_si256(shifted), magic);
                let half = _mm256_srai_epi32::<1>(n);
                let rest = _mm256_sub_epi32(n, half);
                [
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(half, bias))),
                    _mm256_castsi256_ps(_mm256_slli_epi32::<23>(_mm256_add_epi32(rest, bias))),
                ]
            })
        }

        #[inline(always)]
        fn merge(self, x: __m256) -> f32 {
            op!({
                let halves = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let quarters = _mm_add_ps(halves, _mm_movehl_ps(halves, halves));
                _mm_cvtss_f32(_mm_add_ss(quarters, _mm_shuffle_ps::<1>(quarters, quarters)))
            })
        }
        #[inline(always)]
        fn merge8(self, [a, b, c, d, e, f, g, h]: [__m256; 8]) -> __m256 {
            // Result lane of each vector through the three levels: low halves end in lanes 0..4, high halves in 4..8.
            let (ae, bf) = (self.halves(a, e), self.halves(b, f));
            let (cg, dh) = (self.halves(c, g), self.halves(d, h));
            let (left, right) = (self.quarters(ae, bf), self.quarters(cg, dh));
            op!({
                let even = _mm256_shuffle_ps::<0b10_00_10_00>(left, right);
                let odd = _mm256_shuffle_ps::<0b11_01_11_01>(left, right);
                _mm256_add_ps(even, odd)
            })
        }
        #[inline(always)]
        fn max_lane(self, x: __m256) -> f32 {
            op!({
                let halves = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
                let quarters = _mm_max_ps(halves, _mm_movehl_ps(halves, halves));
                _mm_cvtss_f32(_mm_max_ss(quarters, _mm_shuffle_ps::<1>(quarters, quarters)))
            })
        }
    }

    impl Avx2 {
        /// Lanes `l` and `l + 4` added: four sums of `x`, then four of `y`.
        #[inline(always)]
        fn halves(self, x: __m256, y: __m256) -> __m256 {
            op!(_mm256_add_ps(_mm256_permute2f128_ps::<0x20>(x, y), _mm256_permute2f128_ps::<0x31>(x, y)))
        }
        /// Lanes `l` and `l + 2` of each half added: per half two sums of `x`, then two of `y`.
        #[inline(always)]
        fn quarters(self, x: __m256, y: __m256) -> __m256 {
            op!({
                let (x, y) = (_mm256_castps_pd(x), _mm256_castps_pd(y));
                let low = _mm256_castpd_ps(_mm256_unpacklo_pd(x, y));
                let high = _mm256_castpd_ps(_mm256_unpackhi_pd(x, y));
                _mm256_add_ps(low, high)
            })
        }
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod absent {
    use super::super::{Kernel, Portable, Simd};

    /// Never created on this architecture; for the type checker it equals [`Portable`].
    #[derive(Clone, Copy)]
    pub(in crate::cpu) struct Avx2(Portable);

    impl Avx2 {
        /// Always `None` on this architecture.
        pub(in crate::cpu) fn detect() -> Option<Self> {
            None
        }
    }

    impl Avx2 {
        pub(in crate::cpu) fn run<K: Kernel>(self, kernel: K) -> K::Out {
            self.0.run(kernel)
        }
    }
}
