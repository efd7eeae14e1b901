// Known answers: the instructions that the numerics classes and sampling rest on, over operands in memory, for the host to compare with its
// own twins of them. Not part of a step.

#include "blake3.cuh"
#include "numerics.cuh"
#include "params/known.h"
#include "shares.cuh"

namespace {

__device__ inline u32 pair(const u16 *at) { return *reinterpret_cast<const u32 *>(at); }

// A warp has a tile of 16 rows and 8 columns.
template <class T> __device__ inline void known_mma(const KnownTiles &p) {
    const i32 tile = blockIdx.x, lane = threadIdx.x, row = lane / 4, column = lane % 4 * 2;
    const u16 *low = p.a + (i64(tile) * 16 + row) * p.k, *high = low + i64(8) * p.k;
    const u16 *right = p.b + (i64(tile) * 8 + row) * p.k; // here `row` is a column of the tile
    const f32 *c = p.c + i64(tile) * 128 + row * 8 + column;
    f32 sum[4] = {c[0], c[1], c[64], c[65]};
    for (i32 k = column; k < p.k; k += 16) {
        const u32 a[4] = {pair(low + k), pair(high + k), pair(low + k + 8), pair(high + k + 8)};
        mma<T>(sum, a, pair(right + k), pair(right + k + 8));
    }
    f32 *d = p.d + i64(tile) * 128 + row * 8 + column;
    d[0] = sum[0];
    d[1] = sum[1];
    d[64] = sum[2];
    d[65] = sum[3];
}

__device__ inline u64 answer(const KnownCase &p) {
    const f32 x = __uint_as_float(u32(p.a)), y = __uint_as_float(u32(p.b)), z = __uint_as_float(p.c);
    switch (p.operation) {
    case KNOWN_ADD: return __float_as_uint(__fadd_rn(x, y));
    case KNOWN_SUB: return __float_as_uint(__fsub_rn(x, y));
    case KNOWN_MUL: return __float_as_uint(__fmul_rn(x, y));
    case KNOWN_FMA: return __float_as_uint(__fmaf_rn(x, y, z));
    case KNOWN_DIV: return __float_as_uint(__fdiv_rn(x, y));
    case KNOWN_SQRT: return __float_as_uint(__fsqrt_rn(x));
    case KNOWN_LARGER: return __float_as_uint(max_or_nan(x, y));
    case KNOWN_TO_BF16: return rounded<Bf16>(x);
    case KNOWN_TO_F16: return rounded<F16>(x);
    case KNOWN_TO_BF16_PAIR: return rounded_pair<Bf16>(x, x);
    case KNOWN_TO_F16_PAIR: return rounded_pair<F16>(x, x);
    case KNOWN_OF_BF16: return __float_as_uint(widened<Bf16>(u16(p.a)));
    case KNOWN_OF_F16: return __float_as_uint(widened<F16>(u16(p.a)));
    case KNOWN_TO_I32: return u32(__float2int_rz(x));
    case KNOWN_OF_I32: return __float_as_uint(__int2float_rn(i32(u32(p.a))));
    case KNOWN_OF_U32: return __float_as_uint(__uint2float_rn(u32(p.a)));
    case KNOWN_EXP: return __float_as_uint(exp_(x));
    case KNOWN_EXP2: return __float_as_uint(exp2_(x));
    case KNOWN_SHARE_EXP: return __float_as_uint(share_exp(x));
    case KNOWN_SHARE: return share_of({x, y}, z);
    case KNOWN_ORDERED: return ordered(x);
    case KNOWN_PART: return __double2ull_ru(__dmul_rn(__longlong_as_double(i64(p.a)), __ull2double_rn(p.b)));
    case KNOWN_OF_U64: return u64(__double_as_longlong(__ull2double_rn(p.a)));
    case KNOWN_RANDOM: return random_bits(p.a, p.c, p.b);
    }
    return ~u64(0);
}

} // namespace

extern "C" __global__ void __launch_bounds__(32) known_mma_bf16(KnownTiles p) { known_mma<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(32) known_mma_f16(KnownTiles p) { known_mma<F16>(p); }

extern "C" __global__ void __launch_bounds__(256) known_cases(KnownCases p) {
    const i32 i = i32(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < p.count) p.answers[i] = answer(p.cases[i]);
}
