//! Scores of a block to weights, 16 tokens at a time.

use super::Sums;
use super::pack::{round, words};
use crate::cpu::attention_splits::lanes::{self, merged};
use crate::cpu::attention_splits::states::Softmax;
use crate::cpu::attention_splits::work::{QUERIES_MAX, Scores, chain_ends};
use crate::cpu::simd::avx512::exp_parts;
use crate::numerics::ATTENTION_BLOCK;
use crate::numerics::flushed::GROUP;
use std::arch::x86_64::*;

/// Vectors of a block.
const VECTORS: usize = ATTENTION_BLOCK / 16;

/// Scores so far below the maximum weigh nothing. Rounded to bf16 their weights would be subnormal, which products take as zero, and beside the
/// maximum's weight of 1 they change no sum. A subnormal result of VSCALEFPS may take 200 cycles.
const LEAST: f32 = -87.5;

/// [`crate::numerics::exp()`] of values that are not above 0, or NaN; zero below [`LEAST`].
#[inline]
#[target_feature(enable = "avx512f")]
fn exp(x: __m512) -> __m512 {
    let weighs = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, _mm512_set1_ps(LEAST));
    let (p, n) = exp_parts(x);
    _mm512_maskz_scalef_ps(weighs, p, n)
}

/// Takes one more block into the states: its weights, packed as `[query][groups][Sums::QUERY_GROUP]` words, and the factors of what was before.
///
/// In passes over all queries, since each is a chain of dependent operations that is longer than the processor looks ahead.
///
/// # Safety
/// The processor has the instructions; `dots` and `weights` have room for as many queries as `seen`, `states` and `factors`, which are as
/// many, and at most [`QUERIES_MAX`].
#[target_feature(enable = "avx512f,avx512bw,avx512dq")]
pub(super) unsafe fn weigh<S: Sums>(
    block: &Scores<'_>,
    states: &mut [Softmax],
    weights: *mut u32,
    factors: &mut [f32],
) {
    let count = block.seen.len();
    assert!(count <= QUERIES_MAX && states.len() == count && factors.len() == count);
    // Tokens that are not attended to are below every score, so their weight is exactly +0.
    let absent = _mm512_set1_ps(f32::NEG_INFINITY);
    let mut maxima = [0.0; QUERIES_MAX];
    for (query, (seen, state)) in block.seen.iter().zip(states.iter()).enumerate() {
        let mask = (u64::MAX << seen.start) & (u64::MAX >> (ATTENTION_BLOCK - seen.end));
        let mut scores = [absent; VECTORS];
        for (i, scores) in scores.iter_mut().enumerate() {
            // SAFETY: four vectors of the query.
            unsafe {
                let at = block.dots.add(query * ATTENTION_BLOCK + 16 * i);
                let scale = _mm512_set1_ps(block.scale);
                *scores = _mm512_mask_mul_ps(absent, (mask >> (16 * i)) as u16, _mm512_load_ps(at), scale);
                _mm512_store_ps(at, *scores);
            }
        }
        let most = _mm512_max_ps(_mm512_max_ps(scores[0], scores[1]), _mm512_max_ps(scores[2], scores[3]));
        maxima[query] = greatest(most).max(state.max);
    }
    let mut lanes = [_mm256_setzero_ps(); QUERIES_MAX];
    for (query, seen) in block.seen.iter().enumerate() {
        let mut rounded = [_mm512_setzero_si512(); VECTORS];
        for (i, rounded) in rounded.iter_mut().enumerate() {
            // SAFETY: as above.
            let score = unsafe { _mm512_load_ps(block.dots.add(query * ATTENTION_BLOCK + 16 * i)) };
            *rounded = round(exp(_mm512_sub_ps(score, _mm512_set1_ps(maxima[query]))));
        }
        for group in 0..VECTORS / 2 {
            // SAFETY: the caller's promise.
            unsafe {
                let to = weights.add((query * (ATTENTION_BLOCK / GROUP) + group) * S::QUERY_GROUP);
                _mm512_storeu_si512(to.cast(), words::<S>(rounded[2 * group], rounded[2 * group + 1]));
                if !S::TILES {
                    let ends = chain_ends(seen.end.saturating_sub(group * GROUP));
                    to.add(16).cast::<[f32; 2]>().write_unaligned(ends);
                }
            }
        }
        lanes[query] = eight_lanes(&rounded);
    }
    for (query, (state, factor)) in states.iter_mut().zip(factors).enumerate() {
        *factor = state.add(maxima[query], merged(lanes[query]));
    }
}

/// The largest of 16 lanes.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn greatest(x: __m512) -> f32 {
    lanes::greatest(_mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)))
}

/// The eight lanes of the sum of a block's weights, which are in the high halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn eight_lanes(rounded: &[__m512i; VECTORS]) -> __m256 {
    let high = _mm512_set1_epi32(0xffff_0000_u32 as i32);
    // No weight is -0, so that the first one needs no addition to +0.
    let mut lanes = _mm512_castsi512_ps(_mm512_and_si512(rounded[0], high));
    for rounded in &rounded[1..] {
        lanes = _mm512_add_ps(lanes, _mm512_castsi512_ps(_mm512_and_si512(*rounded, high)));
    }
    _mm256_add_ps(_mm512_castps512_ps256(lanes), _mm512_extractf32x8_ps::<1>(lanes))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::attention_splits::exp_check::check_exp;

    #[test]
    fn exp_has_the_bits_of_the_scalar_one() {
        if !crate::cpu::SimdLevel::Avx512.available() {
            return baton_skips::skipped(baton_skips::Need::Avx512, "exp of AVX-512", "the processor has no AVX-512");
        }
        // SAFETY: available, see above.
        check_exp(LEAST, |x, out| unsafe { exp_of(x, out) });
    }

    #[target_feature(enable = "avx512f")]
    unsafe fn exp_of(x: &[f32; 16], out: &mut [f32; 16]) {
        // SAFETY: one vector each.
        unsafe { _mm512_storeu_ps(out.as_mut_ptr(), exp(_mm512_loadu_ps(x.as_ptr()))) };
    }
}
