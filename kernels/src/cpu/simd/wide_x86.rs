//! [`Wide`] on x86-64: eight lanes of AVX2, sixteen of AVX-512.

use super::wide::{OF_F32, Pass, Wide};
use std::arch::x86_64::*;

/// Proof that the processor has AVX2 and FMA: only [`Eight::detect`] creates one.
#[derive(Clone, Copy, Debug)]
pub(super) struct Eight(());

/// Proof that the processor has AVX-512 F, BW, DQ and VL: only [`Sixteen::detect`] creates one.
#[derive(Clone, Copy, Debug)]
pub(in crate::cpu) struct Sixteen(());

impl Eight {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma")).then_some(Self(()))
    }

    pub(super) fn run<P: Pass>(self, pass: P) -> P::Out {
        #[inline(never)]
        #[target_feature(enable = "avx2,fma")]
        fn with_features<P: Pass>(wide: Eight, pass: P) -> P::Out {
            pass.call(wide)
        }
        // SAFETY: an `Eight` exists, so the processor has the instructions.
        unsafe { with_features(self, pass) }
    }
}

impl Sixteen {
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        has.then_some(Self(()))
    }

    pub(super) fn run<P: Pass>(self, pass: P) -> P::Out {
        #[inline(never)]
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn with_features<P: Pass>(wide: Sixteen, pass: P) -> P::Out {
            pass.call(wide)
        }
        // SAFETY: a `Sixteen` exists, so the processor has the instructions.
        unsafe { with_features(self, pass) }
    }
}

/// Intrinsics that touch no memory.
macro_rules! op {
    ($x:expr) => {
        // SAFETY: a value of the type exists, so the processor has the instructions.
        unsafe { $x }
    };
}

/// For each set of lanes, their indices one behind another.
static CHOSEN: [[u8; 8]; 256] = {
    let mut sets = [[0; 8]; 256];
    let mut set = 0;
    while set < 256 {
        let (mut lane, mut count) = (0, 0);
        while lane < 8 {
            if set >> lane & 1 == 1 {
                sets[set][count] = lane;
                count += 1;
            }
            lane += 1;
        }
        set += 1;
    }
    sets
};

/// The largest of four lanes.
///
/// # Safety
/// The processor has SSE4.1.
#[inline]
#[target_feature(enable = "sse4.1")]
fn largest(x: __m128) -> f32 {
    let pairs = _mm_max_ps(x, _mm_movehl_ps(x, x));
    _mm_cvtss_f32(_mm_max_ss(pairs, _mm_shuffle_ps::<1>(pairs, pairs)))
}

impl Wide for Eight {
    const LANES: usize = 8;
    type F = __m256;
    type I = __m256i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        op!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> __m256i {
        op!(_mm256_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m256 {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_int(self, from: *const i32) -> __m256i {
        // SAFETY: the caller's promise.
        unsafe { _mm256_loadu_si256(from.cast()) }
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
    unsafe fn store(self, to: *mut f32, x: __m256) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_ps(to, x) }
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        op!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn within(self, x: __m256, from: __m256, below: __m256) -> u32 {
        op!({
            let (least, most) = (_mm256_cmp_ps::<_CMP_GE_OQ>(x, from), _mm256_cmp_ps::<_CMP_LT_OQ>(x, below));
            _mm256_movemask_ps(_mm256_and_ps(least, most)).cast_unsigned()
        })
    }

    #[inline(always)]
    fn choose(self, chosen: u32, x: __m256, y: __m256) -> __m256 {
        op!({
            let bits = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
            let set = _mm256_and_si256(_mm256_set1_epi32(chosen.cast_signed()), bits);
            _mm256_blendv_ps(y, x, _mm256_castsi256_ps(_mm256_cmpeq_epi32(set, bits)))
        })
    }

    #[inline(always)]
    fn add_int(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_int(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_sub_epi32(a, b))
    }
    #[inline(always)]
    fn max_int(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_max_epi32(a, b))
    }
    #[inline(always)]
    fn and(self, a: __m256i, b: __m256i) -> __m256i {
        op!(_mm256_and_si256(a, b))
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, a: __m256i) -> __m256i {
        op!(_mm256_sllv_epi32(a, _mm256_set1_epi32(BITS as i32)))
    }
    #[inline(always)]
    fn shift_right<const BITS: u32>(self, a: __m256i) -> __m256i {
        op!(_mm256_srlv_epi32(a, _mm256_set1_epi32(BITS as i32)))
    }

    #[inline(always)]
    fn bits(self, x: __m256) -> __m256i {
        op!(_mm256_castps_si256(x))
    }
    #[inline(always)]
    fn float_of_bits(self, x: __m256i) -> __m256 {
        op!(_mm256_castsi256_ps(x))
    }
    #[inline(always)]
    fn truncate(self, x: __m256) -> __m256i {
        op!(_mm256_cvttps_epi32(x))
    }
    #[inline(always)]
    fn float(self, x: __m256i) -> __m256 {
        op!(_mm256_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn sum_towards_zero(self, a: __m256i, b: __m256i) -> __m256 {
        op!({
            let kept = _mm256_castsi256_pd(_mm256_set1_epi64x(OF_F32.cast_signed()));
            let half = |a, b| _mm256_and_pd(_mm256_add_pd(_mm256_cvtepi32_pd(a), _mm256_cvtepi32_pd(b)), kept);
            let low = half(_mm256_castsi256_si128(a), _mm256_castsi256_si128(b));
            let high = half(_mm256_extracti128_si256::<1>(a), _mm256_extracti128_si256::<1>(b));
            _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low))
        })
    }

    #[inline(always)]
    fn count_from(self, first: i32) -> __m256i {
        op!(_mm256_add_epi32(_mm256_set1_epi32(first), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7)))
    }
    #[inline(always)]
    unsafe fn store_chosen(self, chosen: u32, x: __m256, to_x: *mut f32, y: __m256i, to_y: *mut u32) {
        let lanes = CHOSEN[chosen as usize & 0xff];
        let lanes = op!(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(i64::from_le_bytes(lanes))));
        // SAFETY: the caller's promise.
        unsafe {
            _mm256_storeu_ps(to_x, _mm256_permutevar8x32_ps(x, lanes));
            _mm256_storeu_si256(to_y.cast(), _mm256_permutevar8x32_epi32(y, lanes));
        }
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut u32, x: __m256i) {
        // SAFETY: the caller's promise.
        unsafe { _mm256_storeu_si256(to.cast(), x) }
    }

    #[inline(always)]
    fn max_lane(self, x: __m256) -> f32 {
        op!(largest(_mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x))))
    }
    #[inline(always)]
    fn max_lane_int(self, x: __m256i) -> i32 {
        op!({
            let x = _mm_max_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_max_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_max_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x)))
        })
    }
    #[inline(always)]
    fn sum(self, x: __m256i) -> u32 {
        op!({
            let x = _mm_add_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256::<1>(x));
            let x = _mm_add_epi32(x, _mm_shuffle_epi32::<0b01_00_11_10>(x));
            _mm_cvtsi128_si32(_mm_add_epi32(x, _mm_shuffle_epi32::<0b10_11_00_01>(x))).cast_unsigned()
        })
    }
    #[inline(always)]
    unsafe fn store_sums(self, to: *mut u64, high: __m256i, low: __m256i) {
        let halves = op!([
            (_mm256_castsi256_si128(high), _mm256_castsi256_si128(low)),
            (_mm256_extracti128_si256::<1>(high), _mm256_extracti128_si256::<1>(low)),
        ]);
        for (half, (high, low)) in halves.into_iter().enumerate() {
            let sums =
                op!(_mm256_or_si256(_mm256_slli_epi64::<24>(_mm256_cvtepu32_epi64(high)), _mm256_cvtepu32_epi64(low)));
            // SAFETY: the caller's promise.
            unsafe { _mm256_storeu_si256(to.add(half * 4).cast(), sums) };
        }
    }
}

impl Wide for Sixteen {
    const LANES: usize = 16;
    type F = __m512;
    type I = __m512i;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        op!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    fn splat_int(self, x: i32) -> __m512i {
        op!(_mm512_set1_epi32(x))
    }
    #[inline(always)]
    unsafe fn load(self, from: *const f32) -> __m512 {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_ps(from) }
    }
    #[inline(always)]
    unsafe fn load_int(self, from: *const i32) -> __m512i {
        // SAFETY: the caller's promise.
        unsafe { _mm512_loadu_si512(from.cast()) }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        op!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    unsafe fn store(self, to: *mut f32, x: __m512) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_ps(to, x) }
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        op!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn within(self, x: __m512, from: __m512, below: __m512) -> u32 {
        op!(u32::from(_mm512_cmp_ps_mask::<_CMP_GE_OQ>(x, from) & _mm512_cmp_ps_mask::<_CMP_LT_OQ>(x, below)))
    }

    #[inline(always)]
    fn choose(self, chosen: u32, x: __m512, y: __m512) -> __m512 {
        op!(_mm512_mask_mov_ps(y, chosen as u16, x))
    }

    #[inline(always)]
    fn add_int(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_add_epi32(a, b))
    }
    #[inline(always)]
    fn sub_int(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_sub_epi32(a, b))
    }
    #[inline(always)]
    fn max_int(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_max_epi32(a, b))
    }
    #[inline(always)]
    fn and(self, a: __m512i, b: __m512i) -> __m512i {
        op!(_mm512_and_si512(a, b))
    }
    #[inline(always)]
    fn shift_left<const BITS: u32>(self, a: __m512i) -> __m512i {
        op!(_mm512_slli_epi32::<BITS>(a))
    }
    #[inline(always)]
    fn shift_right<const BITS: u32>(self, a: __m512i) -> __m512i {
        op!(_mm512_srli_epi32::<BITS>(a))
    }

    #[inline(always)]
    fn bits(self, x: __m512) -> __m512i {
        op!(_mm512_castps_si512(x))
    }
    #[inline(always)]
    fn float_of_bits(self, x: __m512i) -> __m512 {
        op!(_mm512_castsi512_ps(x))
    }
    #[inline(always)]
    fn truncate(self, x: __m512) -> __m512i {
        op!(_mm512_cvttps_epi32(x))
    }
    #[inline(always)]
    fn float(self, x: __m512i) -> __m512 {
        op!(_mm512_cvtepi32_ps(x))
    }
    #[inline(always)]
    fn sum_towards_zero(self, a: __m512i, b: __m512i) -> __m512 {
        op!({
            let kept = _mm512_castsi512_pd(_mm512_set1_epi64(OF_F32.cast_signed()));
            let half = |a, b| _mm512_and_pd(_mm512_add_pd(_mm512_cvtepi32_pd(a), _mm512_cvtepi32_pd(b)), kept);
            let low = half(_mm512_castsi512_si256(a), _mm512_castsi512_si256(b));
            let high = half(_mm512_extracti64x4_epi64::<1>(a), _mm512_extracti64x4_epi64::<1>(b));
            _mm512_insertf32x8::<1>(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high))
        })
    }

    #[inline(always)]
    fn count_from(self, first: i32) -> __m512i {
        op!({
            let lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            _mm512_add_epi32(_mm512_set1_epi32(first), lanes)
        })
    }
    #[inline(always)]
    unsafe fn store_chosen(self, chosen: u32, x: __m512, to_x: *mut f32, y: __m512i, to_y: *mut u32) {
        let chosen = chosen as u16;
        // SAFETY: the caller's promise.
        unsafe {
            _mm512_storeu_ps(to_x, _mm512_maskz_compress_ps(chosen, x));
            _mm512_storeu_si512(to_y.cast(), _mm512_maskz_compress_epi32(chosen, y));
        }
    }
    #[inline(always)]
    unsafe fn store_int(self, to: *mut u32, x: __m512i) {
        // SAFETY: the caller's promise.
        unsafe { _mm512_storeu_si512(to.cast(), x) }
    }

    #[inline(always)]
    fn max_lane(self, x: __m512) -> f32 {
        op!(_mm512_reduce_max_ps(x))
    }
    #[inline(always)]
    fn max_lane_int(self, x: __m512i) -> i32 {
        op!(_mm512_reduce_max_epi32(x))
    }
    #[inline(always)]
    fn sum(self, x: __m512i) -> u32 {
        op!(_mm512_reduce_add_epi32(x)).cast_unsigned()
    }
    #[inline(always)]
    unsafe fn store_sums(self, to: *mut u64, high: __m512i, low: __m512i) {
        let halves = op!([
            (_mm512_castsi512_si256(high), _mm512_castsi512_si256(low)),
            (_mm512_extracti64x4_epi64::<1>(high), _mm512_extracti64x4_epi64::<1>(low)),
        ]);
        for (half, (high, low)) in halves.into_iter().enumerate() {
            let sums =
                op!(_mm512_or_si512(_mm512_slli_epi64::<24>(_mm512_cvtepu32_epi64(high)), _mm512_cvtepu32_epi64(low)));
            // SAFETY: the caller's promise.
            unsafe { _mm512_storeu_si512(to.add(half * 8).cast(), sums) };
        }
    }
}
