// Scalar arithmetic of the tensor-core classes: docs/numerics.md.
//
// Kernels are compiled without contraction (-fmad=false), so every rounding is where it is written.
#pragma once

#include "ptx.cuh"

constexpr f32 LOG2_E = 1.44269504088896340736f;
// 1.5 * 2^23: adding it leaves the nearest integer in the low bits of the significand.
constexpr f32 MAGIC = 12582912.0f;
constexpr u32 MAGIC_BITS = 0x4b400000;
constexpr i32 BIAS = 127;

__device__ inline f32 minus_infinity() { return __uint_as_float(0xff800000); }

// Wraps, as in the reference, for exponents out of range.
__device__ inline f32 power_of_two(i32 n) { return __uint_as_float((u32(n) + u32(BIAS)) << 23); }

// kernels/src/numerics/exp.rs
__device__ inline f32 exp_(f32 x) {
    // Written as comparisons, since fmin and fmax lose a NaN.
    x = 89.0f < x ? 89.0f : x;
    x = -104.0f > x ? -104.0f : x;
    const f32 shifted = __fmaf_rn(x, LOG2_E, MAGIC);
    const f32 whole = __fsub_rn(shifted, MAGIC);
    const f32 ln2_high = __uint_as_float(0x3f317200), ln2_low = __uint_as_float(0x35bfbe8e);
    const f32 r = __fmaf_rn(whole, -ln2_low, __fmaf_rn(whole, -ln2_high, x));
    f32 p = 1.0f / 5040.0f;
    p = __fmaf_rn(p, r, 1.0f / 720.0f);
    p = __fmaf_rn(p, r, 1.0f / 120.0f);
    p = __fmaf_rn(p, r, 1.0f / 24.0f);
    p = __fmaf_rn(p, r, 1.0f / 6.0f);
    p = __fmaf_rn(p, r, 0.5f);
    p = __fmaf_rn(p, r, 1.0f);
    p = __fmaf_rn(p, r, 1.0f);
    const i32 n = i32(__float_as_uint(shifted) - MAGIC_BITS);
    const i32 half = n >> 1;
    return __fmul_rn(__fmul_rn(p, power_of_two(half)), power_of_two(i32(u32(n) - u32(half))));
}

// kernels/src/numerics/exp2.rs
__device__ inline f32 exp2_(f32 x) {
    // A comparison with NaN is false, so that NaN stays.
    x = x < -127.0f ? -127.0f : x;
    const f32 shifted = __fadd_rn(x, MAGIC);
    const f32 r = __fsub_rn(x, __fsub_rn(shifted, MAGIC));
    f32 p = __uint_as_float(0x3aaddd0a);
    p = __fmaf_rn(p, r, __uint_as_float(0x3c1e7544));
    p = __fmaf_rn(p, r, __uint_as_float(0x3d635ba9));
    p = __fmaf_rn(p, r, __uint_as_float(0x3e75fcde));
    p = __fmaf_rn(p, r, __uint_as_float(0x3f317215));
    p = __fmaf_rn(p, r, 1.0f);
    return __fmul_rn(p, power_of_two(i32(__float_as_uint(shifted) - MAGIC_BITS)));
}

// kernels/src/numerics/exp.rs
__device__ inline f32 silu(f32 x) { return __fdiv_rn(x, __fadd_rn(1.0f, exp_(-x))); }

// The activation of the MLP.
__device__ inline f32 gated(f32 gate, f32 up) { return __fmul_rn(silu(gate), up); }

// What values with the maximum `max` are multiplied with beside those of `of_all`.
__device__ inline f32 decay(f32 max, f32 of_all, f32 factor) { return exp2_(__fmul_rn(__fsub_rn(max, of_all), factor)); }

// The same between blocks. Equal maxima give 1, so a block in which a row attends to nothing changes nothing, even while both are minus
// infinity. Where the written order has NaN instead (both infinite, after a token that counts), O and L already are NaN.
__device__ inline f32 block_decay(f32 max, f32 of_all, f32 factor) { return max == of_all ? 1.0f : decay(max, of_all, factor); }

// The weight of a token with this score; top = -(max * factor).
__device__ inline f32 weight(f32 score, f32 factor, f32 top) { return exp2_(__fmaf_rn(score, factor, top)); }

// 1 / sqrt(ss / cols + eps), each operation rounded.
__device__ inline f32 reciprocal_norm(f32 ss, i32 cols, f32 eps) {
    return __fdiv_rn(1.0f, __fsqrt_rn(__fadd_rn(__fdiv_rn(ss, f32(cols)), eps)));
}

// A run of 32 lanes merged by halves: i and i + 16, then i + 8, and so on. Both partners add the same two values, so every lane has the
// sum.
__device__ inline f32 halved(f32 x) {
#pragma unroll
    for (i32 step = 16; step > 0; step /= 2) x = __fadd_rn(x, __shfl_xor_sync(~0u, x, step));
    return x;
}
