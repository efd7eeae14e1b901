// The widened rows of the embedding.
#include "numerics.cuh"
#include "params/model.h"

constexpr i32 THREADS = 256;

template <class T> __device__ inline void embed(const Embed &p) {
    const i32 row = i32(blockIdx.x), slot = p.slots[row];
    f32 *__restrict__ out = p.residual + i64(row) * p.hidden;
    if (slot < 0) {
        for (i32 i = i32(threadIdx.x); i < p.hidden; i += THREADS) out[i] = 0.0f;
        return;
    }
    i32 id = p.ids[row];
    if (id < 0) id = p.sampled[slot];
    if (id < 0 || id >= p.vocab) id = 0;
    const u16 *__restrict__ in = p.table + i64(id) * p.hidden;
    for (i32 i = i32(threadIdx.x); i < p.hidden; i += THREADS) out[i] = widened<T>(in[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) embed_bf16(const __grid_constant__ Embed p) { embed<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) embed_f16(const __grid_constant__ Embed p) { embed<F16>(p); }
