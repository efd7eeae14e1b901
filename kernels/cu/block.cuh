// Sums and extremes over a CTA of 1,024 threads: 32 warps of 32 lanes. All threads call each of these together.
#pragma once

#include "types.cuh"

constexpr u32 WARP = 32;
constexpr u32 WARPS = 32;
constexpr u32 THREADS = WARP * WARPS;
constexpr u32 ALL_LANES = 0xffffffffu;

__device__ inline u32 lane_id() { return threadIdx.x % WARP; }
__device__ inline u32 warp_id() { return threadIdx.x / WARP; }

struct Add {
    __device__ u64 operator()(u64 a, u64 b) const { return a + b; }
};
struct Largest {
    __device__ u64 operator()(u64 a, u64 b) const { return a > b ? a : b; }
};
struct Smallest {
    __device__ u64 operator()(u64 a, u64 b) const { return a < b ? a : b; }
};

template <class Merge> __device__ inline u64 merge_warp(u64 x, Merge merge) {
    for (u32 apart = WARP / 2; apart > 0; apart /= 2) x = merge(x, __shfl_xor_sync(ALL_LANES, x, apart));
    return x;
}

// Merges the values of all threads. `lanes` is shared memory.
template <class Merge> __device__ inline u64 merge_block(u64 x, u64 (&lanes)[WARPS], Merge merge) {
    x = merge_warp(x, merge);
    __syncthreads(); // a use before may still be read
    if (lane_id() == 0) lanes[warp_id()] = x;
    __syncthreads();
    return merge_warp(lanes[lane_id()], merge);
}

// The sum of this lane's value and those of the lanes before.
__device__ inline u64 running_warp(u64 x) {
    for (u32 apart = 1; apart < WARP; apart *= 2) {
        const u64 other = __shfl_up_sync(ALL_LANES, x, apart);
        x += lane_id() >= apart ? other : 0;
    }
    return x;
}

struct Running {
    u64 before; // the values of the threads before this one
    u64 all;
};

__device__ inline Running running_block(u64 x, u64 (&lanes)[WARPS]) {
    const u64 within = running_warp(x);
    __syncthreads(); // a use before may still be read
    if (lane_id() == WARP - 1) lanes[warp_id()] = within;
    __syncthreads();
    const u64 of_warp = lanes[lane_id()], warps = running_warp(of_warp);
    const u64 before = __shfl_sync(ALL_LANES, warps - of_warp, warp_id());
    return {before + within - x, __shfl_sync(ALL_LANES, warps, WARPS - 1)};
}
