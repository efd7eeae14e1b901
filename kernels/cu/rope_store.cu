// Norms of heads, rotation, and the store of keys and values. One warp has one head of one row.
#include "kv.cuh"
#include "numerics.cuh"

constexpr i32 THREADS = 256, WARPS = THREADS / WARP;
constexpr i32 HEAD_DIM_MAX = 256, RUNS = HEAD_DIM_MAX / WARP;

// x[i] * r * gain[i] for a head of the warp. Lane l of the sum of 512 is element l, so run r of the lanes is elements 32 r to 32 r + 31,
// one element a thread. Lanes from head_dim on are +0.
__device__ inline void norm_head(f32 (&x)[RUNS], const f32 *gain, f32 eps, i32 head_dim, i32 lane) {
    f32 runs[RUNS];
#pragma unroll
    for (i32 run = 0; run < RUNS; run++) runs[run] = halved(__fmaf_rn(x[run], x[run], 0.0f));
    // Of 16 runs the upper 8 are +0, which changes no sum of squares: the tree starts with runs i and i + 4.
#pragma unroll
    for (i32 step = RUNS / 2; step > 0; step /= 2) {
#pragma unroll
        for (i32 run = 0; run < step; run++) runs[run] = __fadd_rn(runs[run], runs[run + step]);
    }
    const f32 r = reciprocal_norm(runs[0], head_dim, eps);
#pragma unroll
    for (i32 run = 0; run < RUNS; run++) {
        const i32 i = run * WARP + lane;
        if (i < head_dim) x[run] = __fmul_rn(__fmul_rn(x[run], r), gain[i]);
    }
}

template <class T> __device__ inline void rope_store(const RopeStore &p) {
    __shared__ f32 heads[WARPS][HEAD_DIM_MAX];
    const i32 row = i32(blockIdx.x), slot = p.slots[row];
    const i32 lane = i32(threadIdx.x) % WARP, warp = i32(threadIdx.x) / WARP, head = i32(blockIdx.y) * WARPS + warp;
    if (slot < 0 || head >= p.heads + 2 * p.kv_heads) return;
    const i32 position = p.positions[row];
    u16 *in = p.qkv + (i64(row) * (p.heads + 2 * p.kv_heads) + head) * p.head_dim, *out = in;
    const bool of_query = head < p.heads, of_value = head >= p.heads + p.kv_heads;
    if (!of_query) {
        const i32 kv_head = head - p.heads - (of_value ? p.kv_heads : 0);
        u8 *plane = of_value ? p.kv.v : p.kv.k;
        out = reinterpret_cast<u16 *>(plane + token_offset(p.kv, slot, position)) + i64(kv_head) * p.head_dim;
    }
    if (of_value) {
        for (i32 i = lane; i < p.head_dim; i += WARP) out[i] = in[i];
        return;
    }
    f32 x[RUNS];
#pragma unroll
    for (i32 run = 0; run < RUNS; run++) {
        const i32 i = run * WARP + lane;
        x[run] = i < p.head_dim ? widened<T>(in[i]) : 0.0f;
    }
    const f32 *gain = of_query ? p.q_gain : p.k_gain;
    if (gain) norm_head(x, gain, of_query ? p.q_eps : p.k_eps, p.head_dim, lane);
    // Both elements of a pair may be another thread's.
    f32 *shared = heads[warp];
#pragma unroll
    for (i32 run = 0; run < RUNS; run++) shared[run * WARP + lane] = x[run];
    __syncwarp();
    const i32 half = p.rope_dim / 2;
    const f32 *cos = p.cos + i64(position) * half, *sin = p.sin + i64(position) * half;
    for (i32 i = lane; i < half; i += WARP) {
        const f32 a = shared[i], b = shared[i + half], c = cos[i], s = sin[i];
        out[i] = rounded<T>(__fmaf_rn(a, c, -__fmul_rn(b, s)));
        out[i + half] = rounded<T>(__fmaf_rn(b, c, __fmul_rn(a, s)));
    }
    for (i32 i = 2 * half + lane; i < p.head_dim; i += WARP) out[i] = rounded<T>(shared[i]);
}

extern "C" __global__ void __launch_bounds__(THREADS) rope_store_bf16(const __grid_constant__ RopeStore p) { rope_store<Bf16>(p); }
extern "C" __global__ void __launch_bounds__(THREADS) rope_store_f16(const __grid_constant__ RopeStore p) { rope_store<F16>(p); }
