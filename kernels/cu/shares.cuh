// Shares, and the order of tokens: kernels/src/sampling/{exp,shares,order}.rs. Every operation is rounded by itself; none is fused.
#pragma once

#include "types.cuh"

// e^x for x <= 0; 0 below -87.
__device__ inline f32 share_exp(f32 x) {
    constexpr f32 LOG2_E = 0x1.715476p+0f, LN2_HIGH = 0x1.62e4p-1f, LN2_LOW = 0x1.7f7d1cp-20f;
    constexpr f32 ROUND = 12582912.0f, UNDERFLOW = -87.0f;
    const f32 clamped = x < UNDERFLOW ? UNDERFLOW : x;
    const f32 shifted = __fadd_rn(__fmul_rn(clamped, LOG2_E), ROUND);
    const f32 k = __fsub_rn(shifted, ROUND);
    const f32 r = __fsub_rn(__fsub_rn(clamped, __fmul_rn(k, LN2_HIGH)), __fmul_rn(k, LN2_LOW));
    f32 series = 0x1.a01a02p-13f; // 1/7!
    series = __fadd_rn(__fmul_rn(series, r), 0x1.6c16c2p-10f);
    series = __fadd_rn(__fmul_rn(series, r), 0x1.111112p-7f);
    series = __fadd_rn(__fmul_rn(series, r), 0x1.555556p-5f);
    series = __fadd_rn(__fmul_rn(series, r), 0x1.555556p-3f);
    series = __fadd_rn(__fmul_rn(series, r), 0.5f);
    const f32 mantissa = __fadd_rn(1.0f, __fadd_rn(r, __fmul_rn(__fmul_rn(r, r), series)));
    const f32 power = __uint_as_float((__float_as_uint(shifted) + 127u) << 23);
    return x < UNDERFLOW ? 0.0f : __fmul_rn(mantissa, power);
}

// What logits are made into shares with.
struct Scale {
    f32 best;        // the largest logit
    f32 temperature;
};

// floor(exp((logit - best) / temperature) * 2^40)
__device__ inline u64 share_of(Scale scale, f32 logit) {
    f32 x = __fsub_rn(logit, scale.best);
    if (scale.temperature != 1.0f) x = __fdiv_rn(x, scale.temperature); // a quotient by 1 is the dividend
    const f32 scaled = __fmul_rn(share_exp(x), 65536.0f);
    const i32 high = __float2int_rz(scaled);
    const i32 low = __float2int_rz(__fmul_rn(__fsub_rn(scaled, __int2float_rn(high)), 16777216.0f));
    return u64(u32(high)) << 24 | u64(u32(low));
}

// An integer that orders like a number; both zeros are one.
__device__ inline u32 ordered(f32 logit) {
    u32 bits = __float_as_uint(logit);
    if (bits << 1 == 0) bits = 0;
    return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// The number, except that a zero is +0.
__device__ inline f32 unordered(u32 order) { return __uint_as_float(order >> 31 ? order & 0x7fffffffu : ~order); }

// A number that orders like (logit, then lower id). No two keys are equal, and none is 0.
__device__ inline u64 key_of(f32 logit, u32 token) { return u64(ordered(logit)) << 32 | u64(~token); }
__device__ inline u32 token_of(u64 key) { return ~u32(key); }
__device__ inline f32 logit_of(u64 key) { return unordered(u32(key >> 32)); }
