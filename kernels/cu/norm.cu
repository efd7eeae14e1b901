// RMSNorm of the residual stream, rounded for a product. One CTA a row: thread l is lane l of the sum.
#include "numerics.cuh"
#include "params/model.h"

constexpr i32 THREADS = 512, RUNS = THREADS / 32;

template <class T> __device__ inline void norm(const RmsNorm &p) {
    __shared__ f32 runs[RUNS];
    const i32 thread = i32(threadIdx.x);
    const f32 *__restrict__ x = p.x + i64(blockIdx.x) * p.cols, *__restrict__ gain = p.gain;
    u16 *__restrict__ out = p.out + i64(blockIdx.x) * p.cols;
    f32 lane = 0.0f;
#pragma unroll 4
    for (i32 i = thread; i < p.cols; i += THREADS) lane = __fmaf_rn(x[i], x[i], lane);
    lane = halved(lane);
    if (thread % 32 == 0) runs[thread / 32] = lane;
    __syncthreads();
    // Every warp merges the 16 runs: i and i + 8, then i + 4, and so on. Its upper half has them once more.
    f32 ss = runs[thread % RUNS];
#pragma unroll
    for (i32 step = RUNS / 2; step > 0; step /= 2) ss = __fadd_rn(ss, __shfl_xor_sync(~0u, ss, step));
    const f32 r = reciprocal_norm(ss, p.cols, p.eps);
#pragma unroll 4
    for (i32 i = thread; i < p.cols; i += THREADS) out[i] = rounded<T>(__fmul_rn(__fmul_rn(x[i], r), gain[i]));
}

extern "C" __global__ void __launch_bounds__(THREADS) norm_bf16(const __grid_constant__ RmsNorm p) { norm<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) norm_f16(const __grid_constant__ RmsNorm p) { norm<F16>(p); }
