// Changes of slots: block tables and other small arrays, token counts.

#include "params/sampling.h"

extern "C" __global__ void __launch_bounds__(256) scatter(Scatter p) {
    const i32 step = gridDim.x * blockDim.x;
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.count; i += step) {
        const i32 index = p.pairs[2 * i64(i)];
        if (index >= 0) p.array[index] = p.pairs[2 * i64(i) + 1];
    }
}

extern "C" __global__ void __launch_bounds__(256) clear_counts(ClearCounts p) {
    u32 *counts = p.counts + i64(p.row) * p.vocab;
    const i32 step = gridDim.x * blockDim.x;
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.vocab; i += step) counts[i] = 0;
}

// Behind clear_counts of the same row. Bit SEEN and the count below it do not disturb each other.
extern "C" __global__ void __launch_bounds__(256) count_tokens(CountTokens p) {
    u32 *counts = p.counts + i64(p.row) * p.vocab;
    const i32 step = gridDim.x * blockDim.x;
    for (i32 i = blockIdx.x * blockDim.x + threadIdx.x; i < p.len; i += step) {
        const i32 token = p.tokens[i];
        if (u32(token) >= u32(p.vocab)) continue;
        atomicOr(&counts[token], SEEN);
        if (i >= p.prompt_len) atomicAdd(&counts[token], 1u);
    }
}
