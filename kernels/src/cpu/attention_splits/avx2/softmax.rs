//! Scores of a block to weights, 8 tokens at a time.

use super::QUERY_GROUP;
use crate::cpu::attention_splits::lanes::{greatest, merged};
use crate::cpu::attention_splits::states::Softmax;
use crate::cpu::attention_splits::work::{QUERIES_MAX, Scores, chain_ends};
use crate::numerics::flushed::GROUP;
use crate::numerics::{ATTENTION_BLOCK, EXP_LN2_HI, EXP_LN2_LO, EXP_LO, EXP_LOG2E, EXP_MAGIC, EXP_POLY};
use std::arch::x86_64::*;

/// Vectors of a block.
const VECTORS: usize = ATTENTION_BLOCK / 8;

/// Words of the weights of one query.
const WEIGHTS: usize = ATTENTION_BLOCK / GROUP * QUERY_GROUP;

/// The polynomial is computed times 2^64, so that it stays normal when an exponent of -150 or more is added.
const RAISED: f32 = f32::from_bits((127 + 64) << 23);

/// [`crate::numerics::exp()`] of values that are not above 0, or NaN whose lower 16 bits are 0, as those of bf16 and of operations are.
///
/// The clamp from above is left out, since it changes no such value. The power of two is added to the exponent, which is exact, and the
/// product with 2^-64 rounds once, as the last of the two products does that the definition takes.
#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp(x: __m256) -> __m256 {
    let x = _mm256_max_ps(_mm256_set1_ps(EXP_LO), x); // The second operand if it is NaN.
    let magic = _mm256_set1_ps(EXP_MAGIC);
    let shifted = _mm256_fmadd_ps(x, _mm256_set1_ps(EXP_LOG2E), magic);
    let n = _mm256_sub_ps(shifted, magic);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_HI), x);
    let r = _mm256_fmadd_ps(n, _mm256_set1_ps(-EXP_LN2_LO), r);
    let mut p = _mm256_set1_ps(EXP_POLY[0] * RAISED);
    for c in &EXP_POLY[1..] {
        p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(*c * RAISED));
    }
    // The low bits of `shifted` are n, and those of the magic number above them are zero up to bit 21.
    let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    let raised = _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(p), exponent));
    _mm256_mul_ps(raised, _mm256_set1_ps(1.0 / RAISED))
}

/// Rounds to bf16, nearest even, subnormals kept. Not for negative numbers; a NaN becomes 0x7fc0.
#[inline]
#[target_feature(enable = "avx2")]
fn round(x: __m256) -> __m256 {
    // A NaN, of either sign, would overflow into a number.
    let bits = _mm256_min_epu32(_mm256_castps_si256(x), _mm256_set1_epi32(0x7fc0_0000));
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let nearest = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
    _mm256_castsi256_ps(_mm256_and_si256(nearest, _mm256_set1_epi32(0xffff_0000_u32 as i32)))
}

/// Takes one more block into the states: its weights, packed as `[query][WEIGHTS]` words, and the factors of what was before.
///
/// In passes over all queries, since each is a chain of dependent operations that is longer than the processor looks ahead.
///
/// # Safety
/// The processor has the instructions; `dots` and `weights` have room for as many queries as `seen`, `states` and `factors`, which are as
/// many, and at most [`QUERIES_MAX`].
#[target_feature(enable = "avx2,fma")]
pub(super) unsafe fn weigh(block: &Scores<'_>, states: &mut [Softmax], weights: *mut u32, factors: &mut [f32]) {
    let count = block.seen.len();
    assert!(count <= QUERIES_MAX && states.len() == count && factors.len() == count);
    let absent = _mm256_set1_ps(f32::NEG_INFINITY);
    let mut maxima = [0.0; QUERIES_MAX];
    for (query, (seen, state)) in block.seen.iter().zip(states.iter()).enumerate() {
        // SAFETY: the vectors of the query.
        let scores = unsafe { block.dots.add(query * ATTENTION_BLOCK) };
        let mut most = [absent; VECTORS];
        for (i, most) in most.iter_mut().enumerate() {
            // SAFETY: as above.
            unsafe {
                *most = _mm256_mul_ps(_mm256_load_ps(scores.add(8 * i)), _mm256_set1_ps(block.scale));
                _mm256_store_ps(scores.add(8 * i), *most);
            }
        }
        if seen.len() < ATTENTION_BLOCK {
            // Tokens that are not attended to are below every score, so their weight is exactly +0.
            // SAFETY: as above.
            unsafe {
                let scores = std::slice::from_raw_parts_mut(scores, ATTENTION_BLOCK);
                scores[..seen.start].fill(f32::NEG_INFINITY);
                scores[seen.end..].fill(f32::NEG_INFINITY);
                most = std::array::from_fn(|i| _mm256_load_ps(scores.as_ptr().add(8 * i)));
            }
        }
        let four: [_; 4] = std::array::from_fn(|i| _mm256_max_ps(most[i], most[i + 4]));
        let most = _mm256_max_ps(_mm256_max_ps(four[0], four[1]), _mm256_max_ps(four[2], four[3]));
        maxima[query] = greatest(most).max(state.max);
    }
    let mut lanes = [_mm256_setzero_ps(); QUERIES_MAX];
    for (query, seen) in block.seen.iter().enumerate() {
        let max = _mm256_set1_ps(maxima[query]);
        let mut rounded = [_mm256_setzero_ps(); VECTORS];
        for (i, rounded) in rounded.iter_mut().enumerate() {
            // SAFETY: as above, and the words of the query.
            unsafe {
                let score = _mm256_load_ps(block.dots.add(query * ATTENTION_BLOCK + 8 * i));
                *rounded = round(exp(_mm256_sub_ps(score, max)));
                let to = weights.add(query * WEIGHTS + 8 * i / GROUP * QUERY_GROUP + 8 * i % GROUP);
                _mm256_storeu_ps(to.cast(), *rounded);
            }
        }
        for group in 0..ATTENTION_BLOCK / GROUP {
            let ends = chain_ends(seen.end.saturating_sub(group * GROUP));
            // SAFETY: the last two words of the group.
            unsafe {
                let to = weights.add(query * WEIGHTS + group * QUERY_GROUP + GROUP);
                to.cast::<[f32; 2]>().write_unaligned(ends);
            }
        }
        lanes[query] = eight_lanes(&rounded);
    }
    for (query, (state, factor)) in states.iter_mut().zip(factors).enumerate() {
        *factor = state.add(maxima[query], merged(lanes[query]));
    }
}

/// The eight lanes of the sum of a block's weights.
#[inline]
#[target_feature(enable = "avx2")]
fn eight_lanes(rounded: &[__m256; VECTORS]) -> __m256 {
    // No weight is -0, so that the first one needs no addition to +0.
    let (mut low, mut high) = (rounded[0], rounded[1]);
    for i in (2..VECTORS).step_by(2) {
        low = _mm256_add_ps(low, rounded[i]);
        high = _mm256_add_ps(high, rounded[i + 1]);
    }
    _mm256_add_ps(low, high)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::attention_splits::exp_check::check_exp;

    #[test]
    fn exp_has_the_bits_of_the_scalar_one() {
        if !crate::cpu::SimdLevel::Avx2Fma.available() {
            return baton_skips::skipped(baton_skips::Need::Avx2, "exp of AVX2", "the processor has no AVX2");
        }
        // SAFETY: available, see above.
        check_exp(f32::NEG_INFINITY, |x, out| unsafe { exp_of(x, out) });
    }

    #[target_feature(enable = "avx2,fma")]
    unsafe fn exp_of(x: &[f32; 8], out: &mut [f32; 8]) {
        // SAFETY: one vector each.
        unsafe { _mm256_storeu_ps(out.as_mut_ptr(), exp(_mm256_loadu_ps(x.as_ptr()))) };
    }
}
